// Why: scripts and schedulers act on the exit code, so each means one thing and has one name.
#pragma once

#include <string>

#include "hypershard/core/error.h"

namespace hypershard::train {

/// Exit codes of the program.
enum ExitCode : int {
  kExitOk = 0,
  kExitFoundWrong = 1,     ///< validation found a step that computes something else than the model
  kExitBadInput = 2,       ///< a config, an argument, a file or the data; or something not built in
  kExitCommunication = 3,  ///< a peer or a link failed, or a rank died
  kExitInternal = 4,       ///< our bug, or an error of a library that nobody foresaw
  kExitInterrupted = 130,  ///< Ctrl-C or SIGTERM; the run ended in order
};

/// Returns the exit code that an error leads to.
constexpr ExitCode exit_code_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kComm:
      return kExitCommunication;
    case ErrorCode::kInternal:
      return kExitInternal;
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kUnsupported:
    case ErrorCode::kIo:
      return kExitBadInput;
  }
  return kExitInternal;
}

/// Returns what a user should read of an error: place and expression matter only where the fault
/// may be ours.
inline std::string user_text(const Error& error) {
  const bool is_mistake = error.code() == ErrorCode::kInvalidArgument ||
                          error.code() == ErrorCode::kIo || error.code() == ErrorCode::kUnsupported;
  return is_mistake ? error.what_brief() : error.what();
}

}  // namespace hypershard::train
