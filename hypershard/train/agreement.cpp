// Why: see agreement.h. The healthy path costs one small all-reduce.
#include "hypershard/train/agreement.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <new>
#include <sstream>
#include <string_view>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include "hypershard/core/log.h"
#include "hypershard/train/exit_code.h"

namespace hypershard::train {
namespace {

constexpr const char* kUnit = "train.agreement";

// Returns the smallest value over all ranks.
std::int64_t smallest(comm::Communicator& ranks, std::int64_t value) {
  at::Tensor tensor = at::zeros({1}, at::kDouble);
  tensor.fill_(static_cast<double>(value));
  ranks.all_reduce(tensor, comm::ReduceOp::kMin, kUnit)->wait();
  return static_cast<std::int64_t>(*tensor.const_data_ptr<double>());
}

std::int64_t from_rank(comm::Communicator& ranks, int root, std::int64_t value) {
  at::Tensor tensor = at::empty({1}, at::kLong);
  *tensor.mutable_data_ptr<std::int64_t>() = value;
  ranks.broadcast(tensor, root, kUnit)->wait();
  return *tensor.const_data_ptr<std::int64_t>();
}

std::string text_from_rank(comm::Communicator& ranks, int root, const std::string& text) {
  const std::int64_t length = from_rank(ranks, root, static_cast<std::int64_t>(text.size()));
  at::Tensor bytes = at::zeros({length}, at::kByte);
  if (ranks.rank() == root) {
    std::copy(text.begin(), text.end(), bytes.mutable_data_ptr<std::uint8_t>());
  }
  ranks.broadcast(bytes, root, kUnit)->wait();
  const auto* data = bytes.const_data_ptr<std::uint8_t>();
  return std::string(data, data + length);
}

// What belongs to a host rather than to the job.
bool may_differ(std::string_view setting) {
  return setting.starts_with("run.threads ") || setting.starts_with("run.pin_cores ") ||
         setting.starts_with("data.path ") || setting.starts_with("log.");
}

// Lists what all ranks must have alike in a resolved configuration: `model.dim = 64`.
std::vector<std::string> job_settings(const std::string& toml) {
  std::istringstream lines(toml);
  std::vector<std::string> settings;
  std::string section;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with('[')) {
      section = line.substr(1, line.find(']') - 1);
    } else if (const std::string setting = section + "." + line;
               !line.empty() && !may_differ(setting)) {
      settings.push_back(setting);
    }
  }
  return settings;
}

}  // namespace

LocalFailure failure_of(const std::exception& error) {
  if (const auto* own = dynamic_cast<const Error*>(&error)) {
    return {.failed = true, .code = own->code(), .text = user_text(*own)};
  }
  const auto* torch = dynamic_cast<const c10::Error*>(&error);
  const std::string text = torch == nullptr ? error.what() : torch->what_without_backtrace();
  const bool is_memory_short = dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
                               text.find("can't allocate memory") != std::string::npos;
  if (!is_memory_short) {
    return {.failed = true, .code = ErrorCode::kInternal, .text = text};
  }
  const char* hint =
      "\n  hint: take a smaller model, fewer rows (batch.global_batch) or more micro-batches "
      "(batch.accumulation); `hypershard explain` tells the memory of a rank";
  return {
      .failed = true,
      .code = ErrorCode::kInvalidArgument,
      .text = "memory is too short for this configuration: " + text + hint
  };
}

LocalFailure catch_failure(const std::function<void()>& action) {
  try {
    action();
    return {};
  } catch (const CommError&) {
    throw;
  } catch (const AgreedFailure&) {
    throw;
  } catch (const std::exception& error) {
    return failure_of(error);
  }
}

void agree(comm::Communicator& ranks, const LocalFailure& failure) {
  std::int64_t first = 0;
  try {
    first = smallest(ranks, failure.failed ? ranks.rank() : ranks.size());
  } catch (const CommError&) {
    if (failure.failed) {
      HS_LOG_ERROR("this rank's own failure, which its peers could not learn of: ", failure.text);
    }
    throw;
  }
  if (first == ranks.size()) {
    return;
  }
  const int root = static_cast<int>(first);
  const auto code =
      static_cast<ErrorCode>(from_rank(ranks, root, static_cast<std::int64_t>(failure.code)));
  const std::string text = text_from_rank(ranks, root, failure.text);
  throw AgreedFailure(code, text);  // raw-throw: the text has rank and place already
}

void agree_on_config(comm::Communicator& ranks, const std::string& toml) {
  const std::vector<std::string> theirs = job_settings(text_from_rank(ranks, 0, toml));
  const std::vector<std::string> ours = job_settings(toml);
  run_together(ranks, [&] {
    const auto [our, their] = std::mismatch(ours.begin(), ours.end(), theirs.begin(), theirs.end());
    HS_CHECK(
        our == ours.end() && their == theirs.end(),
        "train: the configurations of ranks differ: rank ",
        ranks.rank(),
        " has ",
        our == ours.end() ? "less" : *our,
        ", rank 0 has ",
        their == theirs.end() ? "less" : *their,
        HS_HINT("give every rank the same file, the same --set, HS_SEED and HS_SHARE")
    );
  });
}

void run_together(comm::Communicator& ranks, const std::function<void()>& action) {
  agree(ranks, catch_failure(action));
}

void run_on_first(comm::Communicator& ranks, const std::function<void()>& action) {
  agree(ranks, ranks.rank() == 0 ? catch_failure(action) : LocalFailure{});
}

}  // namespace hypershard::train
