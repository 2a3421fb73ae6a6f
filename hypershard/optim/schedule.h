// The learning rate as a pure function of the step, so that a resumed run needs no scheduler state.
// libtorch's schedulers work on our optimizers too; this one is what the trainer uses.
#pragma once

#include <cstdint>
#include <string>

namespace hypershard::optim {

/// How the learning rate falls after the warm-up.
enum class Decay : std::uint8_t { kNone, kLinear, kCosine };
std::string to_text(Decay decay);

/// A warm-up followed by a decay.
///
/// With s the step from 0, w = warmup_steps, n = total_steps, f = min_ratio, t = (s - w) / (n - w):
///   s < w:                   peak * (s + 1) / w
///   decay none, s >= w:      peak
///   decay linear, w <= s < n: peak * (1 - (1 - f) * t)
///   decay cosine, w <= s < n: peak * (f + (1 - f) * (1 + cos(pi * t)) / 2)
///   decay, s >= n and s >= w: peak * f
/// So a run shorter than its warm-up never decays.
struct LearningRate {
  double peak = 1e-3;
  std::int64_t warmup_steps = 0;
  std::int64_t total_steps = 0;  ///< at least 1, unless `decay` is none, which ignores it
  Decay decay = Decay::kCosine;
  double min_ratio = 0;  ///< of the peak, at the end

  /// Returns the rate of the optimizer step that follows `step` completed ones.
  /// Errors: InvalidArgument naming the field that is out of range, or for a negative step.
  double at(std::int64_t step) const;
};

}  // namespace hypershard::optim
