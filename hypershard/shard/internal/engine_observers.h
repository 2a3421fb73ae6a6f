// Why: layers and recompute segments tell the engine what happens to a unit through interfaces of
// nn/; these two pass it on, and outlive the engine harmlessly.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "hypershard/nn/gradient_slot.h"
#include "hypershard/nn/recompute.h"
#include "hypershard/shard/engine.h"

namespace hypershard::shard::internal {

/// Asks the engine where a layer shall write the gradient of one parameter.
class EngineSlot final : public nn::GradientSlot {
 public:
  EngineSlot(std::weak_ptr<Engine> engine, int unit, std::size_t group, std::size_t param)
      : engine_(std::move(engine)), unit_(unit), group_(group), param_(param) {}
  Claim claim() override {
    const std::shared_ptr<Engine> engine = engine_.lock();
    if (!engine) {
      return {};
    }
    auto [destination, overwrite] = engine->claim_gradient(unit_, group_, param_);
    return {.destination = std::move(destination), .overwrite = overwrite};
  }

 private:
  std::weak_ptr<Engine> engine_;
  int unit_;
  std::size_t group_;
  std::size_t param_;
};

/// Tells the engine that a segment which a unit ran in runs again, or is done.
class SegmentObserver final : public nn::RecomputeObserver {
 public:
  SegmentObserver(std::weak_ptr<Engine> engine, int unit)
      : engine_(std::move(engine)), unit_(unit) {}
  void before_recompute() override {
    if (const auto engine = engine_.lock()) {
      engine->segment_starts_again(unit_);
    }
  }
  void after_recompute() noexcept override {
    if (const auto engine = engine_.lock()) {
      engine->segment_done(unit_);
    }
  }

 private:
  std::weak_ptr<Engine> engine_;
  int unit_;
};

}  // namespace hypershard::shard::internal
