// Why: see agreement.h. The healthy path costs one small all-reduce.
#include "hypershard/train/agreement.h"

#include <algorithm>
#include <cstdint>
#include <exception>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

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

}  // namespace

LocalFailure catch_failure(const std::function<void()>& action) {
  try {
    action();
    return {};
  } catch (const CommError&) {
    throw;
  } catch (const AgreedFailure&) {
    throw;
  } catch (const Error& error) {
    return {.failed = true, .code = error.code(), .text = user_text(error)};
  } catch (const std::exception& error) {
    return {.failed = true, .code = ErrorCode::kInternal, .text = error.what()};
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

void run_together(comm::Communicator& ranks, const std::function<void()>& action) {
  agree(ranks, catch_failure(action));
}

void run_on_first(comm::Communicator& ranks, const std::function<void()>& action) {
  agree(ranks, ranks.rank() == 0 ? catch_failure(action) : LocalFailure{});
}

}  // namespace hypershard::train
