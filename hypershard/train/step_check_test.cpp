// Steps of every strategy are found right, and what is made wrong is found: parameters that differ,
// gradients that are scaled, plans that leave something out.
#include "hypershard/train/step_check.h"

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <c10/core/GradMode.h>

#include "hypershard/core/error.h"
#include "hypershard/model/gpt.h"
#include "hypershard/nn/hooks.h"
#include "hypershard/optim/optimizer.h"
#include "hypershard/plan/layout_error.h"
#include "hypershard/train/step.h"
#include "hypershard/train/test_session.h"

namespace hypershard::train {
namespace {

struct Case {
  std::string name;
  int num_ranks;
  std::vector<std::string> overrides;
};

std::unique_ptr<test::TextFolder> text_folder;

class StepCheckEnvironment : public ::testing::Environment {
 public:
  void SetUp() override { text_folder = std::make_unique<test::TextFolder>("step_check"); }
  void TearDown() override { text_folder.reset(); }
};
const auto* const kEnvironment =
    ::testing::AddGlobalTestEnvironment(new StepCheckEnvironment);  // owned by GoogleTest

// Runs `body` with a session that validates, initialised.
void with_sessions(const Case& test, const std::function<void(const Session& session)>& body) {
  RunConfigFile file;
  text_folder->load(file, test.overrides, test.num_ranks);
  const RunConfig& config = file.config();
  test::run_on_ranks(config, test.num_ranks, [&](const std::shared_ptr<comm::World>& world) {
    const Session session(
        config, world, open_data(config, world->size()), SessionOptions{.validates = true}
    );
    session.initialize();
    body(session);
  });
}

class StepCheckTest : public ::testing::TestWithParam<Case> {};

TEST_P(StepCheckTest, RightStepsPassAndLeaveTheSameWeights) {
  std::atomic<int> num_checked = 0;
  double checked_loss = 0;
  double plain_loss = 0;
  with_sessions(GetParam(), [&](const Session& session) {
    for (std::int64_t step = 0; step < 2; ++step) {
      StepCheck check(session);
      const StepResult result = run_step(session, step, {}, &check);
      require_passed(session, check.verdict());
      EXPECT_TRUE(check.verdict().gradients.passed);
      EXPECT_GT(check.verdict().counts.operators, 20);
      EXPECT_GT(check.verdict().counts.backward_operators, 20);
      if (session.world().rank() == 0) {
        EXPECT_EQ(
            check.verdict().gradients.rows.size(), session.sharded().parameter_names().size()
        );
        EXPECT_NEAR(check.verdict().reference_loss, result.loss, 0.02);
      }
      ++num_checked;
    }
    const double loss = run_step(session, 2, {}).loss;
    if (session.world().rank() == 0) {
      checked_loss = loss;
    }
  });
  EXPECT_EQ(num_checked, 2 * GetParam().num_ranks);
  with_sessions(GetParam(), [&](const Session& session) {
    for (std::int64_t step = 0; step < 3; ++step) {
      const double loss = run_step(session, step, {}).loss;
      if (session.world().rank() == 0) {
        plain_loss = loss;
      }
    }
  });
  EXPECT_EQ(checked_loss, plain_loss);
}

const std::string kDouble = "precision.compute=fp64";
const std::string kTwo = "parallel.tp=2";

INSTANTIATE_TEST_SUITE_P(
    All,
    StepCheckTest,
    ::testing::Values(
        Case{"one_rank", 1, {kDouble}},
        Case{"ddp", 2, {kDouble, "parallel.strategy=ddp"}},
        Case{"zero1", 2, {"parallel.strategy=zero1", "parallel.share=off"}},
        Case{"zero2_accumulated", 2, {kDouble, "parallel.strategy=zero2", "batch.accumulation=3"}},
        Case{"zero3_shared", 2, {kDouble, "batch.accumulation=2", "batch.sync=last"}},
        Case{"zero3_recomputed", 3, {kDouble, "model.recompute=true", "parallel.share=off"}},
        Case{
            "hsdp",
            4,
            {kDouble, "parallel.strategy=hsdp", "parallel.replicate=2", "parallel.supernodes=2"}
        },
        Case{"steps_in_backward", 2, {"optimizer.step_in_backward=true", "optimizer.clip_norm=0"}},
        Case{"bf16", 2, {"precision.compute=bf16"}},
        Case{"tensor", 2, {kDouble, kTwo}},
        Case{"tensor_bf16", 2, {kTwo, "precision.compute=bf16"}},
        Case{
            "everything_and_shards",
            4,
            {kDouble, kTwo, "parallel.plan=tensor,sequence,vocabulary", "model.recompute=true"}
        },
        Case{
            "vocabulary_and_replicas",
            4,
            {kDouble,
             kTwo,
             "parallel.plan=vocabulary",
             "parallel.strategy=hierarchical",
             "parallel.replicate=2",
             "model.tie_embeddings=false"}
        }
    ),
    [](const auto& each) { return each.param.name; }
);

// Returns what rank 0's step throws.
template <class Error>
std::string text_of_failure(const Case& test, const std::function<void(const Session&)>& spoil) {
  std::string text;
  with_sessions(test, [&](const Session& session) {
    spoil(session);
    try {
      StepCheck check(session);
      run_step(session, 0, {}, &check);
      require_passed(session, check.verdict());
    } catch (const Error& error) {
      if (session.world().rank() == 0) {
        text = error.what();
      }
    }
  });
  return text;
}

void expect_fragments(const std::string& text, const std::vector<std::string>& fragments) {
  for (const std::string& fragment : fragments) {
    EXPECT_NE(text.find(fragment), std::string::npos) << "no '" << fragment << "' in:\n" << text;
  }
}

TEST(StepCheckFindingTest, ScaledGradientsAreFoundWithATable) {
  const std::string text =
      text_of_failure<FoundWrong>({"", 2, {kDouble}}, [](const Session& session) {
        session.sharded().set_gradient_divide_factor(3);
      });
  expect_fragments(
      text, {"differ from those of the same step on one rank", "embed.weight", "FAILED", "hint"}
  );
}

// Rank 1 alone fails in the middle of a forward; all leave with its text, long before a timeout.
TEST(StepCheckFindingTest, AFailureOfOneRankEndsAllWithItsText) {
  struct Fails final : nn::ForwardHooks {
    void pre_forward(std::span<at::Tensor* const>) override { HS_FAIL(IoError, "a disk is full"); }
    void post_forward(std::span<at::Tensor* const>) override {}
  };
  for (const auto& overrides : {std::vector<std::string>{kDouble}, {kDouble, kTwo}}) {
    std::atomic<int> num_failed = 0;
    with_sessions({"", 2, overrides}, [&](const Session& session) {
      const auto hooks = std::make_shared<Fails>();
      if (session.world().rank() == 1) {
        session.model().blocks->at<model::BlockImpl>(1).mlp->add_forward_hooks(hooks);
      }
      try {
        StepCheck check(session);
        run_step(session, 0, {}, &check);
      } catch (const FoundWrong&) {
        ADD_FAILURE() << "a failure is no finding";
      } catch (const AgreedFailure& failure) {
        EXPECT_EQ(failure.code(), ErrorCode::kIo);
        expect_fragments(failure.what(), {"a disk is full"});
        expect_fragments(session.world().rank() == 0 ? failure.what() : "rank 1", {"rank 1"});
        ++num_failed;
      }
    });
    EXPECT_EQ(num_failed, 2);
  }
}

TEST(StepCheckFindingTest, ParametersThatDifferBetweenRanksOfAPlanAreNamed) {
  const std::string text =
      text_of_failure<FoundWrong>({"", 2, {kDouble, kTwo}}, [](const Session& session) {
        if (session.world().rank() == 1) {
          const c10::NoGradGuard no_grad;
          for (at::Tensor tensor : session.sharded().update_tensors("no_decay")) {
            tensor.mul_(1.5);
          }
          session.sharded().sync_runtime();
        } else {
          session.sharded().sync_runtime();
        }
      });
  expect_fragments(text, {"parameter ", "norm.weight", "rank"});
}

}  // namespace
}  // namespace hypershard::train
