// Why: what a rank does for the calls that were posted: staging its input, comparing signatures,
// reading its peers, reducing. Never blocks; NOTE [shared-memory collectives] tells the whole.
#include <algorithm>
#include <cstring>
#include <utility>

#include "hypershard/comm/internal/ordered_reduce.h"
#include "hypershard/comm/shm/internal/collective_engine.h"
#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"

namespace hypershard::comm::internal {
namespace {

std::byte* data(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.numel() == 0 ? nullptr : tensor.mutable_data_ptr());
}

const std::byte* input_data(const SharedCall& call) {
  return call.input.numel() == 0 ? nullptr
                                 : static_cast<const std::byte*>(call.input.const_data_ptr());
}

std::int64_t element_bytes(const SharedCall& call) {
  return static_cast<std::int64_t>(call.input.element_size());
}

std::int64_t prefix(const std::int64_t* counts, int end) {
  std::int64_t sum = 0;
  for (int i = 0; i < end; ++i) {
    sum += counts[i];
  }
  return sum;
}

void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes) {
  if (bytes > 0 && to != from) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
}

bool in_place(const CallRecord& record) {
  return record.place == Place::kRegion || record.place == Place::kAddress;
}

/// Adds the time of its life to `total_ns`.
class Timed {
 public:
  explicit Timed(std::int64_t& total_ns) : total_ns_(total_ns) {}
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;
  ~Timed() { total_ns_ += watch_.elapsed_ns(); }

 private:
  std::int64_t& total_ns_;
  Stopwatch watch_;
};

}  // namespace

bool CollectiveEngine::stage() {
  bool moved = false;
  for (const auto& pending : pending_) {
    while (pending->staged < pending->record->num_steps) {
      if (!stage_step(*pending)) {
        return moved;
      }
      moved = true;
    }
  }
  return moved;
}

bool CollectiveEngine::stage_step(PendingCall& pending) {
  const int self = sync_.rank();
  const ControlBlock& block = sync_.block();
  const SharedCall& call = pending.call;
  std::uint64_t read = next_step_;
  for (int peer = 0; peer < sync_.size(); ++peer) {
    if (peer != self) {
      read = std::min(read, block.consumed(peer, self).load(std::memory_order_acquire));
    }
  }
  staging_.release_before(read);
  const std::int64_t step = pending.staged;
  const std::uint64_t number = pending.record->first_step + static_cast<std::uint64_t>(step);
  const std::int64_t bytes =
      pending.cut.step_numel(pending.counts, self, step) * element_bytes(call);
  if (number - std::min(read, number) >= kStepRing) {
    return false;
  }
  const auto offset = staging_.take(number, bytes);
  if (!offset.has_value()) {
    return false;
  }
  const Timed timed(sync_.stats().reduce_ns);
  std::byte* slot = staging_memory_->write() + self * options_.staging_bytes + *offset;
  block.step_offset(self, number) = static_cast<std::uint64_t>(*offset);
  const bool by_reader = call.op == Op::kReduceScatter || call.op == Op::kAllToAll;
  for (int reader = 0; reader < (by_reader ? sync_.size() : 1); ++reader) {
    if (by_reader && reader == self) {
      continue;
    }
    Piece piece = pending.cut.piece(pending.counts, self, reader, step);
    if (call.op == Op::kAllReduce) {
      piece = {piece.offset, pending.cut.step_numel(pending.counts, self, step), 0};
    }
    const std::int64_t element = element_bytes(call);
    copy_bytes(
        slot + piece.in_step * element,
        input_data(call) + piece.offset * element,
        piece.numel * element
    );
  }
  if (!sync_.source().reads_any_memory()) {
    sync_.stats().staged_bytes += bytes;
  }
  ++pending.staged;
  sync_.publish(block.counters(self).ready, number + 1);
  return true;
}

bool CollectiveEngine::available(
    const PendingCall& pending, int source, std::int64_t step, Lag& lag
) const {
  const CallRecord& record = *pending.peers[static_cast<std::size_t>(source)];
  if (record.place != Place::kStaged) {
    return true;
  }
  const std::uint64_t number = record.first_step + static_cast<std::uint64_t>(step);
  if (sync_.block().counters(source).ready.load(std::memory_order_seq_cst) > number) {
    return true;
  }
  if (source != sync_.rank()) {
    lag.add(source);
  }
  return false;
}

const std::byte* CollectiveEngine::address(
    const PendingCall& pending, int source, std::int64_t step, const Piece& piece
) const {
  const CallRecord& record = *pending.peers[static_cast<std::size_t>(source)];
  const std::int64_t element = element_bytes(pending.call);
  if (source == sync_.rank()) {
    return input_data(pending.call) + piece.offset * element;
  }
  if (record.place == Place::kAddress) {
    return reinterpret_cast<const std::byte*>(record.address) + piece.offset * element;
  }
  if (record.place == Place::kStaged) {
    const std::uint64_t number = record.first_step + static_cast<std::uint64_t>(step);
    const auto offset = static_cast<std::int64_t>(sync_.block().step_offset(source, number));
    return staging_memory_->read() + source * options_.staging_bytes + offset +
           piece.in_step * element;
  }
  for (const Region& region : *pending.regions) {
    if (region.id == record.region) {
      return region.buffer->read() + record.address + piece.offset * element;
    }
  }
  HS_FAIL(
      CommError,
      "comm.",
      sync_.source().name(),
      ": ",
      sync_.rank_text(source),
      " sends from shared region #",
      record.region,
      " in ",
      call_text(record, sync_.info().name),
      ", but this rank has freed its handle",
      HS_HINT("keep shared buffers and arenas until all calls that use them are done on all ranks")
  );
}

void CollectiveEngine::consume(const PendingCall& pending, int source, std::uint64_t steps) {
  const CallRecord& record = *pending.peers[static_cast<std::size_t>(source)];
  if (source == sync_.rank() || record.place != Place::kStaged) {
    return;
  }
  auto& consumed = sync_.block().consumed(sync_.rank(), source);
  const std::uint64_t value = record.first_step + steps;
  if (consumed.load(std::memory_order_relaxed) < value) {
    sync_.publish(consumed, value);
  }
}

Advance CollectiveEngine::step(PendingCall& pending, Lag& lag) {
  Advance state = Advance::kDone;
  switch (pending.call.op) {
    case Op::kAllGather:
    case Op::kBroadcast:
    case Op::kAllToAll:
      state = gather_like(pending, lag);
      break;
    case Op::kReduceScatter:
      state = reduce_scatter(pending, lag);
      break;
    case Op::kAllReduce:
      state = all_reduce(pending, lag);
      break;
    case Op::kBarrier:
      state = see_all(pending, lag) ? Advance::kDone : Advance::kStuck;
      break;
  }
  if (state == Advance::kDone) {
    // Steps without a piece for this rank too, and now: peers may need the room to get on.
    for (int source = 0; source < sync_.size(); ++source) {
      if (const CallRecord* record = pending.peers[static_cast<std::size_t>(source)]) {
        consume(pending, source, static_cast<std::uint64_t>(record->num_steps));
      }
    }
  }
  if (pending.staged == pending.record->num_steps) {
    return state;
  }
  // The input still has to go into staging: whoever has not read the oldest step is in the way.
  const std::uint64_t oldest =
      pending.record->first_step + static_cast<std::uint64_t>(pending.staged);
  for (int peer = 0; peer < sync_.size(); ++peer) {
    const auto& consumed = sync_.block().consumed(peer, sync_.rank());
    if (peer != sync_.rank() && consumed.load(std::memory_order_seq_cst) < oldest) {
      lag.add(peer);
    }
  }
  return state == Advance::kDone ? Advance::kStuck : state;
}

Advance CollectiveEngine::gather_like(PendingCall& pending, Lag& lag) {
  const bool broadcast = pending.call.op == Op::kBroadcast;
  Advance state = Advance::kDone;
  for (int source = 0; source < sync_.size(); ++source) {
    if (broadcast && source != pending.call.root) {
      continue;
    }
    const Advance taken = take_from(pending, source, lag);
    if (taken == Advance::kMoved || (taken == Advance::kStuck && state == Advance::kDone)) {
      state = taken;
    }
  }
  return state;
}

Advance CollectiveEngine::take_from(PendingCall& pending, int source, Lag& lag) {
  if (!see(pending, source, lag)) {
    return Advance::kStuck;
  }
  const SharedCall& call = pending.call;
  const CallRecord& record = *pending.peers[static_cast<std::size_t>(source)];
  const bool own = source == sync_.rank();
  if (!own && record.place == Place::kNone) {
    return Advance::kDone;
  }
  const bool staged = !own && record.place == Place::kStaged;
  const std::int64_t num_pieces = staged ? record.num_steps : 1;
  const std::int64_t* counts = sync_.block().counts(source, pending.sequence);
  std::int64_t& taken = pending.taken[static_cast<std::size_t>(source)];
  const std::int64_t element = element_bytes(call);
  const std::int64_t base =
      call.op == Op::kBroadcast ? 0 : prefix(call.output_counts.data(), source);
  bool moved = false;
  for (; taken < num_pieces; ++taken) {
    if (staged && !available(pending, source, taken, lag)) {
      return moved ? Advance::kMoved : Advance::kStuck;
    }
    const Timed timed(sync_.stats().reduce_ns);
    const Piece piece = staged ? pending.cut.piece(counts, source, sync_.rank(), taken)
                               : pending.cut.whole(counts, source, sync_.rank());
    const std::int64_t to = base + (staged ? taken * pending.cut.run() : 0);
    if (piece.numel > 0) {
      copy_bytes(
          data(call.output) + to * element,
          address(pending, source, taken, piece),
          piece.numel * element
      );
    }
    consume(pending, source, static_cast<std::uint64_t>(taken) + 1);
    moved = true;
  }
  return Advance::kDone;
}

Advance CollectiveEngine::reduce_scatter(PendingCall& pending, Lag& lag) {
  if (!see_all(pending, lag)) {
    return Advance::kStuck;
  }
  const SharedCall& call = pending.call;
  const int self = sync_.rank();
  const std::int64_t count = pending.counts[self];
  bool moved = false;
  c10::SmallVector<const std::byte*, 8> inputs(static_cast<std::size_t>(sync_.size()));
  while (pending.num_reduced * pending.cut.run() < count) {
    const std::int64_t step = pending.num_reduced;
    bool ready = true;
    for (int source = 0; source < sync_.size(); ++source) {
      ready = (source == self || available(pending, source, step, lag)) && ready;
    }
    if (!ready) {
      return moved ? Advance::kMoved : Advance::kStuck;
    }
    const Timed timed(sync_.stats().reduce_ns);
    for (int source = 0; source < sync_.size(); ++source) {
      const Piece piece = pending.cut.piece(pending.counts, source, self, step);
      inputs[static_cast<std::size_t>(source)] = address(pending, source, step, piece);
    }
    const std::int64_t begin = step * pending.cut.run();
    const auto out_element = static_cast<std::int64_t>(call.output.element_size());
    ordered_reduce(
        data(call.output) + begin * out_element,
        call.output.scalar_type(),
        inputs,
        call.input.scalar_type(),
        std::min(pending.cut.run(), count - begin),
        call.reduce
    );
    ++pending.num_reduced;
    for (int source = 0; source < sync_.size(); ++source) {
      consume(pending, source, static_cast<std::uint64_t>(pending.num_reduced));
    }
    moved = true;
  }
  return Advance::kDone;
}

Advance CollectiveEngine::all_reduce(PendingCall& pending, Lag& lag) {
  if (!see_all(pending, lag)) {
    return Advance::kStuck;
  }
  const std::int64_t num_steps = pending.cut.num_steps(pending.counts, sync_.rank());
  bool moved = false;
  while (pending.num_reduced < num_steps && reduce_piece(pending, pending.num_reduced, lag)) {
    ++pending.num_reduced;
    moved = true;
    if (!pending.cut.tiny()) {
      sync_.publish(
          sync_.block().counters(sync_.rank()).reduced,
          pending.first_reduced + static_cast<std::uint64_t>(pending.num_reduced)
      );
    }
  }
  while (pending.num_gathered < pending.num_reduced &&
         gather_piece(pending, pending.num_gathered, lag)) {
    ++pending.num_gathered;
    moved = true;
    for (int source = 0; source < sync_.size(); ++source) {
      consume(pending, source, static_cast<std::uint64_t>(pending.num_gathered));
    }
  }
  if (pending.num_gathered == num_steps) {
    return Advance::kDone;
  }
  return moved ? Advance::kMoved : Advance::kStuck;
}

bool CollectiveEngine::reduce_piece(PendingCall& pending, std::int64_t step, Lag& lag) {
  const SharedCall& call = pending.call;
  const int self = sync_.rank();
  bool ready = true;
  for (int source = 0; source < sync_.size(); ++source) {
    // This rank's own step too: the result must not overwrite what is not staged yet.
    ready = available(pending, source, step, lag) && ready;
  }
  if (!ready) {
    return false;
  }
  const Timed timed(sync_.stats().reduce_ns);
  const Piece piece = pending.cut.piece(pending.counts, self, self, step);
  c10::SmallVector<const std::byte*, 8> inputs(static_cast<std::size_t>(sync_.size()));
  for (int source = 0; source < sync_.size(); ++source) {
    inputs[static_cast<std::size_t>(source)] = address(pending, source, step, piece);
  }
  const std::int64_t element = element_bytes(call);
  std::byte* output = data(call.output) + piece.offset * element;
  const auto dtype = call.output.scalar_type();
  ordered_reduce(output, dtype, inputs, dtype, piece.numel, call.reduce, /*rounds_result=*/true);
  if (pending.record->place == Place::kStaged && !pending.cut.tiny()) {
    // Into the step itself: of this part of it nobody but this rank reads the input.
    const std::uint64_t number = pending.record->first_step + static_cast<std::uint64_t>(step);
    const auto offset = static_cast<std::int64_t>(sync_.block().step_offset(self, number));
    std::byte* slot = staging_memory_->write() + self * options_.staging_bytes + offset;
    copy_bytes(slot + piece.in_step * element, output, piece.numel * element);
  }
  return true;
}

bool CollectiveEngine::gather_piece(PendingCall& pending, std::int64_t step, Lag& lag) {
  if (pending.cut.tiny()) {
    return true;
  }
  const SharedCall& call = pending.call;
  const std::uint64_t number = pending.first_reduced + static_cast<std::uint64_t>(step);
  bool ready = true;
  for (int source = 0; source < sync_.size(); ++source) {
    if (sync_.block().counters(source).reduced.load(std::memory_order_seq_cst) <= number) {
      lag.add(source);
      ready = false;
    }
  }
  if (!ready) {
    return false;
  }
  const Timed timed(sync_.stats().reduce_ns);
  const std::int64_t element = element_bytes(call);
  for (int source = 0; source < sync_.size(); ++source) {
    if (source != sync_.rank()) {
      const Piece piece = pending.cut.piece(pending.counts, source, source, step);
      copy_bytes(
          data(call.output) + piece.offset * element,
          address(pending, source, step, piece),
          piece.numel * element
      );
    }
  }
  return true;
}

void CollectiveEngine::finish(PendingCall& pending) {
  pending.done = true;
  busy_.end();
  sync_.publish(sync_.block().counters(sync_.rank()).finished, pending.sequence + 1);
}

Advance CollectiveEngine::drive(std::uint64_t last, Lag& lag) {
  bool moved = stage();
  Advance state = Advance::kDone;
  while (!pending_.empty() && pending_.front()->sequence <= last) {
    const std::shared_ptr<PendingCall> pending = pending_.front();
    state = step(*pending, lag);
    if (state != Advance::kDone) {
      break;
    }
    finish(*pending);
    pending_.pop_front();
    moved = true;
    if (in_place(*pending->record)) {
      unreleased_.push_back(pending);
    } else {
      pending->call.input.reset();
      pending->call.output.reset();
    }
  }
  drop_released();
  if (state == Advance::kDone) {
    return Advance::kDone;
  }
  return moved ? Advance::kMoved : state;
}

void CollectiveEngine::drop_released() {
  Lag unused;
  while (!unreleased_.empty() && is_released(*unreleased_.front(), unused)) {
    unreleased_.front()->call.input.reset();
    unreleased_.front()->call.output.reset();
    unreleased_.pop_front();
  }
}

bool CollectiveEngine::is_released(const PendingCall& pending, Lag& lag) const {
  if (!in_place(*pending.record)) {
    return true;
  }
  bool released = true;
  for (int peer = 0; peer < sync_.size(); ++peer) {
    const auto& finished = sync_.block().counters(peer).finished;
    if (finished.load(std::memory_order_seq_cst) <= pending.sequence) {
      lag.add(peer);
      released = false;
    }
  }
  return released;
}

bool CollectiveEngine::is_complete(const PendingCall& pending, Lag& lag) const {
  // The tensor of an all-reduce or broadcast is also the result, which the caller may overwrite.
  const Op op = pending.call.op;
  const bool in_out = op == Op::kAllReduce || op == Op::kBroadcast;
  return pending.done && (!in_out || is_released(pending, lag));
}

}  // namespace hypershard::comm::internal
