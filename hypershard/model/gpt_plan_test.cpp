// The ready-made plans: the same losses and gradients as the whole model, the collectives that the
// plan announces, nothing else at run time, and no false alarm under validation.
#include "hypershard/model/gpt_plan.h"

#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "hypershard/comm/communicator.h"
#include "hypershard/core/error.h"
#include "hypershard/layout/sharding.h"
#include "hypershard/model/gpt.h"
#include "hypershard/model/sample.h"
#include "hypershard/nn/test_support.h"
#include "hypershard/plan/apply.h"
#include "hypershard/plan/gradient_equivalence.h"
#include "hypershard/plan/validation.h"
#include "hypershard/testing/run_ranks.h"

namespace hypershard::model {
namespace {

using layout::Placement;
using nn::testing::OperatorTrace;
using plan::AppliedPlan;
using Mesh = std::shared_ptr<const comm::ProcessMesh>;

struct Case {
  const char* name;
  int tp;
  GptPlanOptions options;
  int dp = 1;
  bool tied = false;
  std::int64_t positions = 8;
  RecomputePolicy recompute = RecomputePolicy::kNone;
  std::int64_t dim = 32;
  std::int64_t vocab = 37;  // divides by nothing
  std::int64_t hidden = 46;
};

std::ostream& operator<<(std::ostream& out, const Case& each) {
  return out << each.name << " on " << each.dp << "x" << each.tp;
}

GptPlanOptions options_of(bool tensor, bool sequence, bool vocabulary) {
  return GptPlanOptions{.tensor = tensor, .sequence = sequence, .vocabulary = vocabulary};
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  const std::vector<std::pair<const char*, GptPlanOptions>> plans = {
      {"tp", options_of(true, false, false)},
      {"tp_sp", options_of(true, true, false)},
      {"vp", options_of(false, false, true)},
      {"tp_vp", options_of(true, false, true)},
      {"tp_sp_vp", options_of(true, true, true)}
  };
  for (const auto& [name, options] : plans) {
    for (const int ranks : {1, 2, 4}) {
      cases.push_back({name, ranks, options});
      cases.push_back({name, ranks, options, 1, /*tied=*/true});
    }
    cases.push_back({name, 2, options, /*dp=*/2});
    cases.push_back({name, 2, options, /*dp=*/2, /*tied=*/true});
  }
  cases.push_back({"tp_sp_vp", 4, options_of(true, true, true), /*dp=*/2});
  cases.push_back({"uneven_positions", 2, options_of(true, true, true), 1, false, 7});
  cases.push_back({"empty_positions", 4, options_of(true, true, true), 1, true, 3});
  cases.push_back(
      {"recompute", 2, options_of(true, true, true), 1, false, 8, RecomputePolicy::kBlock}
  );
  // Numbers of ranks that divide little.
  for (const int ranks : {3, 5, 7}) {
    cases.push_back({"vp", ranks, options_of(false, false, true)});
    cases.push_back({"tp_sp_vp", 1, options_of(true, true, true), /*dp=*/ranks});
  }
  cases.push_back({"tp_sp_vp", 2, options_of(true, true, true), /*dp=*/3});
  cases.push_back({"vp", 6, options_of(false, false, true), 1, /*tied=*/true});
  // More ranks than there are tokens or hidden units.
  for (const bool tied : {false, true}) {
    cases.push_back({"empty_vocabulary", 4, options_of(true, true, true), 1, tied});
    cases.back().vocab = 3;
    cases.back().hidden = 2;
  }
  return cases;
}

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  const Case& each = info.param;
  return std::string(each.name) + "_on_" + std::to_string(each.tp) +
         (each.dp > 1 ? "_x" + std::to_string(each.dp) : "") + (each.tied ? "_tied" : "");
}

GptConfig config_of(const Case& param) {
  return {
      .vocab_size = param.vocab,
      .num_layers = 2,
      .dim = param.dim,
      .num_heads = 8,
      .num_kv_heads = 4,
      .hidden_dim = param.hidden,
      .max_sequence = 64,
      .tie_embeddings = param.tied,
      .recompute = param.recompute
  };
}

/// One rank's model under a plan and the whole model beside it.
struct Bench {
  Bench(const std::shared_ptr<comm::World>& world, const Case& param, at::ScalarType dtype)
      : config(config_of(param)),
        mesh(std::make_shared<const comm::ProcessMesh>(
            world, layout::DeviceMesh({{"dp", param.dp}, {"tp", param.tp}}, world->topology())
        )),
        whole(config, GptOptions{.dtype = dtype, .seed = 3}),
        model(config, GptOptions{.dtype = dtype, .seed = 3}) {
    const std::int64_t batch = 2 * param.dp;
    all_tokens = tokens_from(1, batch, param.positions);
    all_targets = tokens_from(2, batch, param.positions);
    all_targets[0][1] = param.dp == 1 ? -1 : 4;  // a mean over ranks needs equal counts
    const auto coordinate = mesh->mesh().coordinates(mesh->rank())[0];
    tokens = all_tokens.narrow(0, 2 * coordinate, 2).clone();
    targets = all_targets.narrow(0, 2 * coordinate, 2).clone();
    resolved = resolve(param, dtype);
    applied = plan::apply_plan(*model, resolved, mesh);
  }

  at::Tensor tokens_from(std::int64_t start, std::int64_t batch, std::int64_t positions) const {
    return at::arange(batch * positions, at::kLong)
        .mul(11)
        .add(5 * start)
        .remainder(config.vocab_size)
        .view({batch, positions});
  }

  plan::ResolvedPlan resolve(const Case& param, at::ScalarType dtype) const {
    Gpt meta(config, GptOptions{.device = at::kMeta, .dtype = dtype});
    const layout::Layout batch{{Placement::shard(0), Placement::replicate()}};
    const auto x = tokens.to(at::kMeta);
    const auto y = targets.to(at::kMeta);
    return plan::resolve(
        *meta,
        gpt_plan(config, mesh->mesh(), param.options),
        mesh->mesh(),
        mesh->rank(),
        {{x, plan::even_spec(x, batch, mesh->mesh()), "tokens"},
         {y, plan::even_spec(y, batch, mesh->mesh()), "targets"}},
        [&] { return std::vector<at::Tensor>{meta->loss(x, y)}; },
        {.data_axes = {"dp"}}
    );
  }

  double step() {
    model->zero_grad();
    const auto loss = model->loss(tokens, targets);
    loss.backward();
    sum_over_data(loss);
    for (auto& parameter : model->parameters()) {
      sum_over_data(parameter.grad());
    }
    return loss.item<double>() / data_ranks();
  }
  double whole_step() {
    whole->zero_grad();
    const auto loss = whole->loss(all_tokens, all_targets);
    loss.backward();
    return loss.item<double>();
  }
  double data_ranks() const { return mesh->mesh().axis_size("dp"); }
  void sum_over_data(const at::Tensor& tensor) const {
    const at::NoGradGuard no_grad;  // not the program's arithmetic, so that validation looks away
    mesh->axis("dp")->all_reduce(tensor.detach())->wait();
  }

  GptConfig config;
  Mesh mesh;
  Gpt whole;
  Gpt model;
  at::Tensor all_tokens, all_targets;
  at::Tensor tokens, targets;
  plan::ResolvedPlan resolved;
  AppliedPlan applied;
};

class GptPlanTest : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Plans, GptPlanTest, ::testing::ValuesIn(all_cases()), case_name);

TEST_P(GptPlanTest, LossAndGradientsEqualTheWholeModels) {
  const Case& param = GetParam();
  hypershard::testing::run_ranks(param.dp * param.tp, [&](const auto& world) {
    Bench bench(world, param, at::kDouble);
    for (int repeat = 0; repeat < 2; ++repeat) {
      const double expected = bench.whole_step();
      EXPECT_NEAR(bench.step(), expected, 1e-12 * expected);
      const auto report = plan::gradient_equivalence(
          bench.applied, plan::named_gradients(*bench.whole), 1 / bench.data_ranks()
      );
      EXPECT_TRUE(report.passed) << to_text(report);
    }
  });
}

TEST_P(GptPlanTest, ValidationRaisesNoAlarm) {
  const Case& param = GetParam();
  if (param.tp * param.dp == 1) {
    GTEST_SKIP() << "nothing is cut";
  }
  for (const auto dtype : {at::kDouble, at::kBFloat16}) {
    hypershard::testing::run_ranks(param.dp * param.tp, [&](const auto& world) {
      Bench bench(world, param, dtype);
      const double expected = bench.whole_step();
      plan::ValidationGuard guard(*bench.model, bench.applied);
      for (int repeat = 0; repeat < 2; ++repeat) {
        const double bound = dtype == at::kDouble ? 1e-12 : 1e-2;
        EXPECT_NEAR(bench.step(), expected, bound * expected);
      }
      guard.finish();
      EXPECT_EQ(guard.counts().forwards, 2);
      EXPECT_GT(guard.counts().values, 10);
    });
  }
}

TEST(GptPlanValidationTest, ProductsOfPracticalSizeTakeAnotherOperatorThatHasARule) {
  hypershard::testing::run_ranks(2, [](const auto& world) {
    const Case param{"", 2, options_of(true, false, true), 1, false, 64, {}, /*dim=*/512};
    Bench bench(world, param, at::kFloat);
    const double expected = bench.whole_step();
    OperatorTrace trace;
    plan::ValidationGuard guard(*bench.model, bench.applied);
    EXPECT_NEAR(bench.step(), expected, 1e-5 * expected);
    guard.finish();
#if defined(__x86_64__)
    if (__builtin_cpu_is("amd") != 0) {  // elsewhere libtorch's own products are as fast
      EXPECT_GT(trace.count("mkldnn::_linear_pointwise"), 0);
    }
#endif
  });
}

using OperatorCounts = std::map<std::string, int>;

OperatorCounts trace_of(Gpt& model, const at::Tensor& x, const at::Tensor& y) {
  model->zero_grad();
  OperatorTrace trace;
  model->loss(x, y).backward();
  OperatorCounts counts;
  for (const auto& name : trace.names()) {
    if (!name.starts_with("autograd::engine::")) {
      ++counts[name];
    }
  }
  return counts;
}

OperatorCounts difference(const OperatorCounts& found, const OperatorCounts& expected) {
  OperatorCounts more = found;
  for (const auto& [name, count] : expected) {
    more[name] -= count;
  }
  std::erase_if(more, [](const auto& item) { return item.second == 0; });
  return more;
}

/// What the collectives of two blocks take, and nothing else.
///
/// A reduction takes its tensor as it is, cut off from autograd and flat; the input of a layer, of
/// which only the gradient is reduced, goes on as a view. Pieces of positions are no runs of a
/// tensor, so gathers and reduce-scatters copy them together and apart.
OperatorCounts of_collectives(bool vocabulary, bool sequence) {
  OperatorCounts counts;
  if (!sequence) {
    // Two of each layer, and those behind the embedding and the last norm.
    const int reductions = vocabulary ? 8 + 2 : 8;
    // Both sides of the exchange inside the loss.
    const int exchanged = vocabulary ? 2 : 0;
    counts["aten::detach"] = counts["detach"] = reductions + exchanged;
    counts["aten::view"] = reductions + exchanged + 4;
    counts["aten::view_as"] = 4;
    if (vocabulary) {
      counts["aten::empty"] = exchanged;
    }
  } else if (!vocabulary) {
    counts["aten::narrow"] = counts["aten::slice"] = counts["aten::as_strided"] = 74;
    counts["aten::view"] = 54;
    counts["aten::copy_"] = counts["aten::empty"] = 43;
    counts["aten::detach"] = counts["detach"] = 18;
    counts["aten::clone"] = counts["aten::empty_like"] = 7;
    counts["aten::contiguous"] = 2;
  } else {
    counts["aten::narrow"] = counts["aten::slice"] = counts["aten::as_strided"] = 80;
    counts["aten::view"] = 62;
    counts["aten::copy_"] = 45;
    counts["aten::empty"] = 47;
    counts["aten::detach"] = counts["detach"] = 22;
    counts["aten::clone"] = counts["aten::empty_like"] = 5;
  }
  if (vocabulary) {
    counts["hypershard::cross_entropy_forward"] = -1;
    counts["hypershard::cross_entropy_part_forward"] = 1;
  }
  return counts;
}

TEST(GptPlanProductionTest, AStepHasTheWholeModelsOperatorsAndThoseOfItsCollectives) {
  for (const bool vocabulary : {false, true}) {
    for (const bool sequence : {false, true}) {
      hypershard::testing::run_ranks(2, [&](const auto& world) {
        const Case param{"", 2, options_of(true, sequence, vocabulary)};
        Bench bench(world, param, at::kFloat);
        trace_of(bench.model, bench.tokens, bench.targets);  // makes tables and gradient programs
        trace_of(bench.whole, bench.tokens, bench.targets);
        const auto whole = trace_of(bench.whole, bench.tokens, bench.targets);
        EXPECT_EQ(
            difference(trace_of(bench.model, bench.tokens, bench.targets), whole),
            of_collectives(vocabulary, sequence)
        ) << "vocabulary: "
          << vocabulary << ", sequence: " << sequence;
      });
    }
  }
}

/// What the back end had to send for an even collective of this kind, by the plan's way of
/// counting.
std::int64_t sent_bytes(const comm::LogEntry& entry, std::int64_t ranks) {
  const std::int64_t once = entry.payload_bytes / ranks * (ranks - 1);
  return entry.op == comm::Op::kAllReduce ? 2 * once : once;
}

TEST(GptPlanProductionTest, CollectivesAreThoseThatThePlanAnnounces) {
  for (const bool vocabulary : {false, true}) {
    for (const bool sequence : {false, true}) {
      hypershard::testing::run_ranks(4, [&](const auto& world) {
        const Case param{"", 4, options_of(true, sequence, vocabulary)};
        Bench bench(world, param, at::kFloat);
        bench.step();
        auto& log = bench.mesh->axis("tp")->log();
        log.clear();
        bench.step();
        std::map<std::string, int> counts;
        std::int64_t bytes = 0;
        for (const auto& entry : log.entries()) {
          const bool is_boundary = entry.unit.find("put 0 of ") != std::string::npos;
          ++counts[is_boundary ? comm::to_text(entry.op) : entry.unit];
          bytes += is_boundary ? sent_bytes(entry, 4) : 0;
        }
        std::int64_t announced = 0;
        for (const auto& boundary : bench.resolved.boundaries) {
          announced += boundary.forward.sent_bytes + boundary.backward->sent_bytes;
        }
        EXPECT_EQ(bytes, announced);
        const int layers = 2 * 2;  // attention and feed-forward of both blocks
        std::map<std::string, int> expected;
        if (sequence) {
          // Each layer: gather and reduce-scatter forward, the same backward. Embedding and last
          // norm: with a cut vocabulary as a layer's ends, else a gather each.
          expected["all_gather"] = 2 * layers + 2;
          expected["reduce_scatter"] = 2 * layers + (vocabulary ? 2 : 0);
          for (const char* norm :
               {"blocks.0.attn_norm",
                "blocks.0.mlp_norm",
                "blocks.1.attn_norm",
                "blocks.1.mlp_norm",
                "norm"}) {
            expected[std::string(norm) + ".weight"] = 1;
          }
        } else {
          expected["all_reduce"] = 2 * layers + (vocabulary ? 2 : 0);
        }
        if (vocabulary) {
          expected["cross_entropy"] = 1;
        }
        EXPECT_EQ(counts, expected);
      });
    }
  }
}

TEST(GptPlanSamplingTest, EveryRankDrawsTheWholeModelsTokens) {
  for (const auto& options :
       {options_of(true, false, false),
        options_of(true, false, true),
        options_of(false, false, true)}) {
    hypershard::testing::run_ranks(4, [&](const auto& world) {
      Bench bench(world, Case{"", 4, options}, at::kDouble);
      const SampleOptions sampling{.max_new_tokens = 24, .temperature = 1.0, .seed = 5};
      EXPECT_EQ(
          generate(*bench.model, {1, 2, 3}, sampling), generate(*bench.whole, {1, 2, 3}, sampling)
      );
    });
  }
}

// After each refusal the ranks go on together: none of them waits in a collective for one that
// left.
TEST(GptPlanSamplingTest, CutPositionsAreRefusedOnAllRanksBeforeTheFirstToken) {
  for (const bool vocabulary : {false, true}) {
    for (const int size : {2, 4}) {
      hypershard::testing::run_ranks(size, [&](const auto& world) {
        Bench bench(world, Case{"", size, options_of(true, true, vocabulary)}, at::kDouble);
        for (const std::vector<std::int64_t>& prompt :
             {std::vector<std::int64_t>{1}, {1, 2}, {1, 2, 3}, {1, 2, 3, 4, 5, 6, 7, 8}}) {
          const auto length = static_cast<std::int64_t>(prompt.size());
          const std::int64_t own = length / size + (bench.mesh->rank() < length % size ? 1 : 0);
          std::size_t num_tokens = 0;
          SampleOptions sampling{.max_new_tokens = 4, .temperature = 0};
          sampling.on_token = [&](std::int64_t) { return ++num_tokens > 0; };
          HS_EXPECT_THROWN(
              Unsupported,
              generate(*bench.model, prompt, sampling),
              concat_text(
                  "output 0 of embed: of dimension 1 this rank would get ", own, " of ", length
              )
          );
          EXPECT_EQ(num_tokens, 0U);
        }
        const double expected = bench.whole_step();
        EXPECT_NEAR(bench.step(), expected, 1e-12 * expected);
      });
    }
  }
}

TEST(GptPlanUsageTest, WhatCannotBeCutIsNamedBeforeAnythingRuns) {
  const layout::DeviceMesh mesh({{"dp", 1}, {"tp", 4}}, layout::Topology::single_supernode(4));
  GptConfig config{.dim = 48, .num_heads = 6, .num_kv_heads = 2};
  HS_EXPECT_THROWN(
      InvalidArgument,
      gpt_plan(config, mesh),
      "num_heads 6 does not divide by the 4 ranks of axis 'tp'"
  );
  config = {.dim = 64, .num_heads = 8, .num_kv_heads = 2};
  HS_EXPECT_THROWN(
      InvalidArgument,
      gpt_plan(config, mesh),
      "num_kv_heads 2 does not divide by the 4 ranks of axis 'tp'"
  );
  EXPECT_FALSE(gpt_plan(config, mesh, options_of(false, false, true)).empty());
  HS_EXPECT_THROWN(
      InvalidArgument, gpt_plan(config, mesh, options_of(false, false, false)), "cut nothing"
  );
  HS_EXPECT_THROWN(
      InvalidArgument,
      gpt_plan(config, mesh, options_of(false, true, true)),
      "sequence without tensor"
  );
  HS_EXPECT_THROWN(InvalidArgument, gpt_plan(config, mesh, {.axis = "tq"}), "tp");
}

TEST(GptPlanUsageTest, PartsAreForgottenWithThePlan) {
  hypershard::testing::run_ranks(2, [](const auto& world) {
    Bench bench(world, Case{"", 2, options_of(true, false, true)}, at::kDouble);
    ASSERT_NE(bench.model->vocabulary_part(), nullptr);
    EXPECT_EQ(bench.model->vocabulary_part()->total, 37);
    EXPECT_EQ(bench.model->vocabulary_part()->first, bench.mesh->rank() == 0 ? 0 : 19);
    bench.applied = {};
    EXPECT_EQ(bench.model->vocabulary_part(), nullptr);
  });
}

}  // namespace
}  // namespace hypershard::model
