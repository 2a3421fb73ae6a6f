// Why: a failure that one rank notices (a full disk, a bad file, a loss that is not a number) must
// end all ranks alike, with one message, instead of leaving the others to wait for it.
#pragma once

#include <exception>
#include <functional>
#include <stdexcept>
#include <string>

#include "hypershard/comm/communicator.h"
#include "hypershard/core/error.h"

namespace hypershard::train {

/// A failure that all ranks know of: each may leave in order, and one of them tells the user.
class AgreedFailure : public std::runtime_error {
 public:
  AgreedFailure(ErrorCode code, const std::string& text) : std::runtime_error(text), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

/// What went wrong on this rank, if anything did.
struct LocalFailure {
  bool failed = false;
  ErrorCode code = ErrorCode::kInternal;
  std::string text = {};
};

/// Returns what an exception amounts to for the user. Too little memory counts as bad input: what
/// was asked for does not fit.
LocalFailure failure_of(const std::exception& error);

/// Runs `action` and catches what it throws, but for communication errors: those cannot be agreed
/// on and pass through.
LocalFailure catch_failure(const std::function<void()>& action);

/// Throws on every rank if any rank brings a failure, with the text of the lowest such rank.
///
/// Collective: all ranks of `ranks`.
/// Errors: AgreedFailure; CommError.
void agree(comm::Communicator& ranks, const LocalFailure& failure);

/// Refuses ranks whose resolved configurations differ, but for what belongs to a host (threads,
/// place of the data, logs). `toml` is RunConfigFile::to_toml() of this rank.
///
/// Collective: all ranks of `ranks`.
/// Errors: as agree, InvalidArgument that names the first key that differs.
void agree_on_config(comm::Communicator& ranks, const std::string& toml);

/// Runs `action` on this rank and agrees on the outcome. `action` may hold collectives.
/// Collective: all ranks of `ranks`.
/// Errors: as agree.
void run_together(comm::Communicator& ranks, const std::function<void()>& action);

/// Runs `action` on rank 0 of `ranks` only and agrees on the outcome.
/// Collective: all ranks of `ranks`.
/// Errors: as agree.
void run_on_first(comm::Communicator& ranks, const std::function<void()>& action);

}  // namespace hypershard::train
