// What each collective consists of, but for reductions, which have a file of their own. All
// receives are posted at the start; what depends on arrived pieces (sums, forwards) hangs on the
// step that waits for them. Message indices: see each collective; both ends of a message compute
// its index and size from what all ranks know.
#include <algorithm>
#include <cstring>
#include <utility>

#include "hypershard/comm/c10d/internal/message_batches.h"
#include "hypershard/comm/c10d/internal/message_communicator.h"
#include "hypershard/comm/traffic.h"
#include "hypershard/core/clock.h"

namespace hypershard::comm::internal {
namespace {

constexpr std::int64_t kMaxPieces = 128;
// Second-round messages are numbered from here.
constexpr std::uint32_t kSecondRound = 128;
// Copies up to this size are done at once, by the caller.
constexpr std::int64_t kInlineCopyBytes = 64 * 1024;

std::size_t idx(int index) {
  return static_cast<std::size_t>(index);
}

std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data_ptr());
}

const std::byte* const_bytes_of(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

// The back end takes one pointer type for both directions; a send only reads.
std::byte* sendable(const at::Tensor& tensor) {
  return const_cast<std::byte*>(const_bytes_of(tensor));
}

std::vector<std::int64_t> offsets_of(const std::vector<std::int64_t>& counts, std::int64_t scale) {
  std::vector<std::int64_t> offsets(counts.size());
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    offsets[i] = offset;
    offset += counts[i] * scale;
  }
  return offsets;
}

// A run of elements cut into pieces; the same cut on every rank.
class Pieces {
 public:
  Pieces(std::int64_t count, std::int64_t element_bytes)
      : count_(count),
        element_bytes_(element_bytes),
        each_(std::max(kPieceBytes / element_bytes, (count + kMaxPieces - 1) / kMaxPieces)) {}

  int size() const { return static_cast<int>((count_ + each_ - 1) / each_); }
  std::int64_t first(int piece) const { return piece * each_; }
  std::int64_t count(int piece) const { return std::min(each_, count_ - first(piece)); }
  std::int64_t offset_bytes(int piece) const { return first(piece) * element_bytes_; }
  std::int64_t bytes(int piece) const { return count(piece) * element_bytes_; }

 private:
  std::int64_t count_;
  std::int64_t element_bytes_;
  std::int64_t each_;
};

}  // namespace

std::vector<Step> MessageCommunicator::steps_of(const Call& call, const ExchangePtr& exchange) {
  switch (call.op) {
    case Op::kAllGather:
      return all_gather_steps(call);
    case Op::kReduceScatter:
      return reduce_scatter_steps(call.segments, call.reduce, exchange);
    case Op::kAllReduce:
      return all_reduce_steps(call, exchange);
    case Op::kBroadcast:
      return broadcast_steps(call, exchange);
    case Op::kAllToAll:
      return all_to_all_steps(call);
    case Op::kBarrier:
      return barrier_steps(exchange);
  }
  return {};
}

void MessageCommunicator::copy_own(
    Step& step, std::byte* to, const std::byte* from, std::int64_t bytes
) {
  if (bytes == 0 || to == from) {
    return;
  }
  const auto size = static_cast<std::size_t>(bytes);
  if (bytes <= kInlineCopyBytes) {
    const Stopwatch watch;
    std::memcpy(to, from, size);
    group_->stats.reduce_ns += watch.elapsed_ns();
  } else {
    step.meanwhile = [=] { std::memcpy(to, from, size); };
  }
}

// Every rank sends its slice to all and receives theirs where they belong. Index 0.
std::vector<Step> MessageCommunicator::all_gather_steps(const Call& call) {
  const auto element = static_cast<std::int64_t>(call.output.element_size());
  const std::vector<std::int64_t> offsets = offsets_of(call.output_counts, element);
  const std::int64_t own_bytes = call.output_counts[idx(rank())] * element;
  std::vector<Step> steps(1);
  Step& step = steps.front();
  for (const int peer : peers()) {
    const std::int64_t bytes = call.output_counts[idx(peer)] * element;
    if (bytes > 0) {
      step.receives.push_back({peer, bytes_of(call.output) + offsets[idx(peer)], bytes, 0});
    }
    if (own_bytes > 0) {
      step.sends.push_back({peer, sendable(call.input), own_bytes, 0});
    }
  }
  copy_own(
      step, bytes_of(call.output) + offsets[idx(rank())], const_bytes_of(call.input), own_bytes
  );
  return steps;
}

// Small tensors, and pairs: the root sends all to everyone. Index 0.
std::vector<Step> MessageCommunicator::broadcast_steps(
    const Call& call, const ExchangePtr& exchange
) {
  const auto bytes = static_cast<std::int64_t>(call.output.nbytes());
  if (is_forwarded(bytes, size())) {
    return forwarded_broadcast_steps(call, exchange);
  }
  std::vector<Step> steps(1);
  if (bytes > 0 && rank() == call.root) {
    for (const int peer : peers()) {
      steps.front().sends.push_back({peer, sendable(call.output), bytes, 0});
    }
  } else if (bytes > 0) {
    steps.front().receives.push_back({call.root, bytes_of(call.output), bytes, 0});
  }
  return steps;
}

// Large ones: the root cuts the tensor into a slice for each other rank, which forwards it piece by
// piece, so that no link carries the tensor more than once. Index: the piece; kSecondRound + the
// piece.
std::vector<Step> MessageCommunicator::forwarded_broadcast_steps(
    const Call& call, const ExchangePtr& exchange
) {
  const auto bytes = static_cast<std::int64_t>(call.output.nbytes());
  const std::int64_t each = (bytes + size() - 2) / (size() - 1);
  std::byte* const data = bytes_of(call.output);
  const auto slice_of = [&](int peer) { return peer < call.root ? peer : peer - 1; };
  const auto pieces_of = [&](int peer) {
    return Pieces(std::clamp<std::int64_t>(bytes - slice_of(peer) * each, 0, each), 1);
  };
  std::vector<Step> steps;
  if (rank() == call.root) {
    Step& step = steps.emplace_back();
    for (int piece = 0; piece < kMaxPieces; ++piece) {
      for (const int peer : peers()) {
        if (const Pieces pieces = pieces_of(peer); piece < pieces.size()) {
          step.sends.push_back(
              {peer,
               data + slice_of(peer) * each + pieces.offset_bytes(piece),
               pieces.bytes(piece),
               static_cast<std::uint32_t>(piece)}
          );
        }
      }
    }
    return steps;
  }
  const Pieces own = pieces_of(rank());
  for (int piece = 0; piece < own.size(); ++piece) {
    Step& step = steps.emplace_back();
    const auto index = static_cast<std::uint32_t>(piece);
    std::byte* const at = data + slice_of(rank()) * each + own.offset_bytes(piece);
    step.receives.push_back({call.root, at, own.bytes(piece), index});
    Step forward;
    for (const int peer : peers()) {
      if (peer != call.root) {
        forward.sends.push_back({peer, at, own.bytes(piece), kSecondRound + index});
      }
    }
    step.then = [forward, exchange, engine = &group_->engine] { engine->add(exchange, forward); };
  }
  Step& others = steps.emplace_back();
  for (const int peer : peers()) {
    const Pieces theirs = pieces_of(peer);
    for (int piece = 0; peer != call.root && piece < theirs.size(); ++piece) {
      others.receives.push_back(
          {peer,
           data + slice_of(peer) * each + theirs.offset_bytes(piece),
           theirs.bytes(piece),
           kSecondRound + static_cast<std::uint32_t>(piece)}
      );
    }
  }
  return steps;
}

// Every run goes from where it is to where it belongs. Index 0.
std::vector<Step> MessageCommunicator::all_to_all_steps(const Call& call) {
  const auto element = static_cast<std::int64_t>(call.output.element_size());
  const std::vector<std::int64_t> to = offsets_of(call.output_counts, element);
  const std::vector<std::int64_t> from = offsets_of(call.input_counts, element);
  std::vector<Step> steps(1);
  Step& step = steps.front();
  for (const int peer : peers()) {
    const std::int64_t in_bytes = call.output_counts[idx(peer)] * element;
    const std::int64_t out_bytes = call.input_counts[idx(peer)] * element;
    if (in_bytes > 0) {
      step.receives.push_back({peer, bytes_of(call.output) + to[idx(peer)], in_bytes, 0});
    }
    if (out_bytes > 0) {
      step.sends.push_back({peer, sendable(call.input) + from[idx(peer)], out_bytes, 0});
    }
  }
  copy_own(
      step,
      bytes_of(call.output) + to[idx(rank())],
      const_bytes_of(call.input) + from[idx(rank())],
      call.output_counts[idx(rank())] * element
  );
  return steps;
}

// Round k tells the rank 2^k further on; after the last round everybody has heard of everybody.
// Index: the round. Source: Hensgen, Finkel, Manber: "Two algorithms for barrier synchronization",
// 1988.
std::vector<Step> MessageCommunicator::barrier_steps(const ExchangePtr& exchange) {
  std::byte* const token = stage(exchange, 2);
  std::vector<Step> steps;
  for (int distance = 1; distance < size(); distance *= 2) {
    const auto round = static_cast<std::uint32_t>(steps.size());
    Step& step = steps.emplace_back();
    step.receives.push_back({(rank() - distance + size()) % size(), token, 1, round});
    Step tell;
    tell.sends.push_back({(rank() + distance) % size(), token + 1, 1, round});
    if (round == 0) {
      step.sends = std::move(tell.sends);
    } else {
      steps[round - 1].then = [tell, exchange, engine = &group_->engine] {
        engine->add(exchange, tell);
      };
    }
  }
  return steps;
}

}  // namespace hypershard::comm::internal
