// Validation of right programs: nothing is refused, nothing changes, nothing grows.
#include "hypershard/plan/validation.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "hypershard/dtensor/op_rules.h"
#include "hypershard/plan/test_ranks.h"
#include "hypershard/plan/tracker.h"

namespace hypershard::plan {
namespace {

using layout::Layout;
using layout::Placement;

const Placement kRep = Placement::replicate();

struct Case {
  const char* name;
  std::vector<layout::MeshAxis> axes;
  std::function<ShardingPlan()> plan;
  ValidationLevel level = ValidationLevel::kModules;
  std::int64_t rows = 8;
  std::int64_t hidden = 13;
};

class ValidationTest : public ::testing::TestWithParam<Case> {};

TEST_P(ValidationTest, RightPlansPassAndNumbersStayTheSame) {
  const Case& param = GetParam();
  int size = 1;
  for (const auto& axis : param.axes) {
    size *= axis.size;
  }
  testing::run_ranks(size, [&](std::shared_ptr<comm::World> world) {
    const auto mesh = test::make_mesh(std::move(world), param.axes);
    test::Net net(8, param.hidden);
    const bool has_dp = mesh->mesh().has_axis("dp");
    Layout layout = layout::replicated_layout(mesh->mesh());
    if (has_dp) {
      layout.placements[0] = Placement::shard(0);
    }
    const at::Tensor x = test::part_of(test::formula_tensor({param.rows, 8}, 0.3), layout, *mesh);
    const auto forward = [&] { return std::vector<at::Tensor>{net->forward(x).pow(2).sum()}; };
    ResolveOptions options;
    if (has_dp) {
      options.data_axes = {"dp"};
    }
    const auto applied = apply_plan(
        *net, param.plan(), mesh, {{x, {{param.rows, 8}, layout}, "x"}}, forward, options
    );
    const auto plain = forward().front();
    plain.backward();
    const auto expected = test::gradients_of(*net);
    net->zero_grad();
    ValidationGuard guard(*net, applied, {.level = param.level});
    const auto found = forward().front();
    found.backward();
    guard.finish();
    EXPECT_EQ(found.item<double>(), plain.item<double>());
    for (const auto& [name, gradient] : test::gradients_of(*net)) {
      EXPECT_TRUE(at::equal(gradient, expected.at(name))) << name;
    }
    const ValidationCounts counts = guard.counts();
    EXPECT_EQ(counts.forwards, 1);
    EXPECT_EQ(counts.backwards, 1);
    EXPECT_GT(counts.operators, 20);
    EXPECT_GT(counts.backward_operators, 20);
    EXPECT_GT(counts.values, 4);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Plans,
    ValidationTest,
    ::testing::Values(
        Case{"tp2", {{"tp", 2}}, test::tensor_parallel_plan},
        Case{
            "tp2_boundaries", {{"tp", 2}}, test::tensor_parallel_plan, ValidationLevel::kBoundaries
        },
        Case{"tp2_operators", {{"tp", 2}}, test::tensor_parallel_plan, ValidationLevel::kOperators},
        Case{"tp3", {{"tp", 3}}, test::tensor_parallel_plan},
        Case{"tp4", {{"tp", 4}}, test::tensor_parallel_plan},
        Case{"sp2", {{"tp", 2}}, test::sequence_parallel_plan},
        Case{
            "sp3_operators", {{"tp", 3}}, test::sequence_parallel_plan, ValidationLevel::kOperators
        },
        Case{"dp2_tp2", {{"dp", 2}, {"tp", 2}}, test::tensor_parallel_plan},
        Case{"dp2_sp2", {{"dp", 2}, {"tp", 2}}, test::sequence_parallel_plan},
        Case{"tp8", {{"tp", 8}}, test::tensor_parallel_plan},
        // Ranks that hold nothing.
        Case{"tp4_empty", {{"tp", 4}}, test::tensor_parallel_plan, ValidationLevel::kModules, 8, 3},
        Case{
            "sp4_empty", {{"tp", 4}}, test::sequence_parallel_plan, ValidationLevel::kModules, 3, 1
        },
        Case{
            "dp2_sp2_empty",
            {{"dp", 2}, {"tp", 2}},
            test::sequence_parallel_plan,
            ValidationLevel::kModules,
            1
        }
    ),
    [](const auto& each) { return std::string(each.param.name); }
);

// Runs `body` with a small net under a plan, after `action` became part of the net's forward.
void with_action(
    testing::RankBackend backend,
    const std::function<void(const comm::ProcessMesh&)>& action,
    const std::function<void(test::Net&, const AppliedPlan&, const at::Tensor&)>& body
) {
  const auto run = [&](std::shared_ptr<comm::World> world) {
    struct Hooks final : nn::ForwardHooks {
      std::function<void()> run;
      void pre_forward(std::span<at::Tensor* const>) override {}
      void post_forward(std::span<at::Tensor* const>) override { run(); }
    };
    const auto mesh = test::make_mesh(std::move(world), {{"tp", 2}});
    test::Net net(8, 12);
    const at::Tensor x = test::formula_tensor({4, 8}, 0.3);
    const auto applied = apply_plan(
        *net,
        test::tensor_parallel_plan(),
        mesh,
        {{x, {{4, 8}, Layout{{kRep}}}, "x"}},
        [&] { return std::vector<at::Tensor>{net->forward(x).pow(2).mean()}; }
    );
    const auto hooks = std::make_shared<Hooks>();
    hooks->run = [&] { action(*mesh); };
    net->head->add_forward_hooks(hooks);
    body(net, applied, x);
  };
  testing::run_ranks(2, run, {.backend = backend});
}

// Gloo pairs whatever comes; the other back ends compare calls by themselves.
TEST(ValidationCollectivesTest, OwnOnesThatAreAllowedMustComeInOneOrder) {
  for (const bool in_order : {true, false}) {
    with_action(
        testing::RankBackend::kGloo,
        [&](const comm::ProcessMesh& mesh) {
          const auto ranks = mesh.axis("tp");
          const bool is_swapped = !in_order && mesh.rank() == 1;
          for (const char* unit :
               {is_swapped ? "second" : "first", is_swapped ? "first" : "second"}) {
            ranks->all_reduce(at::ones({2}, at::kDouble), comm::ReduceOp::kSum, unit)->wait();
          }
        },
        [&](test::Net& net, const AppliedPlan& applied, const at::Tensor& x) {
          ValidationGuard guard(*net, applied, {.allow_own_collectives = true});
          const std::string text = test::thrown_by([&] {
            net->forward(x).pow(2).mean().backward();
            guard.finish();
          });
          if (in_order) {
            EXPECT_EQ(text, "");
          } else {
            HS_EXPECT_HAS(text, "ranks do different things: rank 0 ran all_reduce of");
            HS_EXPECT_HAS(text, "for 'first' on axis 'tp'");
            HS_EXPECT_HAS(text, "for 'second' on axis 'tp'");
          }
        }
    );
  }
}

TEST(ValidationMemoryTest, FreshMemoryThatHoldsAnythingIsNoDifference) {
  with_action(
      testing::RankBackend::kLocal,
      [](const comm::ProcessMesh& mesh) {
        constexpr std::int64_t kNumel = 64;
        {
          const TrackingPause pause;
          at::full({kNumel}, 1.0 + mesh.rank(), at::kDouble);  // what the next one may find
        }
        at::empty({kNumel}, at::kDouble).fill_(3.0);
      },
      [](test::Net& net, const AppliedPlan& applied, const at::Tensor& x) {
        ValidationGuard guard(*net, applied, {.level = ValidationLevel::kOperators});
        net->forward(x).pow(2).mean().backward();
        guard.finish();
        EXPECT_EQ(guard.counts().backwards, 1);
      }
  );
}

// A loop that loads its rows inside the guard; they are cut over dp, which only the plan knows.
TEST(ValidationInputsTest, WhatIsMadeInsideTheGuardLiesAsThePlanSays) {
  testing::run_ranks(4, [](std::shared_ptr<comm::World> world) {
    const auto mesh = test::make_mesh(std::move(world), {{"dp", 2}, {"tp", 2}});
    test::Net net(8, 12);
    const Layout rows{{Placement::shard(0), kRep}};
    const auto load = [&] {
      return test::part_of(test::formula_tensor({8, 8}, 0.3), rows, *mesh).mul(2);
    };
    const at::Tensor first = load();
    const auto applied = apply_plan(
        *net,
        test::tensor_parallel_plan(),
        mesh,
        {{first, {{8, 8}, rows}, "x"}},
        [&] { return std::vector<at::Tensor>{net->forward(first).pow(2).mean()}; },
        {.data_axes = {"dp"}}
    );
    ValidationGuard guard(*net, applied);
    net->forward(load()).pow(2).mean().backward();
    // Targets are no argument of the model: they have to be named, and the message says so.
    const at::Tensor y = net->forward(load());
    const std::string text = test::thrown_by([&] { at::mse_loss(y, load().narrow(1, 0, 3)); });
    HS_EXPECT_HAS(text, "aten::mse_loss");
    HS_EXPECT_HAS(text, "nobody said how tensor 1 lies");
    HS_EXPECT_HAS(text, "ValidationGuard::set_layout");
  });
}

// Two layers between which everything depends on a number that changes from step to step.
struct ScaledImpl : nn::Hookable<ScaledImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  ScaledImpl() : up(8, 12), down(12, 8, /*with_bias=*/false) {
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    const at::Tensor whole = at::softmax(x * (0.1 * number) - number, -1).add(x, 1 / number);
    const at::Tensor cut = at::clamp(up->forward(whole) / number, -number, 0.5 * number);
    return down->forward(at::leaky_relu(cut, 0.01 * number));
  }
  test::Dense up;
  test::Dense down;
  double number = 1;
};
TORCH_MODULE(Scaled);

struct ScaledNetImpl
    : nn::Hookable<ScaledNetImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  ScaledNetImpl() : first(8, 8), head(8, 3) {
    register_module("first", first);
    register_module("scaled", scaled);
    register_module("head", head);
    test::fill_by_formula(*this);
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    return head->forward(scaled->forward(first->forward(x)));
  }
  test::Dense first;
  Scaled scaled;
  test::Dense head;
};
TORCH_MODULE(ScaledNet);

void run_with(ScaledNet& net, const at::Tensor& x, int number) {
  net->scaled->number = number;
  net->zero_grad();
  (net->forward(x) * (0.1 * number)).clamp(-number, number).pow(2).mean().backward();
}

TEST(ValidationMemoryTest, ChangingScalarsGrowNoTable) {
  constexpr int kSteps = 200;
  testing::run_ranks(2, [](std::shared_ptr<comm::World> world) {
    const auto mesh = test::make_mesh(std::move(world), {{"tp", 2}});
    ScaledNet net;
    ShardingPlan plan;
    plan.parameter("scaled.up.*", {{"tp", Placement::shard(0)}})
        .parameter("scaled.down.weight", {{"tp", Placement::shard(1)}})
        .input("scaled", {{"tp", kRep}})
        .output("scaled", {{"tp", kRep}});
    const at::Tensor x = test::formula_tensor({4, 8}, 0.3);
    const auto applied = apply_plan(*net, plan, mesh, {{x, {{4, 8}, Layout{{kRep}}}, "x"}}, [&] {
      return std::vector<at::Tensor>{net->forward(x).pow(2).mean()};
    });
    for (int number = 1; number <= kSteps; ++number) {
      run_with(net, x, number);
      ASSERT_EQ(applied.num_compiled_shapes(), 2U) << "both ends of the layers, at " << number;
    }
    ValidationGuard guard(*net, applied);
    run_with(net, x, 1);  // learns how x lies
    const std::size_t num_rules = dtensor::ruled_operators().size();
    const ValidationCounts before = guard.counts();
    ValidationCounts first;
    std::size_t largest = 0;
    for (int number = 1; number <= kSteps; ++number) {
      run_with(net, x, number);
      const ValidationCounts counts = guard.counts();
      if (number == 1) {
        first = counts;
      }
      // Every step is a step like the first: nothing is looked up that was asked before.
      ASSERT_EQ(counts.operators - before.operators, number * (first.operators - before.operators));
      ASSERT_EQ(counts.meetings - before.meetings, number * (first.meetings - before.meetings));
      ASSERT_EQ(counts.pending, 0U) << number;
      largest = number <= 20 ? std::max(largest, counts.table_size) : largest;
      ASSERT_LE(counts.table_size, largest) << number;
      ASSERT_EQ(applied.num_compiled_shapes(), 2U) << number;
    }
    EXPECT_GT(first.operators - before.operators, 10);
    EXPECT_EQ(dtensor::ruled_operators().size(), num_rules);
    guard.finish();
  });
}

TEST(ValidationMemoryTest, FiveHundredStepsDoNotGrow) {
  testing::run_ranks(2, [](std::shared_ptr<comm::World> world) {
    const auto mesh = test::make_mesh(std::move(world), {{"tp", 2}});
    test::Net net(8, 12);
    const at::Tensor first = test::formula_tensor({4, 8}, 0.3);
    const auto applied = apply_plan(
        *net,
        test::tensor_parallel_plan(),
        mesh,
        {{first, {{4, 8}, Layout{{kRep}}}, "x"}},
        [&] { return std::vector<at::Tensor>{net->forward(first).pow(2).mean()}; }
    );
    ValidationGuard guard(*net, applied);
    std::size_t after_ten = 0;
    for (int step = 0; step < 500; ++step) {
      const at::Tensor x = test::formula_tensor({1 + step % 7, 8}, 0.1 * step);
      net->forward(x).pow(2).mean().backward();
      const at::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) {
        parameter.sub_(parameter.grad(), 0.01);
        parameter.grad().zero_();
      }
      const ValidationCounts counts = guard.counts();
      ASSERT_EQ(counts.pending, 0U) << step;
      if (step == 10) {
        after_ten = counts.table_size;
      }
      if (step > 10) {
        ASSERT_LE(counts.table_size, 2 * after_ten + 256) << step;
      }
    }
    EXPECT_EQ(guard.counts().forwards, 500);
    EXPECT_EQ(guard.counts().backwards, 500);
  });
}

}  // namespace
}  // namespace hypershard::plan
