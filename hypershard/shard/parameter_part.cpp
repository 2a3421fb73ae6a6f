// See parameter_part.h.
#include "hypershard/shard/parameter_part.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include "hypershard/core/error.h"
#include "hypershard/core/error_context.h"
#include "hypershard/core/text.h"

namespace hypershard::shard {

namespace {

using Kind = layout::Placement::Kind;

bool is_data_axis(const std::string& axis, const layout::DataAxes& data_axes) {
  return axis == data_axes.replicate || axis == data_axes.shard;
}

void check_placements(
    const std::string& name,
    const layout::TensorSpec& spec,
    const layout::DeviceMesh& mesh,
    const layout::DataAxes& data_axes
) {
  layout::check_spec(spec, mesh);
  for (std::size_t i = 0; i < mesh.axes().size(); ++i) {
    const std::string& axis = mesh.axes()[i].name;
    const layout::Placement& placement = spec.layout.placements[i];
    HS_CHECK(
        placement.kind == Kind::kReplicate || !is_data_axis(axis, data_axes),
        "shard: the layout of parameter '",
        name,
        "' is ",
        placement,
        " on data axis '",
        axis,
        "'; expected Replicate",
        HS_HINT("fully_shard itself cuts parameters over the data axes")
    );
    HS_CHECK(
        placement.kind != Kind::kPartial,
        "shard: the layout of parameter '",
        name,
        "' is ",
        placement,
        " on axis '",
        axis,
        "'; expected Replicate or Shard",
        HS_HINT("if its gradient is Partial there, name the axis in reduce_axes")
    );
  }
}

void check_local_shape(
    const std::string& name,
    std::span<const std::int64_t> found,
    const layout::TensorSpec& spec,
    const layout::Block& block,
    const layout::DeviceMesh& mesh
) {
  const std::vector<std::int64_t> expected = block.local_shape();
  HS_CHECK(
      std::equal(found.begin(), found.end(), expected.begin(), expected.end()),
      "shard: parameter '",
      name,
      "' has local shape ",
      std::vector<std::int64_t>(found.begin(), found.end()),
      "; expected ",
      expected,
      ", the part ",
      block,
      " of ",
      spec.shape,
      " with layout ",
      to_text(spec.layout, mesh),
      HS_HINT("cut the module's parameters before fully_shard; plan::apply_plan does")
  );
}

// In mesh order without axes of size 1, so that equal sets compare equal.
std::vector<std::string> settle_reduce_axes(
    const std::string& name,
    const ParameterSpec& given,
    const layout::DeviceMesh& mesh,
    const layout::DataAxes& data_axes
) {
  for (const std::string& axis : given.reduce_axes) {
    const layout::Placement& placement =
        given.spec.layout.placements[static_cast<std::size_t>(mesh.axis_index(axis))];
    HS_CHECK(
        !is_data_axis(axis, data_axes),
        "shard: reduce_axes of parameter '",
        name,
        "' names data axis '",
        axis,
        "'",
        HS_HINT("gradients are always reduced over the data axes; name only axes of the plan")
    );
    HS_CHECK(
        !placement.splits(),
        "shard: reduce_axes of parameter '",
        name,
        "' names axis '",
        axis,
        "', over which the parameter is ",
        placement,
        "; a sum there would mix gradients of different elements",
        HS_HINT("reduce only over axes on which the parameter is Replicate")
    );
  }
  std::vector<std::string> settled;
  for (const layout::MeshAxis& axis : mesh.axes()) {
    const auto& given_axes = given.reduce_axes;
    if (axis.size > 1 &&
        std::find(given_axes.begin(), given_axes.end(), axis.name) != given_axes.end()) {
      settled.push_back(axis.name);
    }
  }
  return settled;
}

}  // namespace

std::vector<std::string> find_plan_axes(
    const layout::DeviceMesh& mesh, const layout::DataAxes& data_axes
) {
  std::vector<std::string> names;
  for (const layout::MeshAxis& axis : mesh.axes()) {
    if (axis.size > 1 && !is_data_axis(axis.name, data_axes)) {
      names.push_back(axis.name);
    }
  }
  return names;
}

ParameterPart find_part(
    const std::string& name,
    std::span<const std::int64_t> local_shape,
    const ParameterSpec* given,
    const layout::DeviceMesh& mesh,
    const layout::DataAxes& data_axes,
    int rank
) {
  const ErrorContext context(name);
  const std::vector<int> ranks = mesh.group(find_plan_axes(mesh, data_axes), rank);
  ParameterPart part;
  if (given == nullptr) {
    part.block = layout::whole_block({local_shape.begin(), local_shape.end()});
    part.is_first = ranks.front() == rank;
    return part;
  }
  check_placements(name, given->spec, mesh, data_axes);
  part.block = layout::local_block(given->spec, mesh, mesh.coordinates(rank));
  check_local_shape(name, local_shape, given->spec, part.block, mesh);
  part.reduce_axes = settle_reduce_axes(name, *given, mesh, data_axes);
  bool all_whole = true;
  for (const int each : ranks) {
    part.of_ranks.push_back(layout::local_block(given->spec, mesh, mesh.coordinates(each)));
    all_whole = all_whole && part.of_ranks.back().is_whole();
  }
  const auto first = std::find(part.of_ranks.begin(), part.of_ranks.end(), part.block);
  part.is_first = ranks[static_cast<std::size_t>(first - part.of_ranks.begin())] == rank;
  if (all_whole) {
    part.of_ranks.clear();
  }
  return part;
}

at::Tensor join_parts(
    const at::Tensor& local,
    const ParameterPart& part,
    comm::Communicator* ranks,
    const std::string& name
) {
  if (ranks == nullptr || part.of_ranks.empty()) {
    return local;
  }
  const c10::NoGradGuard no_grad;
  std::vector<std::int64_t> counts;  // a part that several ranks hold comes from the first
  std::int64_t total = 0;
  for (auto each = part.of_ranks.begin(); each != part.of_ranks.end(); ++each) {
    counts.push_back(std::find(part.of_ranks.begin(), each, *each) == each ? each->numel() : 0);
    total += counts.back();
  }
  const at::Tensor flat = local.contiguous().view({-1});
  const at::Tensor all = at::empty({total}, local.options());
  ranks->all_gather(all, flat.narrow(0, 0, part.is_first ? flat.numel() : 0), counts, name)
      ->wait_released();
  at::Tensor whole = at::empty(part.block.shape, local.options());
  std::int64_t at = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] == 0) {
      continue;
    }
    const layout::Block& block = part.of_ranks[i];
    at::Tensor target = whole;
    for (std::size_t dim = 0; dim < block.ranges.size(); ++dim) {
      target = target.narrow(
          static_cast<std::int64_t>(dim), block.ranges[dim].begin, block.ranges[dim].numel()
      );
    }
    target.copy_(all.narrow(0, at, counts[i]).view(block.local_shape()));
    at += counts[i];
  }
  return whole;
}

}  // namespace hypershard::shard
