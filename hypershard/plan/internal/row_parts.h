// Tells layers which rows of their parameters a rank has.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/comm/world.h"
#include "hypershard/layout/mesh.h"
#include "hypershard/layout/tensor_spec.h"
#include "hypershard/nn/row_part.h"

namespace hypershard::plan::internal {

/// Parts of parameters, attached while this lives.
class RowParts {
 public:
  /// Attaches a part if the layout cuts the rows of a matrix; `tensor` has its local shape.
  /// `ranks` null: the part has no communicator. Collective with one, where the axes' communicator
  /// is used for the first time.
  void add(
      const at::Tensor& tensor,
      const layout::TensorSpec& spec,
      const layout::DeviceMesh& mesh,
      int rank,
      const comm::ProcessMesh* ranks
  );

 private:
  std::vector<nn::RowPartPtr> parts_;  // the layers' table does not own them
};

}  // namespace hypershard::plan::internal
