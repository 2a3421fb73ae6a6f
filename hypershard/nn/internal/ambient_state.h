// What a forward reads besides its arguments and parameters: random generators and autocast.
// Recompute puts it back so that the second run computes what the first one did.
#pragma once

#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace hypershard::nn::internal {

/// A copy of the ambient state at one moment.
///
/// Generators: the default one of the CPU and of every other device among the tensors given to
/// capture(); that is the seam for accelerators, whose generators (seed and offset) are reached by
/// the same two calls.
class AmbientState {
 public:
  static AmbientState capture(const std::vector<at::Tensor>& tensors);
  /// Makes this the state of the calling thread and of the default generators.
  void restore() const;

 private:
  struct Generator {
    at::Generator generator;
    at::Tensor state;
  };
  std::vector<Generator> generators_;
  bool autocast_ = false;
  bool autocast_cache_ = true;
  at::ScalarType autocast_dtype_ = at::kBFloat16;
};

/// Puts `wanted` in place and the state found back at the end of the scope.
class AmbientStateGuard {
 public:
  AmbientStateGuard(const AmbientState& wanted, const std::vector<at::Tensor>& tensors)
      : found_(AmbientState::capture(tensors)) {
    wanted.restore();
  }
  AmbientStateGuard(const AmbientStateGuard&) = delete;
  AmbientStateGuard& operator=(const AmbientStateGuard&) = delete;
  ~AmbientStateGuard() { found_.restore(); }

 private:
  AmbientState found_;
};

}  // namespace hypershard::nn::internal
