// See schedule.h. In doubles and without state: the same bits whenever and wherever it is asked.
#include "hypershard/optim/schedule.h"

#include <cmath>
#include <numbers>

#include "hypershard/core/error.h"

namespace hypershard::optim {

namespace {

void check(const LearningRate& rate, std::int64_t step) {
  HS_CHECK(
      std::isfinite(rate.peak) && rate.peak >= 0,
      "optim: learning rate: peak is ",
      rate.peak,
      "; expected 0 or more"
  );
  HS_CHECK_GE(rate.warmup_steps, 0, "optim: learning rate: warmup_steps counts steps");
  HS_CHECK(
      rate.decay == Decay::kNone || rate.total_steps >= 1,
      "optim: learning rate: total_steps is ",
      rate.total_steps,
      "; a ",
      rate.decay,
      " decay needs at least 1"
  );
  HS_CHECK(
      rate.min_ratio >= 0 && rate.min_ratio <= 1,
      "optim: learning rate: min_ratio is ",
      rate.min_ratio,
      "; expected 0 to 1"
  );
  HS_CHECK_GE(step, 0, "optim: learning rate: steps are counted from 0");
}

}  // namespace

std::string to_text(Decay decay) {
  switch (decay) {
    case Decay::kNone:
      return "none";
    case Decay::kLinear:
      return "linear";
    case Decay::kCosine:
      return "cosine";
  }
  return "?";
}

double LearningRate::at(std::int64_t step) const {
  check(*this, step);
  if (step < warmup_steps) {
    return peak * static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
  }
  if (decay == Decay::kNone) {
    return peak;
  }
  if (step >= total_steps) {
    return peak * min_ratio;
  }
  const double t =
      static_cast<double>(step - warmup_steps) / static_cast<double>(total_steps - warmup_steps);
  if (decay == Decay::kLinear) {
    return peak * (1 - (1 - min_ratio) * t);
  }
  return peak * (min_ratio + (1 - min_ratio) * (1 + std::cos(std::numbers::pi * t)) / 2);
}

}  // namespace hypershard::optim
