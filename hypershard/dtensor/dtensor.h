// A tensor that lies on a mesh: the local part as a plain tensor, with its layout beside it.
// It dispatches nothing: take the local tensor, compute, and say how the result lies.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/comm/fwd.h"
#include "hypershard/dtensor/redistribute.h"
#include "hypershard/layout/tensor_spec.h"

namespace hypershard::dtensor {

/// A local tensor, the layout of the whole, and the mesh it lies on.
///
/// Made by `distribute`, `from_local` or `redistribute`. Copies share the local tensor; a DTensor
/// of a rank whose part is empty has an empty local tensor. Autograd runs through the local tensor.
/// Threads: the communicators' thread.
class DTensor {
 public:
  /// Takes a local tensor that is the standard cut of `spec` on this rank.
  /// Errors: InvalidArgument for another local shape or a layout that does not fit (check_spec).
  DTensor(at::Tensor local, layout::TensorSpec spec, std::shared_ptr<const comm::ProcessMesh> mesh);

  const at::Tensor& to_local() const { return local_; }
  const layout::TensorSpec& spec() const { return spec_; }
  const std::vector<std::int64_t>& shape() const { return spec_.shape; }  ///< global
  const layout::Layout& layout() const { return spec_.layout; }
  const std::shared_ptr<const comm::ProcessMesh>& mesh() const { return mesh_; }

  /// Returns the same tensor in another layout. Collective, in backward too.
  /// Shapes: any. Errors: as Redistribution.
  DTensor redistribute(const layout::Layout& target, const GradientLayouts& gradients = {}) const;

  /// Returns the whole tensor on every rank. Collective, in backward too.
  /// Shapes: the global one. Errors: as Redistribution.
  at::Tensor full_tensor(const GradientLayouts& gradients = {}) const;

 private:
  at::Tensor local_;
  layout::TensorSpec spec_;
  std::shared_ptr<const comm::ProcessMesh> mesh_;
};
/// Prints like `DTensor [8, 4] Float on mesh(dp=2, tp=2): dp: Shard(0), tp: Replicate`.
std::string to_text(const DTensor& tensor);

/// Options of `distribute`.
struct DistributeOptions {
  /// Take the values of the mesh's first rank; other ranks' tensors give shape and dtype only. Cuts
  /// the result off from autograd.
  bool broadcast = false;
};

/// Distributes `tensor`, which every rank holds whole: each takes its part.
///
/// Shapes: equal on all ranks. Communication: none, unless options.broadcast. Memory: the local
/// tensor is a copy where it is less than the whole. On Partial(sum) axes coordinate 0 takes the
/// value and the others zeros; on other Partial axes all take the value. Autograd: the gradient of
/// `tensor` is the whole one, by a gather in backward. Collective: yes.
/// Errors: InvalidArgument for a layout that does not fit the tensor or the mesh.
DTensor distribute(
    const at::Tensor& tensor,
    const layout::Layout& layout,
    const std::shared_ptr<const comm::ProcessMesh>& mesh,
    const DistributeOptions& options = {}
);

/// Makes a DTensor of local tensors.
///
/// Without `shape` the ranks exchange their sizes: along a sharded dimension pieces may be of any
/// size, in the order of the cuts, and the global size is their sum, equal on all ranks. Pieces
/// that are not the standard balanced cut are moved to it by one all-to-all, with gradients. With
/// `shape` each rank holds the standard cut, and nothing is exchanged. Collective: yes. Errors:
/// InvalidArgument on all ranks if the ranks' dtypes or dimensions differ, or sizes that must agree
/// do not (names ranks and sizes); with `shape`, on a rank whose part has another shape.
DTensor from_local(
    const at::Tensor& local,
    const layout::Layout& layout,
    const std::shared_ptr<const comm::ProcessMesh>& mesh,
    const std::optional<std::vector<std::int64_t>>& shape = {}
);

}  // namespace hypershard::dtensor
