// See row_parts.h.
#include "hypershard/plan/internal/row_parts.h"

#include <string>

#include "hypershard/layout/sharding.h"

namespace hypershard::plan::internal {

void RowParts::add(
    const at::Tensor& tensor,
    const layout::TensorSpec& spec,
    const layout::DeviceMesh& mesh,
    int rank,
    const comm::ProcessMesh* ranks
) {
  if (tensor.dim() != 2) {
    return;
  }
  std::vector<int> axes;
  std::vector<std::string> names;
  for (const int axis : spec.layout.cut_axes(0)) {
    const auto& each = mesh.axes()[static_cast<std::size_t>(axis)];
    if (each.size > 1) {
      axes.push_back(axis);
      names.push_back(each.name);
    }
  }
  if (axes.empty()) {
    return;
  }
  auto part = c10::make_intrusive<nn::RowPart>(
      layout::local_offset(spec, mesh, rank)[0],
      tensor.size(0),
      spec.shape[0],
      axes,
      ranks == nullptr ? nullptr : ranks->axes(names)
  );
  nn::set_row_part(tensor, part);
  parts_.push_back(std::move(part));
}

}  // namespace hypershard::plan::internal
