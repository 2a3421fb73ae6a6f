// Why: one function walks the layout, so that size and addresses cannot disagree.
#include "hypershard/comm/shm/internal/control_block.h"

namespace hypershard::comm::internal {
namespace {

/// Hands out consecutive parts, each on cache lines of its own.
class Cursor {
 public:
  explicit Cursor(std::byte* base) : base_(base) {}

  template <class T>
  T* take(std::int64_t count) {
    constexpr std::int64_t kLine = 64;
    T* part = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + offset_);
    offset_ += (count * static_cast<std::int64_t>(sizeof(T)) + kLine - 1) / kLine * kLine;
    return part;
  }
  std::int64_t offset() const { return offset_; }

 private:
  std::byte* base_;
  std::int64_t offset_ = 0;
};

constexpr std::int64_t kCountersPerLine = 8;

}  // namespace

ControlBlock::ControlBlock(std::byte* base, int size)
    : size_(size), row_((size + kCountersPerLine - 1) / kCountersPerLine * kCountersPerLine) {
  Cursor cursor(base);
  failure_ = cursor.take<FailureRecord>(1);
  counters_ = cursor.take<RankCounters>(size);
  interest_ = cursor.take<std::atomic<std::uint64_t>>(size);
  consumed_ = cursor.take<std::atomic<std::uint64_t>>(size * row_);
  step_offsets_ = cursor.take<std::uint64_t>(size * static_cast<std::int64_t>(kStepRing));
  records_ = cursor.take<CallRecord>(size * static_cast<std::int64_t>(kCallRing));
  counts_ = cursor.take<std::int64_t>(size * static_cast<std::int64_t>(kCallRing) * size);
  bytes_ = cursor.offset();
}

std::int64_t ControlBlock::bytes(int size) {
  return ControlBlock(nullptr, size).bytes_;
}

}  // namespace hypershard::comm::internal
