// Why: ranks that call different things would read garbage or wait for ever; each call is compared
// with every peer's before anything of the peer's is read.
#include <algorithm>
#include <string>
#include <vector>

#include "hypershard/comm/internal/dtype_text.h"
#include "hypershard/comm/shm/internal/collective_engine.h"
#include "hypershard/core/text.h"

namespace hypershard::comm::internal {

bool CollectiveEngine::see(PendingCall& pending, int peer, Lag& lag) {
  auto& seen = pending.peers[static_cast<std::size_t>(peer)];
  if (seen != nullptr) {
    return true;
  }
  const ControlBlock& block = sync_.block();
  if (block.counters(peer).posted.load(std::memory_order_seq_cst) <= pending.sequence) {
    lag.add(peer);
    return false;
  }
  const CallRecord& record = block.record(peer, pending.sequence);
  compare(pending, record, peer);
  seen = &record;
  return true;
}

bool CollectiveEngine::see_all(PendingCall& pending, Lag& lag) {
  bool all = true;
  for (int peer = 0; peer < sync_.size(); ++peer) {
    all = see(pending, peer, lag) && all;
  }
  return all;
}

void CollectiveEngine::compare(const PendingCall& pending, const CallRecord& theirs, int peer) {
  const CallRecord& mine = *pending.record;
  const std::int64_t* their_counts = sync_.block().counts(peer, pending.sequence);
  bool same = mine.op == theirs.op && mine.dtype == theirs.dtype && mine.reduce == theirs.reduce &&
              mine.divisor == theirs.divisor && mine.wire == theirs.wire &&
              mine.root == theirs.root && mine.unit_hash == theirs.unit_hash;
  const Op op = pending.call.op;
  if (op == Op::kAllToAll) {
    same = same &&
           pending.call.output_counts[static_cast<std::size_t>(peer)] == their_counts[sync_.rank()];
  } else {
    same = same && mine.numel == theirs.numel;
  }
  if (op == Op::kAllGather || op == Op::kReduceScatter) {
    same = same && std::equal(their_counts, their_counts + sync_.size(), pending.counts);
  }
  if (same) {
    return;
  }
  std::string text = "the ranks' calls differ: " + sync_.rank_text(sync_.rank()) + " called " +
                     describe(mine, pending.counts) + " and " + sync_.rank_text(peer) + " called " +
                     describe(theirs, their_counts);
  if (op == Op::kAllToAll && mine.op == theirs.op) {
    text += concat_text(
        "; the first expects ",
        pending.call.output_counts[static_cast<std::size_t>(peer)],
        " elements from the second"
    );
  }
  sync_.fail(text + "; all ranks must make the same calls in the same order");
}

std::string CollectiveEngine::describe(const CallRecord& record, const std::int64_t* counts) const {
  const auto op = static_cast<Op>(record.op);
  std::string text = call_text(record, sync_.info().name);
  if (op == Op::kBarrier) {
    return text;
  }
  text +=
      concat_text(" (", record.numel, " ", dtype_text(static_cast<c10::ScalarType>(record.dtype)));
  if (op == Op::kAllReduce || op == Op::kReduceScatter) {
    text += ", " + to_text(static_cast<ReduceOp>(record.reduce));
    text += record.divisor == 1 ? "" : concat_text(" divided by ", record.divisor);
    const auto wire = static_cast<c10::ScalarType>(record.wire);
    text += wire == c10::ScalarType::Undefined ? "" : " as " + dtype_text(wire);
  } else if (op == Op::kBroadcast) {
    text += concat_text(", root ", record.root);
  }
  if (op != Op::kAllReduce && op != Op::kBroadcast) {
    text += concat_text(", counts ", std::vector<std::int64_t>(counts, counts + sync_.size()));
  }
  return text + ")";
}

}  // namespace hypershard::comm::internal
