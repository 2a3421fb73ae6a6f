// Which rows of a parameter a rank holds, for the layers that have to know: a table or a projection
// whose rows are a vocabulary that several ranks share.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

#include "hypershard/comm/fwd.h"

namespace hypershard::nn {

/// One rank's rows of a parameter that is cut along its first dimension.
///
/// Whoever cuts parameters (applying a plan) attaches it; layers look it up. Immutable once
/// attached. `ranks` is null while a plan is resolved: shapes are right then, values are this
/// rank's alone.
struct RowPart final : torch::CustomClassHolder {
  RowPart(
      std::int64_t first_in,
      std::int64_t count_in,
      std::int64_t total_in,
      std::vector<int> axes_in,
      std::shared_ptr<comm::Communicator> ranks_in
  );

  std::int64_t first = 0;                     ///< global number of this rank's first row
  std::int64_t count = 0;                     ///< rows here; may be none
  std::int64_t total = 0;                     ///< of the whole parameter
  std::vector<int> axes;                      ///< of the mesh, that cut the rows, outermost first
  std::shared_ptr<comm::Communicator> ranks;  ///< those that hold the other rows, in their order

  /// Weak references keep an object's memory: what it holds must not outlive its last owner.
  void release_resources() override { ranks.reset(); }
};
using RowPartPtr = c10::intrusive_ptr<RowPart>;

/// Attaches a part to a parameter, in the place of an earlier one; null detaches.
///
/// Keyed by the parameter's TensorImpl, so every handle of it finds the part and a clone does not.
/// The table owns neither: the caller keeps the part. Threads: any. Errors: InvalidArgument if
/// `param` is undefined.
void set_row_part(const at::Tensor& param, const RowPartPtr& part);

/// Returns the part of a parameter, null if it is whole. Costs an atomic load while no part exists
/// in the process. Errors: InvalidArgument if the parameter does not have the part's rows.
RowPartPtr row_part_of(const at::Tensor& param);

/// Gathers columns that belong to the rows of a part, such as logits of a cut projection.
///
/// Shapes: columns [..., part.count]; result [..., part.total]. Not differentiable. Collective: the
/// part's ranks, with tensors alike but for the last dimension.
/// Errors: InvalidArgument for another shape or a part without ranks; CommError.
at::Tensor gather_columns(const at::Tensor& columns, const RowPart& part);

}  // namespace hypershard::nn
