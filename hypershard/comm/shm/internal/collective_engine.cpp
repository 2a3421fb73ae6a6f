// Why: the calling side of the algorithm: posting, waiting, regions, leaving.
// What a rank does for a posted call is in collective_steps.cpp.
#include "hypershard/comm/shm/internal/collective_engine.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "hypershard/core/error.h"
#include "hypershard/core/hash.h"

namespace hypershard::comm::internal {
namespace {

constexpr std::uint64_t kEverything = std::numeric_limits<std::uint64_t>::max();

std::int64_t element_bytes(const SharedCall& call) {
  return call.op == Op::kBarrier ? 1 : static_cast<std::int64_t>(call.input.element_size());
}

/// Returns the region that holds `address`, or null. `read_only` tells by which mapping.
const Region* find_region(const RegionTable& table, const std::byte* address, bool& read_only) {
  for (const Region& region : table) {
    const std::byte* read = region.buffer->read();
    const std::byte* write = region.buffer->write();
    const std::int64_t bytes = region.buffer->bytes();
    if (address >= write && address < write + bytes) {
      read_only = false;
      return &region;
    }
    if (address >= read && address < read + bytes) {
      read_only = true;
      return &region;
    }
  }
  return nullptr;
}

}  // namespace

CollectiveEngine::CollectiveEngine(
    GroupInfo info, std::shared_ptr<RegionSource> source, const SharedOptions& options
)
    : options_(options),
      sync_(std::move(info), std::move(source)),
      staging_(options.staging_bytes),
      regions_(std::make_shared<const RegionTable>()) {
  constexpr std::int64_t kWidestRun = 64 * 8;  // see Cut: a run is 64 elements at least
  const std::int64_t step = std::max(options_.step_bytes, kWidestRun * sync_.size());
  HS_CHECK_GE(
      options_.staging_bytes, 2 * step, "comm: staging must hold two steps of ", step, " bytes"
  );
  sync_.set_worker(this);
  staging_memory_ = allocate_control(options_.staging_bytes * sync_.size(), "staging");
}

std::shared_ptr<PendingCall> CollectiveEngine::post(SharedCall call) {
  sync_.check();
  IdleWork::adopt(shared_from_this());
  auto pending = std::make_shared<PendingCall>();
  pending->regions = regions();
  check_tensors(call, *pending->regions);
  wait_for_ring_room();
  pending->call = std::move(call);
  pending->sequence = next_sequence_++;
  fill_record(*pending);
  pending_.push_back(pending);
  busy_.begin();
  stage();
  sync_.publish(sync_.block().counters(sync_.rank()).posted, pending->sequence + 1);
  return pending;
}

void CollectiveEngine::check_tensors(const SharedCall& call, const RegionTable& table) const {
  if (call.op == Op::kBarrier) {
    return;
  }
  HS_SUPPORTED(
      call.input.device().is_cpu(),
      "comm.",
      sync_.source().name(),
      ": ",
      call.op,
      " of a tensor on ",
      call.input.device().str(),
      " on '",
      sync_.info().name,
      "' (expected cpu)",
      HS_HINT("shared memory joins CPU ranks only; use a c10d back end for devices")
  );
  bool read_only = false;
  const bool is_output = call.op != Op::kBroadcast || call.root != sync_.rank();
  if (is_output && call.output.numel() > 0) {
    const auto* address = static_cast<const std::byte*>(call.output.const_data_ptr());
    const Region* region = find_region(table, address, read_only);
    HS_CHECK(
        region == nullptr || !read_only || region->buffer->read() == region->buffer->write(),
        "comm.",
        sync_.source().name(),
        ": the output of ",
        call.op,
        " for unit '",
        call.unit,
        "' on '",
        sync_.info().name,
        "' lies in the read-only mapping of a shared buffer, at byte ",
        region == nullptr ? 0 : address - region->buffer->read(),
        HS_HINT("build the output tensor over SharedBuffer::write()")
    );
  }
}

void CollectiveEngine::wait_for_ring_room() {
  if (next_sequence_ < kCallRing) {
    return;
  }
  const std::uint64_t oldest = next_sequence_ - kCallRing;
  const ControlBlock& block = sync_.block();
  sync_.wait_until(
      [&](Lag& lag) {
        const Advance state = drive(kEverything, lag);
        if (block.counters(sync_.rank()).finished.load(std::memory_order_relaxed) <= oldest) {
          return state;
        }
        Lag late;
        for (int peer = 0; peer < sync_.size(); ++peer) {
          if (block.counters(peer).finished.load(std::memory_order_acquire) <= oldest) {
            late.add(peer);
            lag.add(peer);
          }
        }
        if (late.ranks().empty()) {
          return Advance::kDone;
        }
        return state == Advance::kMoved ? state : Advance::kStuck;
      },
      [this] { return wait_text(nullptr); }
  );
}

void CollectiveEngine::fill_record(PendingCall& pending) {
  const SharedCall& call = pending.call;
  const int rank = sync_.rank();
  const ControlBlock& block = sync_.block();
  CallRecord& record = block.record(rank, pending.sequence);
  record = {};
  record.sequence = pending.sequence;
  record.op = static_cast<std::uint8_t>(call.op);
  record.reduce = static_cast<std::uint8_t>(call.reduce.op);
  record.divisor = call.reduce.divisor;
  record.wire = static_cast<std::uint8_t>(call.reduce.wire.value_or(at::ScalarType::Undefined));
  record.root = call.root;
  record.unit_hash = hash_bytes(call.unit);
  std::memcpy(record.unit, call.unit.data(), std::min(call.unit.size(), kUnitText - 1));
  if (call.op != Op::kBarrier) {
    record.dtype = static_cast<std::uint8_t>(call.input.scalar_type());
    record.numel = call.op == Op::kAllGather ? call.output.numel() : call.input.numel();
  }
  std::int64_t* counts = block.counts(rank, pending.sequence);
  const auto& own = call.op == Op::kAllGather ? call.output_counts : call.input_counts;
  std::copy(own.begin(), own.end(), counts);
  pending.record = &record;
  pending.counts = counts;
  pending.cut = Cut(call.op, sync_.size(), record.numel, element_bytes(call), options_);
  pending.peers.assign(static_cast<std::size_t>(sync_.size()), nullptr);
  pending.taken.assign(static_cast<std::size_t>(sync_.size()), 0);
  pending.peers[static_cast<std::size_t>(rank)] = &record;
  if (call.op == Op::kAllReduce && !pending.cut.tiny()) {
    pending.first_reduced = next_reduced_;
    next_reduced_ += static_cast<std::uint64_t>(pending.cut.num_steps(counts, rank));
  }
  place_input(pending);
}

void CollectiveEngine::place_input(PendingCall& pending) {
  const SharedCall& call = pending.call;
  CallRecord& record = *pending.record;
  const bool sends = call.op != Op::kBarrier && sync_.size() > 1 && call.input.numel() > 0 &&
                     (call.op != Op::kBroadcast || call.root == sync_.rank());
  record.first_step = next_step_;
  if (!sends) {
    record.place = Place::kNone;
    return;
  }
  const auto* address = static_cast<const std::byte*>(call.input.const_data_ptr());
  const std::int64_t bytes = call.input.numel() * element_bytes(call);
  const bool small = call.op == Op::kAllReduce && bytes <= options_.small_bytes;
  bool read_only = false;
  const Region* region = small ? nullptr : find_region(*pending.regions, address, read_only);
  if (region != nullptr) {
    record.place = Place::kRegion;
    record.region = region->id;
    const std::byte* base = read_only ? region->buffer->read() : region->buffer->write();
    record.address = static_cast<std::uint64_t>(address - base);
  } else if (!small && sync_.source().reads_any_memory()) {
    record.place = Place::kAddress;
    record.address = reinterpret_cast<std::uint64_t>(address);
  } else {
    record.place = Place::kStaged;
    record.num_steps = pending.cut.num_steps(pending.counts, sync_.rank());
    next_step_ += static_cast<std::uint64_t>(record.num_steps);
  }
}

bool CollectiveEngine::test(PendingCall& pending) {
  const auto advance = [&](Lag& lag) {
    const Advance state = drive(pending.sequence, lag);
    return is_complete(pending, lag)  ? Advance::kDone
           : state == Advance::kMoved ? Advance::kMoved
                                      : Advance::kStuck;
  };
  Lag lag;
  if (advance(lag) == Advance::kDone) {
    return true;
  }
  sync_.glance(advance, [&] { return wait_text(&pending); });
  return is_complete(pending, lag);
}

void CollectiveEngine::wait(PendingCall& pending) {
  sync_.wait_until(
      [&](Lag& lag) {
        const Advance state = drive(pending.sequence, lag);
        return is_complete(pending, lag)  ? Advance::kDone
               : state == Advance::kMoved ? Advance::kMoved
                                          : Advance::kStuck;
      },
      [&] { return wait_text(&pending); }
  );
}

void CollectiveEngine::wait_released(PendingCall& pending) {
  sync_.wait_until(
      [&](Lag& lag) {
        const Advance state = drive(pending.sequence, lag);
        return pending.done && is_released(pending, lag) ? Advance::kDone
               : state == Advance::kMoved                ? Advance::kMoved
                                                         : Advance::kStuck;
      },
      [&] { return wait_text(&pending); }
  );
}

Advance CollectiveEngine::progress(Lag& lag) {
  sync_.check();
  return drive(kEverything, lag);
}

IdleWorker::State CollectiveEngine::work() {
  if (pending_.empty()) {
    return State::kNothing;
  }
  sync_.check();
  Lag unused;
  return drive(kEverything, unused) == Advance::kStuck ? State::kStuck : State::kMoved;
}

WaitText CollectiveEngine::wait_text(const PendingCall* pending) const {
  const auto subject = [this, pending]() -> const CallRecord* {
    const bool later = pending != nullptr && pending->done;
    return later || pending_.empty() ? (pending == nullptr ? nullptr : pending->record)
                                     : pending_.front()->record;
  };
  WaitText text;
  text.during = [this, subject] {
    const CallRecord* record = subject();
    return record == nullptr ? "a full ring of calls on '" + sync_.info().name + "'"
                             : call_text(*record, sync_.info().name);
  };
  text.missing = [this, pending, subject, during = text.during](int peer) {
    const CallRecord* record = subject();
    const std::uint64_t posted =
        sync_.block().counters(peer).posted.load(std::memory_order_acquire);
    if (record != nullptr && posted <= record->sequence) {
      return "has not joined " + during();
    }
    if (record == nullptr || (pending != nullptr && pending->done)) {
      return "has not read its part of " + during();
    }
    return "has joined but not done its part of " + during();
  };
  return text;
}

void CollectiveEngine::leave() noexcept {
  sync_.leave();
  std::vector<at::Tensor> tensors;
  for (const auto* calls : {&pending_, &unreleased_}) {
    for (const auto& pending : *calls) {
      tensors.push_back(pending->call.input);
      tensors.push_back(pending->call.output);
    }
  }
  sync_.source().keep(std::move(tensors));
}

std::shared_ptr<const RegionTable> CollectiveEngine::regions() const {
  const std::lock_guard lock(regions_mutex_);
  return regions_;
}

Region CollectiveEngine::allocate_region(std::int64_t bytes, std::string_view what, RegionUse use) {
  sync_.check();
  const std::uint32_t id = next_region_++;
  Region region{id, sync_.source().allocate(bytes, what, use, [this] {
                  Lag lag;
                  progress(lag);
                })};
  const std::lock_guard lock(regions_mutex_);
  auto table = std::make_shared<RegionTable>(*regions_);
  table->push_back(region);
  regions_ = std::move(table);
  return region;
}

std::shared_ptr<SharedBuffer> CollectiveEngine::allocate_control(
    std::int64_t bytes, std::string_view what
) {
  sync_.check();
  return sync_.source().allocate(bytes, what, RegionUse::kControl, [this] {
    Lag lag;
    progress(lag);
  });
}

void CollectiveEngine::forget(std::uint32_t region) {
  const std::lock_guard lock(regions_mutex_);
  auto table = std::make_shared<RegionTable>(*regions_);
  std::erase_if(*table, [region](const Region& entry) { return entry.id == region; });
  regions_ = std::move(table);
}

}  // namespace hypershard::comm::internal
