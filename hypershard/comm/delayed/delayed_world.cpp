// Why: see delayed_world.h. Each call works on copies of its tensors, and its output is poisoned.
#include "hypershard/comm/delayed/delayed_world.h"

#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/empty_like.h>

#include "hypershard/comm/delayed/internal/delayed_hub.h"
#include "hypershard/core/error.h"

namespace hypershard::comm {
namespace {

using internal::DelayedHub;
using internal::DelayedItem;
using internal::DelayedLane;

std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.numel() == 0 ? nullptr : tensor.mutable_data_ptr());
}

std::int64_t size_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}

/// Fills `[begin, end)` of a flat tensor with NaN.
void poison(at::Tensor& tensor, std::int64_t begin, std::int64_t end) {
  if (tensor.is_floating_point() && begin < end) {
    tensor.narrow(0, begin, end - begin).fill_(std::numeric_limits<double>::quiet_NaN());
  }
}

class DelayedWork : public Work {
 public:
  DelayedWork(
      std::shared_ptr<DelayedHub> hub,
      std::shared_ptr<DelayedLane> lane,
      std::shared_ptr<DelayedItem> item
  )
      : hub_(std::move(hub)), lane_(std::move(lane)), item_(std::move(item)) {}

  bool test() override { return hub_->test(*lane_, *item_); }
  void wait() override { hub_->wait(*lane_, *item_); }

 private:
  std::shared_ptr<DelayedHub> hub_;
  std::shared_ptr<DelayedLane> lane_;
  std::shared_ptr<DelayedItem> item_;
};

class DelayedCommunicator : public Communicator {
 public:
  DelayedCommunicator(
      GroupInfo info, std::shared_ptr<Communicator> inner, std::shared_ptr<DelayedHub> hub
  )
      : Communicator(std::move(info)),
        inner_(std::move(inner)),
        hub_(std::move(hub)),
        lane_(hub_->add_lane()) {}

  std::string backend() const override { return "delayed:" + inner_->backend(); }

 protected:
  WorkPtr start(Call call) override;

 private:
  std::int64_t slice_begin(const std::vector<std::int64_t>& counts) const {
    return std::accumulate(counts.begin(), counts.begin() + rank(), std::int64_t{0});
  }
  void copy_segments(const Call& call, DelayedItem& item) const;
  void freeze(const Call& call, const at::Tensor& copy, DelayedItem& item) const;
  void poison_output(Call& call) const;
  static WorkPtr run_inner(
      Communicator& inner, const Call& call, const at::Tensor& output, const at::Tensor& input
  );

  std::shared_ptr<Communicator> inner_;
  std::shared_ptr<DelayedHub> hub_;
  std::shared_ptr<DelayedLane> lane_;
};

WorkPtr DelayedCommunicator::start(Call call) {
  auto item = std::make_shared<DelayedItem>();
  item->text = to_text(call.op) + concat_text(" #", call.sequence);
  item->text += call.unit.empty() ? "" : " for unit '" + call.unit + "'";
  item->text += " on '" + info().name + "'";
  item->timeout_s = info().timeout_s;
  at::Tensor input;
  at::Tensor output;
  if (call.op == Op::kReduceScatter) {
    copy_segments(call, *item);
  } else if (call.op != Op::kBarrier) {
    input = call.input.clone();
    const bool in_out = call.op == Op::kAllReduce || call.op == Op::kBroadcast;
    output = in_out ? input : at::empty_like(call.output);
    if (call.op != Op::kBroadcast || call.root != rank()) {
      item->results = {{bytes_of(call.output), bytes_of(output), size_of(call.output)}};
    }
    item->held = {call.input, call.output, input, output};
    freeze(call, input, *item);
    poison_output(call);
  }
  if (item->launch == nullptr) {
    item->launch = [inner = inner_, call = std::move(call), output, input] {
      return run_inner(*inner, call, output, input);
    };
  }
  auto work = std::make_shared<DelayedWork>(hub_, lane_, item);
  hub_->post(*lane_, std::move(item));
  return work;
}

void DelayedCommunicator::freeze(const Call& call, const at::Tensor& copy, DelayedItem& item)
    const {
  const std::byte* now = bytes_of(call.input);
  const std::byte* before = bytes_of(copy);
  const std::int64_t bytes = size_of(call.input);
  const bool root = call.op == Op::kBroadcast && call.root == rank();
  if (call.op == Op::kAllGather || call.op == Op::kAllToAll || root) {
    item.frozen = {{now, before, bytes}};
  }
}

void DelayedCommunicator::copy_segments(const Call& call, DelayedItem& item) const {
  std::vector<ReduceSegment> copies;
  for (const ReduceSegment& segment : call.segments) {
    ReduceSegment copy{at::empty_like(segment.output), segment.input.clone(), segment.counts};
    const std::byte* now = bytes_of(segment.input);
    const std::byte* before = bytes_of(copy.input);
    const auto element = static_cast<std::int64_t>(segment.input.element_size());
    const std::int64_t begin = slice_begin(segment.counts) * element;
    const std::int64_t end = begin + segment.counts[static_cast<std::size_t>(rank())] * element;
    item.frozen.push_back({now, before, begin});
    item.frozen.push_back({now + end, before + end, size_of(segment.input) - end});
    if (bytes_of(segment.output) != now + begin) {
      item.frozen.push_back({now + begin, before + begin, end - begin});
    }
    item.results.push_back(
        {bytes_of(segment.output), bytes_of(copy.output), size_of(segment.output)}
    );
    for (const at::Tensor& tensor : {segment.input, segment.output, copy.input, copy.output}) {
      item.held.push_back(tensor);
    }
    at::Tensor output = segment.output;
    poison(output, 0, output.numel());
    copies.push_back(std::move(copy));
  }
  item.launch =
      [inner = inner_, copies = std::move(copies), reduce = call.reduce, unit = call.unit] {
        return inner->reduce_scatter(copies, reduce, unit);
      };
}

void DelayedCommunicator::poison_output(Call& call) const {
  if (call.op == Op::kBroadcast && call.root == rank()) {
    return;
  }
  if (call.op == Op::kAllGather) {
    const std::int64_t begin = slice_begin(call.output_counts);
    const std::int64_t end = begin + call.input.numel();
    const auto element = static_cast<std::int64_t>(call.output.element_size());
    if (call.input.numel() > 0 && bytes_of(call.input) == bytes_of(call.output) + begin * element) {
      // Its own slice is input too, which the caller may go on reading.
      poison(call.output, 0, begin);
      poison(call.output, end, call.output.numel());
      return;
    }
  }
  poison(call.output, 0, call.output.numel());
}

WorkPtr DelayedCommunicator::run_inner(
    Communicator& inner, const Call& call, const at::Tensor& output, const at::Tensor& input
) {
  switch (call.op) {
    case Op::kAllGather:
      return inner.all_gather(output, input, call.output_counts, call.unit);
    case Op::kReduceScatter:
      break;  // copy_segments() starts it
    case Op::kAllReduce:
      return inner.all_reduce(output, call.reduce, call.unit);
    case Op::kBroadcast:
      return inner.broadcast(output, call.root, call.unit);
    case Op::kAllToAll:
      return inner.all_to_all(output, input, call.output_counts, call.input_counts, call.unit);
    case Op::kBarrier:
      return inner.barrier(call.unit);
  }
  HS_FAIL(InternalError, "comm.delayed: operation ", call.op);
}

class DelayedWorld : public World {
 public:
  DelayedWorld(std::shared_ptr<World> inner, std::uint64_t seed)
      : World(inner->rank(), inner->topology(), inner->timeout_s()),
        inner_(std::move(inner)),
        seed_(seed),
        hub_(std::make_shared<DelayedHub>(seed)) {}

  std::string description() const override {
    return concat_text(inner_->description(), ", results delayed by seed ", seed_);
  }
  void shutdown() override { world_communicator()->barrier("shutdown")->wait(); }

 protected:
  std::shared_ptr<Communicator> make_communicator(GroupInfo info) override {
    auto inner = inner_->communicator(info.name, info.global_ranks);
    return std::make_shared<DelayedCommunicator>(std::move(info), std::move(inner), hub_);
  }

 private:
  std::shared_ptr<World> inner_;
  std::uint64_t seed_;
  std::shared_ptr<DelayedHub> hub_;
};

}  // namespace

std::shared_ptr<World> make_delayed_world(std::shared_ptr<World> inner, std::uint64_t seed) {
  HS_CHECK(inner != nullptr, "comm.delayed: the inner world is null");
  return std::make_shared<DelayedWorld>(std::move(inner), seed);
}

}  // namespace hypershard::comm
