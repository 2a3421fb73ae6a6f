// One recursion over the mesh's axes cuts, another one joins.
#include "hypershard/dtensor/internal/property/simulated_mesh.h"

#include <algorithm>
#include <iterator>
#include <span>

#include <ATen/ATen.h>

#include "hypershard/core/error.h"

namespace hypershard::dtensor::property {
namespace {

using layout::Placement;
using Tensors = std::vector<at::Tensor>;

at::Tensor noise(const at::Tensor& like, Random& random) {
  at::Tensor made = at::empty_like(like, like.options(), at::MemoryFormat::Contiguous);
  at::Tensor filled = made.flatten();
  std::normal_distribution<double> normal;
  for (std::int64_t i = 0; i < filled.numel(); ++i) {
    filled[i].fill_(normal(random));
  }
  return made;
}

/// Terms that reduce to `whole`.
Tensors terms_of(const at::Tensor& whole, Placement::Reduce reduce, int count, Random& random) {
  Tensors terms;
  const bool is_extremum = reduce == Placement::Reduce::kMax || reduce == Placement::Reduce::kMin;
  at::Tensor rest = reduce == Placement::Reduce::kAvg ? whole * count : whole;
  const at::Tensor owner = at::floor(noise(whole, random).abs() * 7).remainder(count);
  for (int i = 0; i < count; ++i) {
    if (is_extremum) {
      const at::Tensor off = noise(whole, random).abs();
      const at::Tensor other = reduce == Placement::Reduce::kMax ? whole - off : whole + off;
      terms.push_back(at::where(owner == i, whole, other));
    } else if (i + 1 < count) {
      terms.push_back(noise(whole, random));
      rest = rest - terms.back();
    } else {
      terms.push_back(rest);
    }
  }
  return terms;
}

Tensors pieces_of(const at::Tensor& whole, int dim, int count) {
  Tensors pieces;
  const std::int64_t size = whole.size(dim);
  std::int64_t begin = 0;
  for (int i = 0; i < count; ++i) {
    const std::int64_t length = size / count + (i < size % count ? 1 : 0);
    pieces.push_back(whole.narrow(dim, begin, length));
    begin += length;
  }
  return pieces;
}

Tensors cut_from(
    const at::Tensor& whole,
    const layout::TensorSpec& spec,
    const layout::DeviceMesh& mesh,
    int axis,
    Random& random
) {
  if (axis == mesh.num_axes()) {
    return {whole.clone(at::MemoryFormat::Contiguous)};
  }
  const Placement& placement = spec.layout.placements[static_cast<std::size_t>(axis)];
  const int size = mesh.axes()[static_cast<std::size_t>(axis)].size;
  Tensors all;
  if (placement.kind == Placement::Kind::kReplicate) {
    const Tensors one = cut_from(whole, spec, mesh, axis + 1, random);
    for (int i = 0; i < size; ++i) {
      for (const at::Tensor& piece : one) {
        all.push_back(piece.clone());
      }
    }
    return all;
  }
  const Tensors parts = placement.kind == Placement::Kind::kShard
                            ? pieces_of(whole, placement.dim, size)
                            : terms_of(whole, placement.reduce, size, random);
  for (const at::Tensor& part : parts) {
    const Tensors inner = cut_from(part, spec, mesh, axis + 1, random);
    all.insert(all.end(), inner.begin(), inner.end());
  }
  return all;
}

at::Tensor reduce(const Tensors& parts, Placement::Reduce reduce) {
  const at::Tensor stacked = at::stack(parts);
  switch (reduce) {
    case Placement::Reduce::kSum:
      return stacked.sum(0).to(parts[0].scalar_type());
    case Placement::Reduce::kAvg:
      return stacked.mean(0);
    case Placement::Reduce::kMax:
      return stacked.amax(0);
    case Placement::Reduce::kMin:
      return stacked.amin(0);
  }
  return {};
}

at::Tensor join_from(
    std::span<const at::Tensor> locals,
    const layout::TensorSpec& spec,
    const layout::DeviceMesh& mesh,
    int axis,
    std::string& fault
) {
  if (axis == mesh.num_axes()) {
    return locals[0];
  }
  const Placement& placement = spec.layout.placements[static_cast<std::size_t>(axis)];
  const auto size = static_cast<std::size_t>(mesh.axes()[static_cast<std::size_t>(axis)].size);
  const std::size_t stride = locals.size() / size;
  Tensors parts;
  for (std::size_t i = 0; i < size; ++i) {
    parts.push_back(join_from(locals.subspan(i * stride, stride), spec, mesh, axis + 1, fault));
  }
  if (placement.kind == Placement::Kind::kReplicate) {
    for (const at::Tensor& part : parts) {
      if (fault.empty() && !agree(part, parts[0])) {
        fault = concat_text("replicas differ along axis ", axis);
      }
    }
    return parts[0];
  }
  if (placement.kind == Placement::Kind::kPartial) {
    return reduce(parts, placement.reduce);
  }
  // Some operators give empty tensors another dtype; they hold nothing that could be joined.
  Tensors filled;
  std::copy_if(parts.begin(), parts.end(), std::back_inserter(filled), [](const at::Tensor& part) {
    return part.numel() > 0;
  });
  return filled.empty() ? at::cat(parts, placement.dim) : at::cat(filled, placement.dim);
}

}  // namespace

std::int64_t draw(Random& random, std::int64_t bound) {
  return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(bound));
}

bool chance(Random& random, double probability) {
  return static_cast<double>(draw(random, 1000)) < probability * 1000;
}

std::vector<at::Tensor> cut(
    const at::Tensor& whole,
    const layout::TensorSpec& spec,
    const layout::DeviceMesh& mesh,
    Random& random
) {
  return cut_from(whole, spec, mesh, 0, random);
}

at::Tensor join(
    const std::vector<at::Tensor>& locals,
    const layout::TensorSpec& spec,
    const layout::DeviceMesh& mesh,
    std::string& fault
) {
  return join_from(locals, spec, mesh, 0, fault);
}

bool agree(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) {
    return false;
  }
  return a.numel() == 0 || at::allclose(a.to(at::kDouble), b.to(at::kDouble), 1e-9, 1e-10, true);
}

}  // namespace hypershard::dtensor::property
