// Steps of every strategy are found right, and what is made wrong is found: parameters that differ,
// gradients that are scaled, plans that leave something out.
#include "hypershard/train/step_check.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "hypershard/core/error.h"
#include "hypershard/model/gpt.h"
#include "hypershard/nn/hooks.h"
#include "hypershard/nn/init.h"
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
        Case{
            "wire_bf16",
            4,
            {"precision.wire=bf16",
             "parallel.strategy=hsdp",
             "parallel.replicate=2",
             "parallel.supernodes=2"}
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

std::vector<Case> single_precision() {
  const std::vector<std::string> all = {
      "batch.accumulation=12", "model.tie_embeddings=false", "parallel.strategy=ddp"
  };
  std::vector<std::string> tensor = all;
  tensor.push_back(kTwo);
  return {{"ddp", 2, all}, {"tensor", 2, tensor}};
}

// Targets of one step by token.
at::Tensor target_counts(const Session& session) {
  at::Tensor counts = at::zeros({session.shape().vocab_size}, at::kDouble);
  for (std::int64_t micro = 0; micro < session.config().batch.accumulation; ++micro) {
    for (int data_rank = 0; data_rank < session.num_data_ranks(); ++data_rank) {
      const data::Batch rows = session.data().batch(
          session.config(), /*step=*/0, micro, data_rank, session.num_data_ranks()
      );
      counts += at::bincount(rows.target.flatten(), {}, counts.numel());
    }
  }
  return counts;
}

// Gives the model weights that are as good as they can be: it predicts the frequencies of the
// step's tokens at every position, whatever stands before. Each row's gradients are large and their
// mean is nothing but rounding, except the embedding's, whose rows see some of the tokens each.
void settle(const Session& session) {
  const auto init = [&](std::string_view name, at::IntArrayRef shape) {
    if (name == "embed.weight") {
      return nn::Init::constant(1);
    }
    const bool ends_branch = name.ends_with("wo.weight") || name.ends_with("w2.weight");
    return ends_branch ? nn::Init::constant(0) : model::gpt_init(session.shape())(name, shape);
  };
  session.sharded().initialize(init, /*seed=*/3);
  session.sharded().begin_update();
  const at::Tensor counts = target_counts(session);
  const at::Tensor logits = counts.add(1e-6).div(counts.sum()).log();
  const c10::NoGradGuard no_grad;
  for (const shard::UpdateTensor& update : session.sharded().update_parameters()) {
    for (const shard::UpdatePiece& piece : update.pieces) {
      if (piece.name != "head.weight") {
        continue;
      }
      const at::Tensor flat = update.tensor.narrow(0, piece.offset, piece.range.numel());
      const at::Tensor head = flat.view(piece.shape).to(at::kDouble);
      const double dim = static_cast<double>(head.size(1));
      // What enters the head is 1 everywhere.
      const at::Tensor across = (head - head.mean(1, /*keepdim=*/true)) * 50;
      flat.view(piece.shape).copy_(across + logits.unsqueeze(1) / dim);
    }
  }
  session.sharded().sync_runtime();
}

TEST(StepCheckFindingTest, WhatFp32RoundsAwayIsNoDifference) {
  for (const Case& test : single_precision()) {
    std::atomic<int> num_passed = 0;
    with_sessions(test, [&](const Session& session) {
      settle(session);
      StepCheck check(session);
      run_step(session, 0, {}, &check);
      require_passed(session, check.verdict());
      const plan::GradientReport& gradients = check.verdict().gradients;
      EXPECT_TRUE(gradients.is_exact) << test.name << '\n' << to_text(gradients);
      if (session.world().rank() == 0) {
        EXPECT_EQ(gradients.rows.size(), session.sharded().parameter_names().size());
        EXPECT_TRUE(std::any_of(gradients.rows.begin(), gradients.rows.end(), [](const auto& row) {
          return row.relative_error > 1e-5 && row.bound > 1e-5;
        })) << to_text(gradients);
        expect_fragments(
            to_text(check.verdict()), {"but for the rounding of fp32", "a reference in fp64"}
        );
      }
      num_passed += gradients.passed ? 1 : 0;
    });
    EXPECT_EQ(num_passed, 2) << test.name;
  }
}

TEST(StepCheckFindingTest, WhatIsWrongInFp32StaysWrongBesideFp64) {
  for (const Case& test : single_precision()) {
    for (const bool is_settled : {false, true}) {
      const std::string text = text_of_failure<FoundWrong>(test, [&](const Session& session) {
        if (is_settled) {
          settle(session);
        }
        session.sharded().set_gradient_divide_factor(12 * session.num_data_ranks() * 1.001);
      });
      expect_fragments(
          text, {"differ from those of the same step", "FAILED", "a reference in fp64"}
      );
    }
  }
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
