// Why: see shared_handles.h. Arenas are cut from one region, so that one descriptor travels.
#include "hypershard/comm/shm/internal/shared_handles.h"

#include <utility>

#include "hypershard/core/error.h"

namespace hypershard::comm::internal {
namespace {

constexpr std::int64_t kPage = 4096;
constexpr std::int64_t kLine = 64;

std::int64_t round_up(std::int64_t value, std::int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace

RegisteredBuffer::RegisteredBuffer(
    std::weak_ptr<CollectiveEngine> engine, Region region, std::int64_t bytes
)
    : engine_(std::move(engine)), region_(std::move(region)), bytes_(bytes) {}

RegisteredBuffer::~RegisteredBuffer() {
  if (const auto engine = engine_.lock()) {
    engine->forget(region_.id);
  }
}

RegisteredArena::RegisteredArena(
    const std::shared_ptr<CollectiveEngine>& engine, std::int64_t bytes, std::string_view what
)
    : bytes_(bytes),
      stride_(round_up(bytes, kPage)),
      rank_(engine->sync().rank()),
      size_(engine->sync().size()),
      buffer_(std::make_unique<RegisteredBuffer>(
          engine, engine->allocate_region(stride_ * size_, what, RegionUse::kData), stride_ * size_
      )) {}

std::byte* RegisteredArena::local() const {
  return buffer_->write() + stride_ * rank_;
}

const std::byte* RegisteredArena::peer(int rank) const {
  HS_CHECK(
      rank >= 0 && rank < size_,
      "comm.arena: rank ",
      rank,
      " is out of range (expected 0 to ",
      size_ - 1,
      ")"
  );
  return buffer_->read() + stride_ * rank;
}

SharedEpochBoard::SharedEpochBoard(
    std::shared_ptr<CollectiveEngine> engine, int num_rows, std::string_view what
)
    : engine_(std::move(engine)),
      what_(what),
      num_rows_(num_rows),
      stride_(round_up(num_rows * static_cast<std::int64_t>(sizeof(std::uint64_t)), kLine)),
      memory_(engine_->allocate_control(stride_ * engine_->sync().size(), what)) {}

std::atomic<std::uint64_t>& SharedEpochBoard::counter(int rank, int row) const {
  std::byte* base = memory_->write() + stride_ * rank;
  return reinterpret_cast<std::atomic<std::uint64_t>*>(base)[row];
}

void SharedEpochBoard::check_row(int row) const {
  HS_CHECK(
      row >= 0 && row < num_rows_,
      "comm.epochs: row ",
      row,
      " of ",
      what_,
      " is out of range (expected 0 to ",
      num_rows_ - 1,
      ")"
  );
}

void SharedEpochBoard::publish(int row, std::uint64_t epoch) {
  check_row(row);
  auto& mine = counter(engine_->sync().rank(), row);
  if (mine.load(std::memory_order_relaxed) < epoch) {
    engine_->sync().publish(mine, epoch);
  }
}

bool SharedEpochBoard::reached(int row, std::uint64_t epoch) const {
  check_row(row);
  for (int rank = 0; rank < engine_->sync().size(); ++rank) {
    if (counter(rank, row).load(std::memory_order_seq_cst) < epoch) {
      return false;
    }
  }
  return true;
}

void SharedEpochBoard::wait_all(
    int row, std::uint64_t epoch, std::string_view what, std::string_view unit
) {
  check_row(row);
  const auto text = [&] {
    return concat_text(
        "epoch ",
        epoch,
        " of ",
        what,
        unit.empty() ? "" : " for unit '",
        unit,
        unit.empty() ? "" : "'",
        " on '",
        engine_->sync().info().name,
        "'"
    );
  };
  WaitText wait_text;
  wait_text.during = [&] { return "the wait for " + text(); };
  wait_text.missing = [&](int rank) {
    return concat_text(
        "has not reached ",
        text(),
        " (it is at ",
        counter(rank, row).load(std::memory_order_relaxed),
        ")"
    );
  };
  engine_->sync().wait_until(
      [&](Lag& lag) {
        for (int rank = 0; rank < engine_->sync().size(); ++rank) {
          if (counter(rank, row).load(std::memory_order_seq_cst) < epoch) {
            lag.add(rank);
          }
        }
        if (lag.ranks().empty()) {
          return Advance::kDone;
        }
        // A peer may need this rank's part of a collective before it gets to its epoch.
        Lag behind;
        const Advance state = engine_->progress(behind);
        for (const int rank : behind.ranks()) {
          lag.add(rank);
        }
        return state == Advance::kMoved ? Advance::kMoved : Advance::kStuck;
      },
      [&] { return wait_text; }
  );
}

}  // namespace hypershard::comm::internal
