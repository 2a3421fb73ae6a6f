// What a rank does to its local tensor, as something autograd can differentiate: a linear map over
// all ranks together, with the map that its gradient takes.
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

namespace hypershard::dtensor::internal {

/// A collective map of local tensors.
///
/// Immutable but for the gradient, which is made when it is first asked for. Threads: one at a
/// time, the communicators' thread.
class LocalMap {
 public:
  virtual ~LocalMap() = default;
  LocalMap(const LocalMap&) = delete;
  LocalMap& operator=(const LocalMap&) = delete;

  /// Applies the map outside autograd. Collective. The result may be `local` or a view of it;
  /// `is_owned`: it may be written to.
  virtual at::Tensor run(const at::Tensor& local, bool is_owned) const = 0;

  /// Returns the map from the result's gradient to the input's. Collective when first called.
  const std::shared_ptr<const LocalMap>& gradient() const;

 protected:
  LocalMap() = default;
  virtual std::shared_ptr<const LocalMap> make_gradient() const = 0;

 private:
  mutable std::shared_ptr<const LocalMap> gradient_;
};

/// Applies `map` with autograd where `local` takes part in it, else runs it alone. Backward applies
/// the gradient map in the same way, so that it can be differentiated again. Collective.
///
/// A moved-in tensor that nobody else holds, by another handle or a view, is written to: the result
/// may take its memory.
at::Tensor apply_map(const std::shared_ptr<const LocalMap>& map, at::Tensor local);

}  // namespace hypershard::dtensor::internal
