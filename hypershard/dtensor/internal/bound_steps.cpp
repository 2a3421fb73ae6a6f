// The eight kinds of steps on a local tensor.
// Boxes are computed for the ranks of a step's group only, whatever the size of the job.
#include <cstddef>
#include <limits>
#include <span>
#include <utility>

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "hypershard/core/error.h"
#include "hypershard/dtensor/internal/box.h"
#include "hypershard/dtensor/internal/box_collective.h"
#include "hypershard/dtensor/internal/step_program.h"
#include "hypershard/layout/sharding.h"

namespace hypershard::dtensor::internal {
namespace {

using Kind = layout::RedistributionStep::Kind;
using Reduce = layout::Placement::Reduce;

struct Slice : BoundStep {
  Box before;
  Box after;
  at::Tensor run(const at::Tensor& local, bool& /*is_owned*/) const override {
    return view_of(local, before, after);
  }
};

/// Returns what a maximum or minimum is taken with to no effect.
c10::Scalar neutral_element(at::ScalarType dtype, Reduce reduce) {
  const bool is_max = reduce == Reduce::kMax;
  if (at::isFloatingType(dtype)) {
    const double infinity = std::numeric_limits<double>::infinity();
    return is_max ? -infinity : infinity;
  }
  switch (dtype) {
    case at::kBool:
      return !is_max;
    case at::kByte:
      return is_max ? 0 : std::numeric_limits<std::uint8_t>::max();
    case at::kChar:
      return is_max ? std::numeric_limits<std::int8_t>::min()
                    : std::numeric_limits<std::int8_t>::max();
    case at::kShort:
      return is_max ? std::numeric_limits<std::int16_t>::min()
                    : std::numeric_limits<std::int16_t>::max();
    case at::kInt:
      return is_max ? std::numeric_limits<std::int32_t>::min()
                    : std::numeric_limits<std::int32_t>::max();
    case at::kLong:
      return is_max ? std::numeric_limits<std::int64_t>::min()
                    : std::numeric_limits<std::int64_t>::max();
    default:
      HS_FAIL(
          Unsupported,
          "dtensor.redistribution: no ",
          is_max ? "smallest" : "largest",
          " value is known for tensors of ",
          c10::toString(dtype),
          " (expected a real floating, integer or bool dtype)"
      );
  }
}

struct Embed : BoundStep {
  Box before;
  Box after;
  Reduce reduce = Reduce::kSum;
  at::Tensor run(const at::Tensor& local, bool& is_owned) const override {
    const std::vector<std::int64_t> shape = shape_of(after);
    at::Tensor whole =
        reduce == Reduce::kSum
            ? at::zeros(shape, local.options())
            : at::full(shape, neutral_element(local.scalar_type(), reduce), local.options());
    view_of(whole, after, before).copy_(local);
    is_owned = true;
    return whole;
  }
};

struct Mask : BoundStep {
  bool keeps = false;
  at::Tensor run(const at::Tensor& local, bool& is_owned) const override {
    is_owned = is_owned || !keeps;
    return keeps ? local : at::zeros(local.sizes(), local.options());
  }
};

struct Scale : BoundStep {
  int multiply = 1;
  int divide = 1;
  at::Tensor run(const at::Tensor& local, bool& is_owned) const override {
    HS_CHECK(
        at::isFloatingType(local.scalar_type()) || at::isComplexType(local.scalar_type()),
        "dtensor.redistribution: cannot turn a sum into an average or back for tensors of ",
        c10::toString(local.scalar_type()),
        " (expected a floating dtype)"
    );
    at::Tensor result = is_owned ? local : local.clone();
    is_owned = true;
    return divide != 1 ? result.div_(divide) : result.mul_(multiply);
  }
};

/// A step that ends in a new tensor.
template <class Collective>
struct Communicating : BoundStep {
  Communicating(Collective collective_in, std::string unit_in)
      : collective(std::move(collective_in)), unit(std::move(unit_in)) {}
  at::Tensor run(const at::Tensor& local, bool& is_owned) const override {
    at::Tensor result = collective.run(local, is_owned, unit);
    is_owned = true;
    return result;
  }
  Collective collective;
  std::string unit;
};

struct AllReduce : BoundStep {
  std::shared_ptr<comm::Communicator> communicator;
  Reduce reduce = Reduce::kSum;
  std::string unit;
  at::Tensor run(const at::Tensor& local, bool& is_owned) const override {
    at::Tensor result = reduce_all(*communicator, local, is_owned, reduce, unit);
    is_owned = true;
    return result;
  }
};

/// Finds the boxes of a step's ranks.
class Binder {
 public:
  Binder(
      const layout::RedistributionStep& step,
      const std::vector<std::int64_t>& shape,
      const comm::ProcessMesh& mesh
  )
      : step_(step), shape_(shape), mesh_(mesh) {}

  Box before() const { return box(step_.from, mesh_.rank()); }
  Box after() const { return box(step_.to, mesh_.rank()); }
  int coordinate() const {
    return mesh_.mesh().coordinates(mesh_.rank())[static_cast<std::size_t>(step_.axes.front())];
  }
  int axis_size() const {
    return mesh_.mesh().axes()[static_cast<std::size_t>(step_.axes.front())].size;
  }

  std::shared_ptr<comm::Communicator> communicator() const {
    std::vector<std::string> names;
    for (const int axis : step_.axes) {
      names.push_back(mesh_.mesh().axes()[static_cast<std::size_t>(axis)].name);
    }
    return mesh_.axes(names);
  }

  BoxExchange exchange() const {
    BoxExchange exchange{.communicator = communicator(), .before = {}, .after = {}};
    for (const int rank : exchange.communicator->info().global_ranks) {
      exchange.before.push_back(box(step_.from, rank));
      exchange.after.push_back(box(step_.to, rank));
    }
    return exchange;
  }

 private:
  Box box(const layout::Layout& layout, int rank) const {
    return layout::local_ranges(
        {.shape = shape_, .layout = layout}, mesh_.mesh(), mesh_.mesh().coordinates(rank)
    );
  }

  const layout::RedistributionStep& step_;
  const std::vector<std::int64_t>& shape_;
  const comm::ProcessMesh& mesh_;
};

std::unique_ptr<BoundStep> bind_local(
    const layout::RedistributionStep& step, const Binder& binder
) {
  if (step.kind == Kind::kSlice) {
    auto slice = std::make_unique<Slice>();
    slice->before = binder.before();
    slice->after = binder.after();
    return slice;
  }
  if (step.kind == Kind::kEmbed) {
    auto embed = std::make_unique<Embed>();
    embed->before = binder.before();
    embed->after = binder.after();
    embed->reduce = step.reduce;
    return embed;
  }
  if (step.kind == Kind::kMask) {
    auto mask = std::make_unique<Mask>();
    mask->keeps = binder.coordinate() == 0;
    return mask;
  }
  auto scale = std::make_unique<Scale>();
  (step.reduce == Reduce::kAvg ? scale->multiply : scale->divide) = binder.axis_size();
  return scale;
}

}  // namespace

std::unique_ptr<BoundStep> bind_step(
    const layout::RedistributionStep& step,
    const std::vector<std::int64_t>& shape,
    const comm::ProcessMesh& mesh,
    const std::string& unit
) {
  const Binder binder(step, shape, mesh);
  switch (step.kind) {
    case Kind::kAllGather:
      return std::make_unique<Communicating<BoxGather>>(BoxGather(binder.exchange()), unit);
    case Kind::kAllToAll:
      return std::make_unique<Communicating<BoxAllToAll>>(BoxAllToAll(binder.exchange()), unit);
    case Kind::kReduceScatter:
      return std::make_unique<Communicating<BoxReduceScatter>>(
          BoxReduceScatter(binder.exchange(), step.reduce), unit
      );
    case Kind::kAllReduce: {
      auto reduce = std::make_unique<AllReduce>();
      reduce->communicator = binder.communicator();
      reduce->reduce = step.reduce;
      reduce->unit = unit;
      return reduce;
    }
    default:
      return bind_local(step, binder);
  }
}

}  // namespace hypershard::dtensor::internal
