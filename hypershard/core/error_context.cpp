// Why: the rank and the chain of steps that errors and log lines name; see error_context.h.
// The process's rank is one atomic word so that rank and world size never come from two settings.
#include "hypershard/core/error_context.h"

#include <atomic>
#include <cstdint>
#include <utility>

namespace hypershard {
namespace {

constexpr std::uint64_t kUnset = ~std::uint64_t{0};

std::atomic<std::uint64_t> process_rank{kUnset};
thread_local ErrorRank thread_rank;
thread_local const ErrorContext* innermost = nullptr;

}  // namespace

void set_error_rank(int rank, int world_size) {
  const std::uint64_t packed = static_cast<std::uint64_t>(static_cast<std::uint32_t>(rank)) << 32 |
                               static_cast<std::uint32_t>(world_size);
  process_rank.store(rank < 0 ? kUnset : packed, std::memory_order_relaxed);
}

ErrorRank error_rank() {
  if (thread_rank.rank >= 0) {
    return thread_rank;
  }
  const std::uint64_t packed = process_rank.load(std::memory_order_relaxed);
  if (packed == kUnset) {
    return {};
  }
  return {
      .rank = static_cast<int>(packed >> 32),
      .world_size = static_cast<int>(packed & 0xffffffffU),
  };
}

ThreadErrorRank::ThreadErrorRank(int rank, int world_size) : previous_(thread_rank) {
  thread_rank = {.rank = rank, .world_size = world_size};
}

ThreadErrorRank::~ThreadErrorRank() {
  thread_rank = previous_;
}

ErrorContext::ErrorContext(std::string&& step)
    : kept_(std::move(step)), step_(kept_), outer_(innermost) {
  innermost = this;
}

ErrorContext::ErrorContext(std::string_view step) : step_(step), outer_(innermost) {
  innermost = this;
}

ErrorContext::~ErrorContext() {
  innermost = outer_;
}

std::string error_context() {
  std::string text;
  for (const ErrorContext* context = innermost; context != nullptr; context = context->outer()) {
    text.insert(
        0, text.empty() ? std::string(context->step()) : std::string(context->step()) + " > "
    );
  }
  return text;
}

}  // namespace hypershard
