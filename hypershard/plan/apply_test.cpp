// Production mode: gradients equal the plain model's, and nothing runs that need not.
#include "hypershard/plan/apply.h"

#include <gtest/gtest.h>

#include <ATen/record_function.h>

#include "hypershard/plan/gradient_equivalence.h"
#include "hypershard/plan/internal/compiled_boundary.h"
#include "hypershard/plan/test_ranks.h"
#include "hypershard/plan/whole_dimension.h"

namespace hypershard::plan {
namespace {

using layout::Layout;
using layout::Placement;
using test::thrown_by;

const Placement kRep = Placement::replicate();

struct Case {
  const char* name;
  std::vector<layout::MeshAxis> axes;
  std::function<ShardingPlan()> plan;
  std::int64_t rows = 8;
  std::int64_t hidden = 12;
};

class ApplyPlanTest : public ::testing::TestWithParam<Case> {};

TEST_P(ApplyPlanTest, LossAndGradientsEqualThePlainModels) {
  const Case& param = GetParam();
  int size = 1;
  for (const auto& axis : param.axes) {
    size *= axis.size;
  }
  testing::run_ranks(size, [&](std::shared_ptr<comm::World> world) {
    const auto mesh = test::make_mesh(std::move(world), param.axes);
    test::Net reference(8, param.hidden);
    test::Net net(8, param.hidden);
    const at::Tensor whole = test::formula_tensor({param.rows, 8}, 0.3);
    const bool has_dp = mesh->mesh().has_axis("dp");
    Layout layout = layout::replicated_layout(mesh->mesh());
    if (has_dp) {
      layout.placements[0] = Placement::shard(0);
    }
    const at::Tensor x = test::part_of(whole, layout, *mesh);
    const auto loss = [](const at::Tensor& y) { return y.pow(2).mean(); };
    const auto applied = apply_plan(
        *net,
        param.plan(),
        mesh,
        {{x, {whole.sizes().vec(), layout}, "x"}},
        [&] { return std::vector<at::Tensor>{loss(net->forward(x))}; },
        {.data_axes = has_dp ? std::vector<std::string>{"dp"} : std::vector<std::string>{}}
    );
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      reference->zero_grad();
      const auto plain = loss(reference->forward(whole));
      plain.backward();
      const auto found = loss(net->forward(x));
      found.backward();
      const double dp = has_dp ? mesh->mesh().axis_size("dp") : 1;
      if (has_dp) {
        for (auto& parameter : net->parameters()) {
          mesh->axis("dp")->all_reduce(parameter.grad())->wait();
        }
      } else {
        EXPECT_NEAR(found.item<double>(), plain.item<double>(), 1e-14);
      }
      EXPECT_LT(test::worst_gradient(applied, test::gradients_of(*reference), 1 / dp), 1e-14);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Plans,
    ApplyPlanTest,
    ::testing::Values(
        Case{"tp2", {{"tp", 2}}, test::tensor_parallel_plan},
        Case{"tp3_uneven", {{"tp", 3}}, test::tensor_parallel_plan, 7, 13},
        Case{"tp4_empty", {{"tp", 4}}, test::tensor_parallel_plan, 5, 3},
        Case{"sp2", {{"tp", 2}}, test::sequence_parallel_plan},
        Case{"sp3_uneven", {{"tp", 3}}, test::sequence_parallel_plan, 7, 13},
        Case{"dp2_tp2", {{"dp", 2}, {"tp", 2}}, test::tensor_parallel_plan},
        Case{"dp2_sp2", {{"dp", 2}, {"tp", 2}}, test::sequence_parallel_plan}
    ),
    [](const auto& each) { return std::string(each.param.name); }
);

// Names of operators that a step runs, without those that hold no work of the model.
class Profile {
 public:
  Profile() {
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(
            [](const at::RecordFunction& fn) -> std::unique_ptr<at::ObserverContext> {
              const std::string name = fn.name();
              if (!name.starts_with("autograd::engine::")) {  // nodes, not operators
                names().push_back(name);
              }
              return nullptr;
            }
        ).scopes({at::RecordScope::FUNCTION})
    );
    names().clear();
  }
  ~Profile() { at::removeCallback(handle_); }
  static std::map<std::string, int> counts() {
    std::map<std::string, int> counts;
    for (const auto& name : names()) {
      ++counts[name];
    }
    return counts;
  }

 private:
  static std::vector<std::string>& names() {
    static thread_local std::vector<std::string> list;
    return list;
  }
  at::CallbackHandle handle_;
};

std::map<std::string, int> step_profile(test::Net& net, const at::Tensor& x) {
  net->zero_grad();
  const Profile profile;
  net->forward(x).pow(2).mean().backward();
  return Profile::counts();
}

TEST(ApplyPlanProfileTest, AStepHasThePlainOperatorsAndTheBoundariesOnly) {
  testing::run_ranks(2, [](std::shared_ptr<comm::World> world) {
    const auto mesh = test::make_mesh(std::move(world), {{"tp", 2}});
    test::Net plain(8, 12);
    test::Net net(8, 12);
    const at::Tensor x = test::formula_tensor({4, 8}, 0.3);
    const auto expected = step_profile(plain, x);
    ShardingPlan none;
    none.parameter("**", {{"tp", kRep}}).input("blocks.*", {{"tp", kRep}});
    const auto forward = [&] { return std::vector<at::Tensor>{net->forward(x).pow(2).mean()}; };
    const PlannedInput input{x, {{4, 8}, Layout{{kRep}}}, "x"};
    // A plan of which nothing has to be done leaves no hook and no operator.
    auto nothing = apply_plan(*net, none, mesh, {input}, forward);
    EXPECT_EQ(nothing.num_hooked_modules(), 0U);
    EXPECT_EQ(step_profile(net, x), expected);
    nothing.remove();

    const auto applied = apply_plan(*net, test::tensor_parallel_plan(), mesh, {input}, forward);
    EXPECT_EQ(applied.num_hooked_modules(), 2U);
    auto found = step_profile(net, x);
    const auto ranks = mesh->axis("tp");
    const auto before = ranks->log().size();
    step_profile(net, x);
    // Two blocks: one reduction in forward and one in backward each.
    EXPECT_EQ(ranks->log().size() - before, 4U);
    std::map<std::string, int> extra;
    for (const auto& [name, count] : found) {
      const auto known = expected.find(name);
      const int more = count - (known == expected.end() ? 0 : known->second);
      EXPECT_GE(more, 0) << name;
      if (more > 0) {
        extra[name] = more;
      }
    }
    for (const auto& [name, count] : expected) {
      EXPECT_TRUE(found.contains(name)) << name;
    }
    // No memory and no copy. Each of four all-reduces reads its tensor cut off from autograd and
    // flat; at two inputs, of which only the gradient is reduced, the tensor goes on as a view.
    const std::map<std::string, int> collectives{
        {"aten::detach", 4}, {"detach", 4}, {"aten::view", 4 + 2}, {"aten::view_as", 2}
    };
    EXPECT_EQ(extra, collectives);
  });
}

// What users of gradient_equivalence are promised.
TEST(ApplyPlanBoundsTest, GradientsAreComparedAsTightlyAsPromised) {
  EXPECT_EQ(gradient_bound(at::kDouble), 1e-10);
  EXPECT_EQ(gradient_bound(at::kFloat), 1e-5);
  EXPECT_EQ(gradient_bound(at::kBFloat16), 1.0 / 32);
  EXPECT_EQ(gradient_bound(at::kHalf), 1.0 / 256);
}

TEST(ApplyPlanUsageTest, ProblemsAndStrangeModelsAreRefused) {
  testing::run_ranks(2, [](std::shared_ptr<comm::World> world) {
    const auto mesh = test::make_mesh(std::move(world), {{"tp", 2}});
    test::Net net(8, 12);
    const at::Tensor x = test::formula_tensor({4, 8}, 0.3);
    ShardingPlan plan = test::tensor_parallel_plan();
    plan.output("blocks.0", {{"tp", Placement::partial()}});
    const PlannedInput input{x, {{4, 8}, Layout{{kRep}}}, "x"};
    const auto forward = [&] { return std::vector<at::Tensor>{net->forward(x).sum()}; };
    const auto wrong = resolve(
        *net,
        plan,
        mesh->mesh(),
        mesh->rank(),
        {input},
        forward,
        {.on_problem = OnProblem::kCollect}
    );
    HS_EXPECT_HAS(
        thrown_by([&] { (void)apply_plan(*net, wrong, mesh); }), "problems, the first: plan:"
    );
    const auto right =
        resolve(*net, test::tensor_parallel_plan(), mesh->mesh(), mesh->rank(), {input}, forward);
    test::Net other(8, 16);
    HS_EXPECT_HAS(
        thrown_by([&] { (void)apply_plan(*other, right, mesh); }), "the plan was resolved for"
    );
    test::Block block(8, 12);
    HS_EXPECT_HAS(
        thrown_by([&] { (void)apply_plan(*block, right, mesh); }), "the model has no parameter"
    );
    // What is cut once would be taken for whole.
    const auto applied = apply_plan(*net, right, mesh);
    const std::string again = thrown_by([&] {
      (void)apply_plan(*net, test::tensor_parallel_plan(), mesh, {input}, forward);
    });
    HS_EXPECT_HAS(again, "parameter 'blocks.0.mlp.up.weight' of shape [6, 8] is this rank's part");
    HS_EXPECT_HAS(
        thrown_by([&] {
          (void)apply_plan(*test::Net(8, 12), test::tensor_parallel_plan(), mesh, {input}, [] {
            return std::vector<at::Tensor>{};
          });
        }),
        "returned no tensor"
    );
  });
}

TEST(ApplyPlanUsageTest, APlanOfAnotherMeshIsRefused) {
  testing::run_ranks(2, [](std::shared_ptr<comm::World> world) {
    const auto mesh = test::make_mesh(std::move(world), {{"tp", 2}});
    test::Net net(8, 12);
    const at::Tensor x = test::formula_tensor({4, 8}, 0.3);
    // On one rank nothing is Partial, so that no gradient would be reduced on two.
    const auto resolved = resolve(
        *net,
        test::sequence_parallel_plan(),
        test::planned_mesh({{"tp", 1}}),
        0,
        {{x, {{4, 8}, Layout{{kRep}}}, "x"}},
        [&] { return std::vector<at::Tensor>{net->forward(x).sum()}; }
    );
    const std::string text = thrown_by([&] { (void)apply_plan(*net, resolved, mesh); });
    HS_EXPECT_HAS(text, "resolved for mesh(tp=1) and cannot be installed on mesh(tp=2)");
    HS_EXPECT_HAS(text, "resolve the plan for the mesh");
  });
}

TEST(ApplyPlanUsageTest, OtherBatchSizesAreCompiledWhenTheyComeAndForgotten) {
  testing::run_ranks(2, [](std::shared_ptr<comm::World> world) {
    const auto mesh = test::make_mesh(std::move(world), {{"tp", 2}});
    test::Net reference(8, 12);
    test::Net net(8, 12);
    const at::Tensor x = test::formula_tensor({4, 8}, 0.3);
    const auto applied = apply_plan(
        *net,
        test::tensor_parallel_plan(),
        mesh,
        {{x, {{4, 8}, Layout{{kRep}}}, "x"}},
        [&] { return std::vector<at::Tensor>{net->forward(x).sum()}; }
    );
    EXPECT_EQ(applied.num_compiled_shapes(), 4U) << "both ends of two MLPs, as resolved";
    for (std::int64_t rows = 1; rows <= 40; ++rows) {
      const at::Tensor batch = test::formula_tensor({rows, 8}, 0.1);
      const double gap =
          (net->forward(batch) - reference->forward(batch)).abs().max().item<double>();
      ASSERT_LT(gap, 1e-14) << rows;
      ASSERT_LE(applied.num_compiled_shapes(), 4 * internal::CompiledBoundary::kKept) << rows;
    }
    EXPECT_EQ(applied.num_compiled_shapes(), 4 * internal::CompiledBoundary::kKept);
  });
}

TEST(ApplyPlanUsageTest, OtherBatchSizesKeepTheUnevenCutsThatWereResolved) {
  testing::run_ranks(2, [](std::shared_ptr<comm::World> world) {
    const auto mesh = test::make_mesh(std::move(world), {{"tp", 2}});
    test::Net reference(8, 13);
    test::Net net(8, 13);
    ShardingPlan plan;
    plan.parameter("blocks.*.mlp.up.*", {{"tp", Placement::shard(0)}})
        .input("blocks.*.mlp.up", {{"tp", kRep}})
        .output("blocks.*.mlp.up", {{"tp", kRep}});
    const at::Tensor x = test::formula_tensor({4, 8}, 0.3);
    const auto applied = apply_plan(*net, plan, mesh, {{x, {{4, 8}, Layout{{kRep}}}, "x"}}, [&] {
      return std::vector<at::Tensor>{net->forward(x).sum()};
    });
    for (const std::int64_t rows : {3, 4, 7}) {
      const at::Tensor batch = test::formula_tensor({rows, 8}, 0.1);
      net->zero_grad();
      reference->zero_grad();
      const at::Tensor found = net->forward(batch);
      const at::Tensor expected = reference->forward(batch);
      ASSERT_LT((found - expected).abs().max().item<double>(), 1e-14) << rows;
      found.pow(2).mean().backward();
      expected.pow(2).mean().backward();
      EXPECT_LT(test::worst_gradient(applied, test::gradients_of(*reference)), 1e-14) << rows;
    }
  });
}

TEST(ApplyPlanUsageTest, GradientsWhereNoneCrossedAreRefused) {
  testing::run_ranks(2, [](std::shared_ptr<comm::World> world) {
    const auto mesh = test::make_mesh(std::move(world), {{"tp", 2}});
    test::Net net(8, 12);
    const at::Tensor x = test::formula_tensor({4, 8}, 0.3);
    const auto set_trained = [&](bool on) {
      for (auto& parameter : net->parameters()) {
        parameter.set_requires_grad(on);
      }
    };
    set_trained(false);
    const auto applied = apply_plan(
        *net,
        test::tensor_parallel_plan(),
        mesh,
        {{x, {{4, 8}, Layout{{kRep}}}, "x"}},
        [&] { return std::vector<at::Tensor>{net->forward(x).sum()}; }
    );
    set_trained(true);
    const at::Tensor loss = net->forward(x).sum();
    HS_EXPECT_HAS(
        thrown_by([&] { loss.backward(); }), "where none crossed when the plan was resolved"
    );
  });
}

// The rows are cut and gathered again, so each rank has to know of how many its own are a part.
TEST(ApplyPlanUsageTest, OtherSizesOfACutDimensionMayBeUneven) {
  for (const int size : {2, 3}) {
    testing::run_ranks(size, [&](std::shared_ptr<comm::World> world) {
      const auto mesh = test::make_mesh(std::move(world), {{"tp", size}});
      test::Net reference(8, 12);
      test::Net net(8, 12);
      const at::Tensor first = test::formula_tensor({7, 8}, 0.3);
      const auto applied = apply_plan(
          *net,
          test::sequence_parallel_plan(),
          mesh,
          {{first, {{7, 8}, Layout{{kRep}}}, "x"}},
          [&] { return std::vector<at::Tensor>{net->forward(first).pow(2).sum()}; }
      );
      // 7 and 8 rows give rank 0 of 2 as many, 5 and 4 give rank 1 of 2 as many.
      for (const std::int64_t rows : {8, 7, 5, 4, 9, 2, 1, 7, 8}) {
        const at::Tensor x = test::formula_tensor({rows, 8}, 0.1);
        net->zero_grad();
        reference->zero_grad();
        net->forward(x).pow(2).sum().backward();
        reference->forward(x).pow(2).sum().backward();
        ASSERT_LT(test::worst_gradient(applied, test::gradients_of(*reference)), 1e-12) << rows;
      }
      HS_EXPECT_HAS(
          thrown_by([&] { net->forward(test::formula_tensor({2, 4, 8}, 0.1)); }),
          "a tensor of 3 dimensions arrives, but the plan was resolved for 2"
      );
    });
  }
}

// With one row, rank 0 has all of it: it could not tell by itself what rank 1 refuses.
TEST(ApplyPlanUsageTest, DimensionsThatMustBeWholeAreNotCutWhateverTheirSize) {
  for (const int size : {2, 3}) {
    testing::run_ranks(size, [&](std::shared_ptr<comm::World> world) {
      const auto mesh = test::make_mesh(world, {{"tp", size}});
      test::Net net(8, 12);
      const at::Tensor x = test::formula_tensor({6, 8}, 0.3);
      const auto applied = apply_plan(
          *net,
          test::sequence_parallel_plan(),
          mesh,
          {{x, {{6, 8}, Layout{{kRep}}}, "x"}},
          [&] { return std::vector<at::Tensor>{net->forward(x).sum()}; }
      );
      const auto text_of = [&](int dim, std::int64_t rows) {
        const WholeDimensionScope outer(1, "nothing", "");
        const WholeDimensionScope scope(dim, "a cache", "take a plan that leaves rows whole");
        return thrown_by([&] { net->forward(test::formula_tensor({rows, 8}, 0.1)); });
      };
      for (const std::int64_t rows : {1, 2, 3, 6, 7}) {
        const std::string text = text_of(0, rows);
        const std::int64_t own = rows / size + (mesh->rank() < rows % size ? 1 : 0);
        HS_EXPECT_HAS(text, "input 0 of blocks.0: of dimension 0 this rank would get ");
        HS_EXPECT_HAS(text, concat_text("get ", own, " of ", rows, " under {tp: Shard(0)}"));
        HS_EXPECT_HAS(text, concat_text("a cache needs all ", rows, " on every rank"));
        HS_EXPECT_HAS(text, "hint: take a plan that leaves rows whole");
        EXPECT_EQ(text_of(1, rows), "");  // collective: none waits for a rank that refused
        EXPECT_EQ(text_of(2, rows), "");
      }
    });
  }
}

// What a plan attaches to parameters must not keep communicators, whose end tells the peers that a
// rank left.
TEST(ApplyPlanUsageTest, CommunicatorsGoWithThePlan) {
  testing::run_ranks(2, [](std::shared_ptr<comm::World> world) {
    auto mesh = std::make_shared<const comm::ProcessMesh>(
        world->shared_from_this(), layout::DeviceMesh({{"tp", 2}}, world->topology())
    );
    const auto before = mesh->axis("tp").use_count();
    test::Net net(8, 12);
    const at::Tensor x = test::formula_tensor({4, 8}, 0.3);
    {
      const auto applied = apply_plan(
          *net,
          test::tensor_parallel_plan(),
          mesh,
          {{x, {{4, 8}, Layout{{kRep}}}, "x"}},
          [&] { return std::vector<at::Tensor>{net->forward(x).sum()}; }
      );
      EXPECT_GT(mesh->axis("tp").use_count(), before);
    }
    EXPECT_EQ(mesh->axis("tp").use_count(), before);
  });
}

TEST(ApplyPlanUsageTest, RemovedPlansLeaveNoHooks) {
  testing::run_ranks(2, [](std::shared_ptr<comm::World> world) {
    const auto mesh = test::make_mesh(std::move(world), {{"tp", 2}});
    test::Net net(8, 12);
    const at::Tensor x = test::formula_tensor({4, 8}, 0.3);
    auto applied = apply_plan(
        *net,
        test::tensor_parallel_plan(),
        mesh,
        {{x, {{4, 8}, Layout{{kRep}}}, "x"}},
        [&] { return std::vector<at::Tensor>{net->forward(x).sum()}; }
    );
    EXPECT_TRUE(net->blocks[0]->as<test::BlockImpl>()->mlp->has_forward_hooks());
    EXPECT_FALSE(net->blocks[0]->as<test::BlockImpl>()->has_forward_hooks());
    EXPECT_EQ(net->blocks[0]->as<test::BlockImpl>()->mlp->up->weight.size(0), 6);
    EXPECT_EQ(applied.full_parameter("blocks.0.mlp.up.weight").size(0), 12);
    applied.remove();
    EXPECT_FALSE(net->blocks[0]->as<test::BlockImpl>()->mlp->has_forward_hooks());
  });
}

}  // namespace
}  // namespace hypershard::plan
