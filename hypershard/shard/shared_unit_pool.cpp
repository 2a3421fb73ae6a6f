// See shared_unit_pool.h.
#include "hypershard/shard/shared_unit_pool.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <utility>

#include "hypershard/core/error.h"
#include "hypershard/shard/buffer_pool.h"

namespace hypershard::shard {

namespace {

constexpr std::size_t kNoSlot = ~std::size_t{0};
// An entry holds a ticket and, below it, a buffer.
constexpr int kSlotBits = 20;
constexpr std::uint64_t kSlotMask = (std::uint64_t{1} << kSlotBits) - 1;

using Word = std::atomic_ref<std::uint64_t>;
static_assert(Word::is_always_lock_free, "words are shared between processes");

class Landing final : public comm::Work {
 public:
  Landing(std::shared_ptr<comm::EpochBoard> board, std::uint64_t epoch, std::string unit)
      : board_(std::move(board)), epoch_(epoch), unit_(std::move(unit)) {}

  bool test() override { return board_->reached(0, epoch_); }
  void wait() override {
    if (!test()) {
      board_->wait_all(0, epoch_, "unshard from other supernodes", unit_);
    }
  }

 private:
  std::shared_ptr<comm::EpochBoard> board_;
  std::uint64_t epoch_;
  std::string unit_;
};

}  // namespace

SharedUnitPool::SharedUnitPool(
    comm::Communicator& ranks,
    const std::vector<std::int64_t>& unit_bytes,
    Counters* counters,
    bool poison
)
    : counters_(counters),
      poison_(poison),
      num_ranks_(static_cast<std::uint64_t>(ranks.size())),
      rank_(ranks.rank()),
      size_of_(unit_bytes.size(), 0) {
  std::map<std::int64_t, std::size_t> num_units;
  for (const std::int64_t bytes : unit_bytes) {
    num_units[bytes] += bytes > 0 ? 1 : 0;
  }
  // Two a unit; and a rank may hold one for a moment, before it sees that another came first.
  std::int64_t total = 0;
  for (const auto& [bytes, count] : num_units) {
    const std::size_t slots = bytes > 0 ? 2 * count + num_ranks_ : 0;
    sizes_.push_back({.bytes = bytes, .first_slot = num_slots_, .num_slots = slots});
    num_slots_ += slots;
    num_entries_ += 2 * count;
    total += align_bytes(bytes) * static_cast<std::int64_t>(slots);
  }
  HS_ASSERT(num_slots_ < kSlotMask, "shard: ", num_slots_, " shared buffers of units");
  for (std::size_t u = 0; u < unit_bytes.size(); ++u) {
    const auto at = std::find_if(sizes_.begin(), sizes_.end(), [&](const SizeClass& size) {
      return size.bytes == unit_bytes[u];
    });
    size_of_[u] = static_cast<std::size_t>(at - sizes_.begin());
  }
  num_entries_ = std::max<std::size_t>(1, num_entries_);
  const std::size_t num_words = num_entries_ + 2 * num_slots_;
  words_ = ranks.allocate_shared(
      static_cast<std::int64_t>(num_words * sizeof(std::uint64_t)), "who holds which unit buffer"
  );
  landed_ = ranks.make_epoch_board(1, "unit buffers");
  make_buffers(ranks.allocate_sparse(total, "unit buffers"));
}

void SharedUnitPool::make_buffers(const std::shared_ptr<comm::SharedBuffer>& memory) {
  std::int64_t at = 0;
  for (const SizeClass& size : sizes_) {
    for (std::size_t i = 0; i < size.num_slots; ++i) {
      // Kernels take non-const pointers even to read; the pages behind them are read-only.
      auto* const read = const_cast<std::byte*>(memory->read());
      buffers_.push_back(
          {.write = flat_tensor(memory->write() + at, size.bytes, at::kByte, memory),
           .read = flat_tensor(read + at, size.bytes, at::kByte, memory),
           .slot = buffers_.size()}
      );
      at += align_bytes(size.bytes);
    }
  }
  was_used_.assign(buffers_.size(), false);
}

std::uint64_t& SharedUnitPool::entry(std::uint64_t ticket) const {
  return reinterpret_cast<std::uint64_t*>(words_->write())[ticket % num_entries_];
}

std::uint64_t& SharedUnitPool::holder(std::size_t slot) const {
  return reinterpret_cast<std::uint64_t*>(words_->write())[num_entries_ + slot];
}

std::uint64_t& SharedUnitPool::num_released(std::size_t slot) const {
  return reinterpret_cast<std::uint64_t*>(words_->write())[num_entries_ + num_slots_ + slot];
}

// So that the ranks' counts add up to the one copy there is.
std::int64_t SharedUnitPool::own_share(std::int64_t bytes) const {
  const auto ranks = static_cast<std::int64_t>(num_ranks_);
  return bytes / ranks + (rank_ < bytes % ranks ? 1 : 0);
}

const SharedUnitPool::Buffer& SharedUnitPool::acquire(int unit) {
  const SizeClass& size = sizes_[size_of_[static_cast<std::size_t>(unit)]];
  const std::size_t slot = slot_of(++num_tickets_, size);
  HS_ASSERT(
      slot >= size.first_slot && slot < size.first_slot + size.num_slots,
      "shard: unshard ",
      num_tickets_,
      " of this rank is of unit ",
      unit,
      ", which needs ",
      size.bytes,
      " bytes, but another rank of the supernode took a buffer of another size for it: they "
      "unshard units in different orders"
  );
  if (!was_used_[slot]) {
    was_used_[slot] = true;
    used_bytes_ += size.bytes;
  }
  counters_->live_unsharded_bytes += own_share(size.bytes);
  counters_->peak_unsharded_bytes =
      std::max(counters_->peak_unsharded_bytes, counters_->live_unsharded_bytes);
  return buffers_[slot];
}

std::size_t SharedUnitPool::slot_of(std::uint64_t ticket, const SizeClass& size) {
  const Word word(entry(ticket));
  while (true) {
    std::uint64_t found = word.load(std::memory_order_acquire);
    if (found >> kSlotBits == ticket) {
      return static_cast<std::size_t>(found & kSlotMask);
    }
    HS_ASSERT(
        found >> kSlotBits < ticket,
        "shard: unshard ",
        ticket,
        " finds its place in the table taken by unshard ",
        found >> kSlotBits
    );
    const std::size_t slot = claim(ticket, size, found);
    if (slot == kNoSlot) {
      continue;  // somebody has settled it
    }
    if (word.compare_exchange_strong(
            found, ticket << kSlotBits | slot, std::memory_order_acq_rel
        )) {
      return slot;
    }
    Word(holder(slot)).store(0, std::memory_order_release);
  }
}

// The lowest free buffer, so that few are ever touched.
std::size_t SharedUnitPool::claim(
    std::uint64_t ticket, const SizeClass& size, std::uint64_t entry_before
) {
  for (std::size_t slot = size.first_slot; slot < size.first_slot + size.num_slots; ++slot) {
    std::uint64_t free = 0;
    if (Word(holder(slot)).compare_exchange_strong(free, ticket, std::memory_order_acq_rel)) {
      return slot;
    }
  }
  HS_ASSERT(
      Word(entry(ticket)).load(std::memory_order_acquire) != entry_before,
      "shard: all ",
      size.num_slots,
      " shared buffers of ",
      size.bytes,
      " bytes are in use"
  );
  return kNoSlot;
}

comm::WorkPtr SharedUnitPool::land(std::string unit) {
  landed_->publish(0, ++num_landings_);
  return std::make_shared<Landing>(landed_, num_landings_, std::move(unit));
}

void SharedUnitPool::release(const Buffer& buffer) {
  counters_->live_unsharded_bytes -= own_share(buffer.write.numel());
  const Word released(num_released(buffer.slot));
  if (released.fetch_add(1, std::memory_order_acq_rel) + 1 < num_ranks_) {
    return;
  }
  if (poison_) {
    std::memset(
        buffer.write.mutable_data_ptr(), 0xff, static_cast<std::size_t>(buffer.write.numel())
    );
  }
  released.store(0, std::memory_order_relaxed);
  Word(holder(buffer.slot)).store(0, std::memory_order_release);
}

}  // namespace hypershard::shard
