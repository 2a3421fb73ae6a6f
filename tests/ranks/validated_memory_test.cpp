// Memory over many validated steps, as the kernel counts it: layouts are forgotten with their
// tensors, and so is everything else that a guard writes down of a step.
#include <cstdint>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "hypershard/layout/sharding.h"
#include "hypershard/model/gpt.h"
#include "hypershard/model/gpt_plan.h"
#include "hypershard/plan/apply.h"
#include "hypershard/plan/validation.h"
#include "hypershard/testing/run_ranks.h"
#include "hypershard/train/process_memory.h"

namespace hypershard {
namespace {

/// Returns what the kernel finds resident in this process, page by page: VmRSS is a sum that lags.
std::int64_t exact_resident_bytes() {
  std::ifstream rollup("/proc/self/smaps_rollup");
  for (std::string line; std::getline(rollup, line);) {
    if (line.starts_with("Rss:")) {
      return std::stoll(line.substr(4)) * 1024;
    }
  }
  return 0;
}

/// A small GPT under all that a plan of it can cut, trained step by step.
class PlannedGpt {
 public:
  explicit PlannedGpt(const std::shared_ptr<comm::World>& world)
      : mesh_(std::make_shared<const comm::ProcessMesh>(
            world, layout::DeviceMesh({{"tp", world->size()}}, world->topology())
        )),
        model_(config()) {
    const at::Tensor x = batch(0).narrow(1, 0, kPositions).contiguous();
    const layout::TensorSpec spec{x.sizes().vec(), layout::replicated_layout(mesh_->mesh())};
    applied_ = plan::apply_plan(
        *model_,
        model::gpt_plan(
            config(), mesh_->mesh(), {.tensor = true, .sequence = true, .vocabulary = true}
        ),
        mesh_,
        {{x, spec, "tokens"}, {x, spec, "targets"}},
        [&] { return std::vector<at::Tensor>{model_->loss(x, x)}; }
    );
  }
  model::Gpt& model() { return model_; }
  const plan::AppliedPlan& applied() const { return applied_; }

  void step(int number) {
    const at::Tensor tokens = batch(number);
    model_->loss(tokens.narrow(1, 0, kPositions), tokens.narrow(1, 1, kPositions)).backward();
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : model_->parameters()) {
      parameter.sub_(parameter.grad(), 0.01);
    }
    model_->zero_grad();
  }

 private:
  static constexpr std::int64_t kPositions = 16;
  static constexpr std::int64_t kVocabulary = 64;

  static model::GptConfig config() {
    return {
        .vocab_size = kVocabulary,
        .num_layers = 2,
        .dim = 32,
        .num_heads = 2,
        .max_sequence = kPositions
    };
  }
  static at::Tensor batch(int number) {
    return at::arange(2 * (kPositions + 1), at::kLong)
        .mul(7)
        .add(number)
        .remainder(kVocabulary)
        .view({2, kPositions + 1});
  }

  std::shared_ptr<const comm::ProcessMesh> mesh_;
  model::Gpt model_;
  plan::AppliedPlan applied_;
};

enum class Guards { kOne, kOneEachStep };

/// Validates 500 steps and compares with what was resident after 50.
void expect_nothing_is_kept(const std::shared_ptr<comm::World>& world, Guards guards) {
  train::keep_freed_memory();
  at::set_num_threads(1);
  PlannedGpt planned(world);
  std::optional<plan::ValidationGuard> guard;
  std::int64_t num_marked = 0;
  const auto validate = [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      if (!guard.has_value()) {
        guard.emplace(*planned.model(), planned.applied());
      }
      const plan::ValidationCounts before = guard->counts();
      planned.step(i);
      const plan::ValidationCounts after = guard->counts();
      ASSERT_EQ(after.backwards - before.backwards, 1);
      ASSERT_EQ(after.pending, 0U);
      num_marked += after.operators - before.operators + after.boundaries - before.boundaries;
      if (guards == Guards::kOneEachStep) {
        guard->finish();
        guard.reset();
      }
    }
  };
  validate(0, 50);
  const std::int64_t settled = exact_resident_bytes();
  ASSERT_GT(settled, 0);
  num_marked = 0;
  validate(50, 500);
  // One guard remembers of each operator, up to a limit, whose its backward will be.
  const std::int64_t marks = guards == Guards::kOne ? 16 * num_marked : 0;
  EXPECT_LE(exact_resident_bytes() - settled, (256 << 10) + marks);
}

class ValidatedMemoryTest : public ::testing::TestWithParam<Guards> {};
INSTANTIATE_TEST_SUITE_P(
    Guards,
    ValidatedMemoryTest,
    ::testing::Values(Guards::kOne, Guards::kOneEachStep),
    [](const auto& each) {
      return std::string(each.param == Guards::kOne ? "one" : "one_each_step");
    }
);

TEST_P(ValidatedMemoryTest, FiveHundredStepsNeedNoMoreThanFifty) {
  testing::run_ranks(
      2,
      [](const std::shared_ptr<comm::World>& world) { expect_nothing_is_kept(world, GetParam()); },
      {.backend = testing::RankBackend::kShm, .deadline_s = 100}
  );
}

}  // namespace
}  // namespace hypershard
