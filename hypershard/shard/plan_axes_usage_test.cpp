// What a user does beside training on a mesh with plan axes: accumulation, updates inside backward,
// other dtypes, initial values, the search for NaN, and mistakes.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "hypershard/core/error.h"
#include "hypershard/shard/engine.h"
#include "hypershard/shard/test_tensor_parallel.h"

namespace hypershard::shard::test {
namespace {

using layout::Placement;
using layout::Strategy;
using MeshPtr = std::shared_ptr<const comm::ProcessMesh>;

struct RunSetup {
  TpMesh mesh;
  Strategy strategy = Strategy::kZero3;
  bool sequence = true;
  TpSizes sizes = {};
  FullyShardOptions options = {};
};

/// One rank's model on a mesh.
struct Sharded {
  Sharded(std::shared_ptr<comm::World> world, const RunSetup& setup)
      : mesh(setup.mesh.make(std::move(world))),
        model(setup.sizes, TensorParallel{mesh, setup.sequence}),
        handle(fully_shard(*model, *mesh, options_of(setup))) {}
  FullyShardOptions options_of(const RunSetup& setup) {
    FullyShardOptions options = setup.options;
    options.strategy = setup.strategy;
    options.units = {"blocks.*"};
    options.parameters = model->specs();
    return options;
  }
  at::Tensor loss(const at::Tensor& tokens) { return model->forward(own_tokens(tokens, *mesh)); }

  MeshPtr mesh;
  TpNet model;
  ShardedModel handle;
};

void on_ranks(const RunSetup& setup, const std::function<void(Sharded&)>& body) {
  testing::run_ranks(setup.mesh.ranks(), [&](std::shared_ptr<comm::World> world) {
    Sharded run(std::move(world), setup);
    body(run);
  });
}

std::map<std::string, at::Tensor> oracle_gradients(const at::Tensor& tokens) {
  TpNet oracle;
  return reference_gradients([&] { return oracle->forward(tokens); }, *oracle);
}

// Three micro-batches: reduced each, none until the last, inside `shard` only until the last. The
// sum over `tp` comes with the last reduction over the data axes, never before.
TEST(PlanAxesUsageTest, AccumulationModesAgreeAndCountTheirSums) {
  for (const int mode : {0, 1, 2}) {
    on_ranks({{.replicate = 2, .shard = 2, .tp = 2}, Strategy::kHierarchical}, [&](Sharded& run) {
      const auto& reduce = run.handle.engine().parallel().plan_reduce;
      ASSERT_EQ(reduce.size(), 1);
      comm::CollectiveLog& log = reduce.at({"tp"})->log();
      for (int step = 0; step < 2; ++step) {
        const auto before = log.count(comm::Op::kAllReduce);
        run.handle.reset_counters();
        run.handle.zero_grad();
        const at::Tensor tokens = make_tokens(24, {}, step);
        for (int micro = 0; micro < 3; ++micro) {
          run.handle.set_requires_gradient_sync(mode != 1 || micro == 2);
          run.handle.set_requires_all_reduce(mode != 2 || micro == 2);
          (run.loss(tokens.narrow(0, 8 * micro, 8)) / 3).backward();
        }
        EXPECT_LE(worst_gradient(run.handle, oracle_gradients(tokens)), 1e-12) << mode;
        constexpr int kUnits = 3;
        const int times = mode == 0 ? 3 : 1;
        EXPECT_EQ(log.count(comm::Op::kAllReduce) - before, kUnits * times) << mode;
        std::int64_t numel = 0;
        for (const auto& unit : run.handle.engine().units()) {
          for (const auto& group : unit->groups()) {
            if (!group->reduce_axes().empty()) {
              numel += group->gradient_range().numel();
            }
          }
        }
        EXPECT_GT(numel, 0);
        EXPECT_EQ(run.handle.counters().plan_reduced_bytes, 8 * numel * times);
      }
    });
  }
}

TEST(PlanAxesUsageTest, VisitingWholeTensorsGathersOnceAGroup) {
  on_ranks({{.shard = 2, .tp = 2}}, [](Sharded& run) {
    run.loss(make_tokens(8, {}, 0)).backward();
    const Engine& engine = run.handle.engine();
    std::int64_t num_groups = 0;
    for (const auto& unit : engine.units()) {
      num_groups += static_cast<std::int64_t>(unit->groups().size());
    }
    comm::CollectiveLog& log = engine.parallel().cuts.front().gather->log();
    const auto visited = [&](auto visit) {
      std::vector<std::pair<std::string, at::Tensor>> all;
      const std::int64_t before = log.count(comm::Op::kAllGather);
      (run.handle.*visit)([&](const std::string& name, const at::Tensor& full) {
        all.emplace_back(name, full);
      });
      EXPECT_EQ(log.count(comm::Op::kAllGather) - before, num_groups);
      return all;
    };
    const auto names = run.handle.parameter_names();
    const auto parameters = visited(&ShardedModel::visit_full_parameters);
    const auto gradients = visited(&ShardedModel::visit_full_gradients);
    ASSERT_EQ(parameters.size(), names.size());
    ASSERT_EQ(gradients.size(), names.size());
    for (std::size_t i = 0; i < names.size(); ++i) {
      EXPECT_EQ(parameters[i].first, names[i]);
      EXPECT_EQ(gradients[i].first, names[i]);
      EXPECT_TRUE(at::equal(parameters[i].second, run.handle.full_parameter(names[i])));
      EXPECT_TRUE(at::equal(gradients[i].second, run.handle.full_gradient(names[i])));
    }
    run.handle.zero_grad();
    run.handle.visit_full_gradients([](const std::string& name, const at::Tensor&) {
      ADD_FAILURE() << name << " has no gradient";
    });
  });
}

TEST(PlanAxesUsageTest, RecomputedBlocksHaveTheSameGradients) {
  RunSetup setup{{.shard = 2, .tp = 2}};
  setup.sizes.recompute = true;
  on_ranks(setup, [&](Sharded& run) {
    const at::Tensor tokens = make_tokens(8, {}, 0);
    run.loss(tokens).backward();
    EXPECT_LE(worst_gradient(run.handle, oracle_gradients(tokens)), 1e-12);
  });
}

// The gradient that a unit is updated with inside backward has been summed over `tp`.
TEST(PlanAxesUsageTest, UpdatesInsideBackwardUseCompleteGradients) {
  for (const Strategy strategy : {Strategy::kDdp, Strategy::kZero2, Strategy::kZero3}) {
    RunSetup setup{{.shard = 2, .tp = 2}, strategy};
    setup.options.gradient_buffers = 1;
    on_ranks(setup, [&](Sharded& run) {
      TpNet oracle;
      run.handle.engine().update_in_backward = [](const Unit& unit) {
        const at::NoGradGuard no_grad;
        for (const auto& group : unit.groups()) {
          for (const UpdateTensor& update : group->updates()) {
            at::Tensor tensor = update.tensor;
            tensor.sub_(tensor.grad(), 0.1);
          }
        }
      };
      for (int step = 0; step < 4; ++step) {
        const at::Tensor tokens = make_tokens(8, {}, step);
        run.loss(tokens).backward();
        oracle->zero_grad();
        oracle->forward(tokens).backward();
        const at::NoGradGuard no_grad;
        for (auto& item : oracle->named_parameters()) {
          if (item.key() != "head") {
            item.value().sub_(item.value().grad(), 0.1);
          }
        }
      }
      for (const auto& item : oracle->named_parameters()) {
        EXPECT_LE(
            (run.handle.full_parameter(item.key()) - item.value()).abs().max().item<double>(), 1e-11
        ) << item.key();
      }
    });
  }
}

TEST(PlanAxesUsageTest, SharedAndGatheredRuntimeGiveTheSameBits) {
  std::vector<std::vector<at::Tensor>> gradients;
  for (const Share share : {Share::kOn, Share::kOff}) {
    RunSetup setup{{.shard = 2, .tp = 2}};
    setup.options.share = share;
    std::vector<at::Tensor> found;
    on_ranks(setup, [&](Sharded& run) {
      run.loss(make_tokens(8, {}, 0)).backward();
      for (const std::string& name : run.handle.parameter_names()) {
        const at::Tensor gradient = run.handle.full_gradient(name);
        if (run.mesh->rank() == 0) {
          found.push_back(gradient);
        }
      }
    });
    gradients.push_back(found);
  }
  ASSERT_EQ(gradients[0].size(), gradients[1].size());
  for (std::size_t i = 0; i < gradients[0].size(); ++i) {
    EXPECT_TRUE(at::equal(gradients[0][i], gradients[1][i])) << i;
  }
}

// bf16 keeps 8 bits; what is tested is that no gradient misses a term or has one twice, and that
// the sum over `tp` is taken in the reduce dtype: the norms' gradients would be off by half.
TEST(PlanAxesUsageTest, Bf16ComputeStaysNearTheUnshardedRun) {
  for (const auto reduce : {at::kFloat, at::kBFloat16}) {
    for (const Strategy strategy : {Strategy::kZero1, Strategy::kZero3}) {
      RunSetup setup{{.shard = 2, .tp = 2}, strategy};
      setup.sizes.dtype = at::kFloat;
      setup.options.precision.compute = at::kBFloat16;
      setup.options.precision.reduce = reduce;
      setup.options.precision.output = at::kFloat;
      on_ranks(setup, [&](Sharded& run) {
        const at::Tensor tokens = make_tokens(8, {}, 0);
        run.loss(tokens).backward();
        for (const auto& [name, expected] : oracle_gradients(tokens)) {
          const at::Tensor found = run.handle.full_gradient(name);
          ASSERT_EQ(found.scalar_type(), at::kFloat);
          const double off = (found - expected).norm().item<double>();
          // The least ones are what is left of terms that cancel; all together have norm 6.
          EXPECT_LE(off, 0.1 * expected.norm().item<double>() + 1e-3) << name;
        }
      });
    }
  }
}

TEST(PlanAxesUsageTest, SameSeedGivesTheSameWeightsOnAnyMesh) {
  const auto init = [](std::string_view, at::IntArrayRef shape) {
    EXPECT_TRUE(shape.empty() || shape.back() >= 7) << "not the global shape";
    return nn::Init::normal(0.0, 0.3);
  };
  TpNet alone;
  nn::initialize_module(*alone, init, 11);
  for (const TpMesh& mesh :
       {TpMesh{.tp = 2}, TpMesh{.tp = 4}, TpMesh{.shard = 2, .tp = 2}, TpMesh{.shard = 3, .tp = 1}
       }) {
    on_ranks({mesh}, [&](Sharded& run) {
      run.handle.initialize(init, 11);
      for (const auto& item : alone->named_parameters()) {
        if (item.key() != "head" && item.key() != "embed") {  // initialised under its last name
          EXPECT_TRUE(at::equal(run.handle.full_parameter(item.key()), item.value()))
              << item.key() << " on " << mesh.text();
        }
      }
      const at::Tensor embed = at::empty({9 * 8}, at::kDouble);
      nn::fill_range(embed, init("embed", {9, 8}), 11, "embed", 0);
      EXPECT_TRUE(at::equal(run.handle.full_parameter("head").view({-1}), embed));
    });
  }
}

TEST(PlanAxesUsageTest, EveryNormCountsEachElementOnce) {
  const at::Tensor tokens = make_tokens(8, {}, 0);
  const auto expected = oracle_gradients(tokens);
  std::vector<at::Tensor> flat;
  for (const auto& [name, gradient] : expected) {
    if (name != "head") {
      flat.push_back(gradient.flatten());
    }
  }
  const at::Tensor all = at::cat(flat);
  on_ranks({{.shard = 2, .tp = 2}}, [&](Sharded& run) {
    run.loss(tokens).backward();
    for (const double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
      const double norm = all.norm(p).item<double>();
      EXPECT_NEAR(run.handle.clip_grad_norm_(1e9, p), norm, 1e-11 * norm) << p;
    }
  });
}

TEST(PlanAxesUsageTest, NonFiniteValuesAreFoundOnEveryRankOfTheMesh) {
  on_ranks({{.shard = 2, .tp = 2}}, [&](Sharded& run) {
    run.loss(make_tokens(8, {}, 0)).backward();
    EXPECT_EQ(run.handle.find_non_finite(), "");
    for (const UpdateTensor& update : run.handle.update_parameters()) {
      for (const UpdatePiece& piece : update.pieces) {
        if (run.mesh->rank() == 3 && piece.name == "blocks.1.down") {
          update.tensor.grad()[piece.offset] = std::nan("");
        }
      }
    }
    EXPECT_EQ(run.handle.find_non_finite(), "parameter 'blocks.1.down' (gradient) on rank 3");
    EXPECT_TRUE(std::isnan(run.handle.clip_grad_norm_(1.0)));
  });
}

TEST(PlanAxesUsageTest, BroadcastTakesRankZerosValuesAndKeepsParts) {
  TpNet oracle;
  testing::run_ranks(4, [&](std::shared_ptr<comm::World> world) {
    const MeshPtr mesh = TpMesh{.shard = 2, .tp = 2}.make(std::move(world));
    TpNet model(TpSizes{}, TensorParallel{mesh, true});
    {
      const at::NoGradGuard no_grad;
      const bool is_replicated_only = mesh->rank() == 1;  // the same data as rank 0, other `tp`
      for (auto& item : model->named_parameters()) {
        if (item.key() == "head") {
          continue;
        }
        const bool is_whole =
            item.value().sizes() == at::IntArrayRef(model->global_shapes.at(item.key()));
        if (mesh->rank() > 1 || (is_replicated_only && is_whole)) {
          item.value().add_(mesh->rank());
        }
      }
    }
    FullyShardOptions options;
    options.parameters = model->specs();
    options.initial_values = InitialValues::kBroadcast;
    const ShardedModel sharded = fully_shard(*model, *mesh, options);
    for (const auto& item : oracle->named_parameters()) {
      EXPECT_TRUE(at::equal(sharded.full_parameter(item.key()), item.value())) << item.key();
    }
  });
}

// Without a plan, ranks along another axis are replicas: counted once, the same gradients.
TEST(PlanAxesUsageTest, AxesThatNoParameterIsCutOverHoldReplicas) {
  testing::run_ranks(4, [&](std::shared_ptr<comm::World> world) {
    const MeshPtr mesh = TpMesh{.shard = 2, .tp = 2}.make(std::move(world));
    Net oracle;
    Net model;
    const ShardedModel sharded = fully_shard(*model, *mesh, block_units());
    const at::Tensor batch = make_inputs(8, 5, 0);
    const auto expected =
        reference_gradients([&] { return loss_of(oracle->forward(batch)); }, *oracle);
    loss_of(model->forward(own_tokens(batch, *mesh))).backward();
    EXPECT_LE(worst_gradient(sharded, expected), 1e-12);
    double squares = 0;
    for (const auto& item : expected) {
      squares += item.second.pow(2).sum().item<double>();
    }
    EXPECT_NEAR(sharded.clip_grad_norm_(1e9), std::sqrt(squares), 1e-11);
  });
}

/// Runs fully_shard with changed options on every rank and expects all of them to refuse.
void expect_refused(
    const std::string& part,
    const std::function<void(FullyShardOptions&, TpNetImpl&, int rank)>& change,
    const TpMesh& where = {.shard = 2, .tp = 2}
) {
  testing::run_ranks(where.ranks(), [&](std::shared_ptr<comm::World> world) {
    const MeshPtr mesh = where.make(std::move(world));
    TpNet model(TpSizes{}, TensorParallel{mesh, true});
    FullyShardOptions options;
    options.parameters = model->specs();
    change(options, *model, mesh->rank());
    const std::string text = thrown_by([&] { fully_shard(*model, *mesh, options); });
    EXPECT_NE(text.find(part), std::string::npos) << "wanted: " << part << "\nthrown: " << text;
  });
}

TEST(PlanAxesErrorsTest, SpecsThatDoNotFitAreRefused) {
  expect_refused("options.parameters names 'nrom'", [](FullyShardOptions& o, TpNetImpl&, int) {
    o.parameters["nrom"] = o.parameters["norm"];
  });
  expect_refused("did you mean 'norm'", [](FullyShardOptions& o, TpNetImpl&, int) {
    o.parameters["nrom"] = o.parameters["norm"];
  });
  expect_refused("parameter 'embed' has local shape [", [](FullyShardOptions& o, TpNetImpl&, int) {
    o.parameters["embed"].spec.shape = {12, 8};
  });
  expect_refused(
      "is Shard(0) on data axis 'shard'; expected Replicate",
      [](FullyShardOptions& o, TpNetImpl&, int) {
        o.parameters["embed"].spec.layout.placements[0] = Placement::shard(0);
      }
  );
  expect_refused(
      "layout of parameter 'norm' is Partial(sum) on axis 'tp'",
      [](FullyShardOptions& o, TpNetImpl&, int) {
        o.parameters["norm"].spec.layout.placements[1] = Placement::partial();
      }
  );
  expect_refused(
      "reduce_axes of parameter 'norm' names data axis 'shard'",
      [](FullyShardOptions& o, TpNetImpl&, int) { o.parameters["norm"].reduce_axes = {"shard"}; }
  );
  expect_refused(
      "reduce_axes of parameter 'embed' names axis 'tp', over which the parameter is Shard(0)",
      [](FullyShardOptions& o, TpNetImpl&, int) { o.parameters["embed"].reduce_axes = {"tp"}; }
  );
  expect_refused("unknown axis 'pt'", [](FullyShardOptions& o, TpNetImpl&, int) {
    o.parameters["norm"].reduce_axes = {"pt"};
  });
  expect_refused(
      "says different things of 'embed' and 'head', which are one tensor",
      [](FullyShardOptions& o, TpNetImpl&, int) { o.parameters["head"] = o.parameters["norm"]; }
  );
}

TEST(PlanAxesErrorsTest, RanksThatDisagreeAreAllTold) {
  // Also the ranks whose data peers are like them.
  expect_refused(
      "parameter 'norm' (shape [8]) differs in name, shape, dtype, unit, update family, precision, "
      "requires_grad or layout between rank 0 and rank 2",
      [](FullyShardOptions& o, TpNetImpl&, int rank) {
        if (rank >= 2) {
          o.parameters["norm"].reduce_axes.clear();
        }
      }
  );
  // A part that nobody said is one.
  expect_refused(
      "state its layout in options.parameters",
      [](FullyShardOptions& o, TpNetImpl&, int) { o.parameters.clear(); }
  );
  // Replicated on `tp`, and yet not the same there.
  expect_refused(
      "parameter 'norm' (shape [8]) differs in initial values between rank 0 and rank 1",
      [](FullyShardOptions&, TpNetImpl& model, int rank) {
        const at::NoGradGuard no_grad;
        if (rank == 1) {
          model.norm.add_(1);
        }
      }
  );
  expect_refused(
      "differs in initial values between rank 1 and rank 3",
      [](FullyShardOptions&, TpNetImpl& model, int rank) {
        const at::NoGradGuard no_grad;
        if (rank == 3) {
          model.embed.add_(1);
        }
      }
  );
}

}  // namespace
}  // namespace hypershard::shard::test
