// Reductions: contributions arrive in batches and are summed on the engine's thread, in rank order,
// batch by batch. What must be rounded or joined before it travels is made on the engine's other
// thread, just before it is sent.
#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/ops/from_blob.h>

#include "hypershard/comm/c10d/internal/message_batches.h"
#include "hypershard/comm/c10d/internal/message_communicator.h"
#include "hypershard/comm/internal/ordered_reduce.h"
#include "hypershard/comm/traffic.h"
#include "hypershard/core/error.h"

namespace hypershard::comm::internal {
namespace {

// Second-round messages are numbered from here.
constexpr std::uint32_t kSecondRound = 128;

std::size_t idx(int index) {
  return static_cast<std::size_t>(index);
}

std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data_ptr());
}

// The back end takes one pointer type for both directions; a send only reads.
std::byte* sendable(const at::Tensor& tensor) {
  return const_cast<std::byte*>(static_cast<const std::byte*>(tensor.const_data_ptr()));
}

std::int64_t bytes_per_element(at::ScalarType dtype) {
  return static_cast<std::int64_t>(at::elementSize(dtype));
}

std::vector<std::int64_t> slices_of(const std::vector<ReduceSegment>& segments, int rank) {
  std::vector<std::int64_t> counts;
  counts.reserve(segments.size());
  for (const ReduceSegment& segment : segments) {
    counts.push_back(segment.counts[idx(rank)]);
  }
  return counts;
}

// Where each segment's slice for `rank` begins.
std::vector<std::byte*> slice_addresses(const std::vector<ReduceSegment>& segments, int rank) {
  std::vector<std::byte*> addresses;
  addresses.reserve(segments.size());
  for (const ReduceSegment& segment : segments) {
    std::int64_t offset = 0;
    for (int before = 0; before < rank; ++before) {
      offset += segment.counts[idx(before)];
    }
    addresses.push_back(
        sendable(segment.input) + offset * static_cast<std::int64_t>(segment.input.element_size())
    );
  }
  return addresses;
}

void widen(std::byte* output, const std::byte* input, at::ScalarType from, std::int64_t numel) {
  ordered_reduce(output, at::kFloat, {&input, 1}, from, numel, ReduceOp::kSum);
}

// A part of a message that does not lie in the tensors as it travels.
struct Making {
  std::byte* to;
  const std::byte* from;
  std::int64_t count;
};

// How this rank's slices are summed; shared by the steps of one collective.
struct Sum {
  std::vector<std::byte*> outputs;  // by segment
  std::vector<std::byte*> own;      // by segment: this rank's contribution, in the tensors' dtype
  std::vector<std::byte*> peers;    // by rank: contributions, laid end to end, as they travelled
  std::byte* rounded = nullptr;     // this rank's contribution to one batch, as it would travel
  int rank = 0;
  at::ScalarType input_dtype = at::kFloat;
  at::ScalarType wire = at::kFloat;
  at::ScalarType output_dtype = at::kFloat;
  Reduction reduction;

  void run(const Batch& batch) const {
    const std::int64_t element = bytes_per_element(wire);
    std::vector<const std::byte*> inputs(peers.size());
    std::int64_t at = 0;
    for (const BatchPart& part : batch.parts) {
      for (std::size_t source = 0; source < peers.size(); ++source) {
        inputs[source] = peers[source] + (batch.first + at) * element;
      }
      const std::byte* mine = own[part.segment] + part.first * bytes_per_element(input_dtype);
      if (rounded != nullptr) {
        round_to_wire(rounded + at * element, mine, part.count);
        mine = rounded + at * element;
      }
      inputs[idx(rank)] = mine;
      ordered_reduce(
          outputs[part.segment] + part.first * bytes_per_element(output_dtype),
          output_dtype,
          inputs,
          wire,
          part.count,
          reduction
      );
      at += part.count;
    }
  }
};

}  // namespace

// Every rank sends each peer its slices and sums its own. Index: the batch.
std::vector<Step> MessageCommunicator::reduce_scatter_steps(
    const std::vector<ReduceSegment>& segments,
    const Reduction& reduction,
    const ExchangePtr& exchange
) {
  const auto sum = std::make_shared<Sum>();
  sum->rank = rank();
  sum->input_dtype = segments.front().input.scalar_type();
  sum->wire = reduction.wire.value_or(sum->input_dtype);
  sum->output_dtype = segments.front().output.scalar_type();
  sum->reduction = {reduction.op, reduction.divisor};
  sum->own = slice_addresses(segments, rank());
  for (const ReduceSegment& segment : segments) {
    sum->outputs.push_back(bytes_of(segment.output));
  }
  const bool rounds = sum->wire != sum->input_dtype;
  const std::int64_t element = bytes_per_element(sum->wire);
  const std::vector<Batch> own = cut_batches(slices_of(segments, rank()), element);
  const std::int64_t own_bytes = own.empty() ? 0 : (own.back().first + own.back().count) * element;
  std::byte* const arriving = stage(exchange, own_bytes * (size() - 1));
  for (int source = 0, slot = 0; source < size(); ++source) {
    sum->peers.push_back(source == rank() ? arriving : arriving + own_bytes * slot++);
  }
  if (rounds) {
    const auto largest = std::max_element(
        own.begin(), own.end(), [](const Batch& a, const Batch& b) { return a.count < b.count; }
    );
    sum->rounded = stage(exchange, own.empty() ? 0 : largest->count * element);
  }
  std::vector<Step> steps(own.size());
  for (std::size_t i = 0; i < own.size(); ++i) {
    for (const int peer : peers()) {
      steps[i].receives.push_back(
          {peer,
           sum->peers[idx(peer)] + own[i].first * element,
           own[i].count * element,
           static_cast<std::uint32_t>(i)}
      );
    }
    steps[i].then = [sum, batch = own[i]] { sum->run(batch); };
  }
  for (const int peer : peers()) {
    add_sends(steps, segments, sum->wire, peer, exchange);
  }
  return steps;
}

// What lies in one piece goes out from there; the rest is made first.
void MessageCommunicator::add_sends(
    std::vector<Step>& steps,
    const std::vector<ReduceSegment>& segments,
    at::ScalarType wire,
    int peer,
    const ExchangePtr& exchange
) {
  const at::ScalarType dtype = segments.front().input.scalar_type();
  const bool rounds = wire != dtype;
  const std::int64_t element = bytes_per_element(wire);
  const std::vector<Batch> batches = cut_batches(slices_of(segments, peer), element);
  const std::vector<std::byte*> from = slice_addresses(segments, peer);
  HS_ASSERT(
      batches.size() < kMaxMessageIndex, "comm.c10d: ", batches.size(), " messages to a peer"
  );
  const auto is_made = [&](const Batch& batch) { return rounds || batch.parts.size() > 1; };
  std::int64_t made_bytes = 0;
  for (const Batch& batch : batches) {
    made_bytes += is_made(batch) ? batch.count * element : 0;
  }
  std::byte* made = stage(exchange, made_bytes);
  steps.resize(std::max(steps.size(), batches.size()));
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const Batch& batch = batches[i];
    const auto address_of = [&](const BatchPart& part) {
      return from[part.segment] + part.first * bytes_per_element(dtype);
    };
    Message message{
        peer,
        is_made(batch) ? made : address_of(batch.parts.front()),
        batch.count * element,
        static_cast<std::uint32_t>(i)
    };
    steps[i].sends.push_back(message);
    if (!is_made(batch)) {
      continue;
    }
    std::vector<Making> makings;
    for (const BatchPart& part : batch.parts) {
      makings.push_back({made, address_of(part), part.count});
      made += part.count * element;
    }
    steps[i].prepare = [before = std::move(steps[i].prepare), makings, rounds, element] {
      if (before) {
        before();
      }
      for (const Making& making : makings) {
        if (rounds) {
          round_to_wire(making.to, making.from, making.count);
        } else {
          std::memcpy(making.to, making.from, static_cast<std::size_t>(making.count * element));
        }
      }
    };
  }
}

// One round: every rank sends its whole tensor to all and sums what it gets. Sends go out from a
// copy, since the sum is written while a slow peer may still be reading. Index 0.
std::vector<Step> MessageCommunicator::small_all_reduce_steps(
    const Call& call, const ExchangePtr& exchange
) {
  const at::ScalarType dtype = call.input.scalar_type();
  const at::ScalarType wire = call.reduce.wire.value_or(dtype);
  const std::int64_t numel = call.input.numel();
  const std::int64_t bytes = numel * bytes_per_element(wire);
  if (bytes == 0) {
    return {};
  }
  std::byte* const staging = stage(exchange, bytes * size());
  std::vector<const std::byte*> inputs;
  std::byte* own = nullptr;
  std::vector<Step> steps(1);
  for (int source = 0; source < size(); ++source) {
    std::byte* const slot = staging + bytes * source;
    inputs.push_back(slot);
    own = source == rank() ? slot : own;
  }
  if (wire == dtype) {
    std::memcpy(own, call.input.const_data_ptr(), static_cast<std::size_t>(bytes));
  } else {
    round_to_wire(own, sendable(call.input), numel);
  }
  for (const int peer : peers()) {
    steps.front().receives.push_back({peer, staging + bytes * peer, bytes, 0});
    steps.front().sends.push_back({peer, own, bytes, 0});
  }
  // The sum of what travelled goes where a peer's contribution lay, to be rounded as it would be.
  std::byte* const sum = wire == dtype ? bytes_of(call.output) : staging + bytes * peers().front();
  steps.front().then =
      [=, output = call.output, op = Reduction{call.reduce.op, call.reduce.divisor}] {
        ordered_reduce(sum, wire, inputs, wire, numel, op);
        if (wire != dtype) {
          widen(bytes_of(output), sum, wire, numel);
        }
      };
  return steps;
}

// A reduce-scatter of slices whose batches go to all ranks as soon as they are summed. A result may
// arrive where an input of this rank still lies: its sum exists only after that input has arrived
// there. With a wire dtype results travel between copies, `whole`, and are widened from there.
// Index: the batch; kSecondRound + the batch.
std::vector<Step> MessageCommunicator::all_reduce_steps(
    const Call& call, const ExchangePtr& exchange
) {
  const at::ScalarType dtype = call.input.scalar_type();
  const at::ScalarType wire = call.reduce.wire.value_or(dtype);
  const std::int64_t element = bytes_per_element(wire);
  const std::int64_t numel = call.input.numel();
  if (is_one_round(numel * element, size())) {
    return small_all_reduce_steps(call, exchange);
  }
  const bool rounds = wire != dtype;
  std::byte* const output = bytes_of(call.output);
  std::byte* const whole = rounds ? stage(exchange, numel * element) : output;
  const std::vector<std::int64_t> slices = all_reduce_slices(numel, size());
  std::vector<std::int64_t> offsets;  // of slices, in elements
  for (std::int64_t offset = 0; const std::int64_t slice : slices) {
    offsets.push_back(offset);
    offset += slice;
  }
  const auto at_rest = [=](int rank, const Batch& batch) {
    return offsets[idx(rank)] + batch.first;
  };
  const auto arrived = [=](int rank, const Batch& batch) {
    const std::int64_t at = at_rest(rank, batch);
    if (rounds) {
      widen(output + at * bytes_per_element(dtype), whole + at * element, wire, batch.count);
    }
  };
  const at::Tensor own_sum = at::from_blob(
      whole + offsets[idx(rank())] * element, {slices[idx(rank())]}, at::TensorOptions().dtype(wire)
  );
  std::vector<Step> steps =
      reduce_scatter_steps({{own_sum, call.input, slices}}, call.reduce, exchange);
  const std::vector<Batch> own = cut_batches({&slices[idx(rank())], 1}, element);
  for (std::size_t i = 0; i < own.size(); ++i) {
    Step result;
    for (const int peer : peers()) {
      result.sends.push_back(
          {peer,
           whole + at_rest(rank(), own[i]) * element,
           own[i].count * element,
           kSecondRound + static_cast<std::uint32_t>(i)}
      );
    }
    steps[i].then = [=,
                     sum = std::move(steps[i].then),
                     batch = own[i],
                     self = rank(),
                     engine = &group_->engine] {
      sum();
      engine->add(exchange, result);
      arrived(self, batch);
    };
  }
  for (const int peer : peers()) {
    const std::vector<Batch> theirs = cut_batches({&slices[idx(peer)], 1}, element);
    for (std::size_t i = 0; i < theirs.size(); ++i) {
      Step& step = steps.emplace_back();
      step.receives.push_back(
          {peer,
           whole + at_rest(peer, theirs[i]) * element,
           theirs[i].count * element,
           kSecondRound + static_cast<std::uint32_t>(i)}
      );
      if (rounds) {
        step.then = [=, batch = theirs[i]] { arrived(peer, batch); };
      }
    }
  }
  return steps;
}

}  // namespace hypershard::comm::internal
