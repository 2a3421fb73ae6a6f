// Updating units inside backward gives the bits of a step after it, keeps no gradients, and leaves
// no half-updated model unnoticed.
#include "hypershard/optim/test_rules.h"

namespace hypershard::optim::test {
namespace {

struct Setting {
  Strategy strategy = Strategy::kZero3;
  int ranks = 2;
  int replicate = 1;
  int accumulation = 1;
  bool sync_every = false;  ///< all micro-batches reduce
  bool recompute = false;
  bool frozen = false;
  at::ScalarType dtype = at::kFloat;
  at::ScalarType compute = at::kFloat;
  at::ScalarType reduce = at::kFloat;
};

std::string to_text(const Setting& s) {
  return concat_text(
      layout::to_text(s.strategy),
      ", ranks ",
      s.ranks,
      ", replicate ",
      s.replicate,
      ", accumulation ",
      s.accumulation,
      s.sync_every ? ", each reduced" : "",
      s.recompute ? ", recompute" : "",
      s.frozen ? ", frozen" : "",
      ", compute ",
      c10::toString(s.compute),
      ", reduce ",
      c10::toString(s.reduce)
  );
}

/// Trains five steps and returns every parameter and every state tensor.
std::vector<at::Tensor> train(
    const WorldPtr& world, const Setting& s, const Rule& rule, bool in_backward
) {
  Net model(shard::test::NetOptions{.recompute = s.recompute});
  model->to(s.dtype);
  if (s.frozen) {
    model->in->weight.set_requires_grad(false);
    model->in->bias.set_requires_grad(false);
  }
  FullyShardOptions options = block_units(s.strategy);
  options.precision.compute = s.compute;
  options.precision.reduce = s.reduce;
  options.gradient_buffers = 1;
  const ShardedModel sharded = fully_shard(*model, make_mesh(world, s.replicate), options);
  const auto optimizer = rule.make_sharded(sharded);
  for (int step = 0; step < 5; ++step) {
    optimizer->set_lr(0.02 / (1 + step));
    optimizer->zero_grad();
    for (int micro = 0; micro < s.accumulation; ++micro) {
      const bool is_last = micro + 1 == s.accumulation;
      optimizer->step_in_backward(in_backward && is_last);
      sharded.set_requires_gradient_sync(is_last || s.sync_every);
      const at::Tensor batch = make_inputs(4 * s.ranks, 5, step * 7 + micro, s.dtype);
      shard::test::loss_of(model->forward(rows_of(batch, world->rank(), s.ranks))).backward();
    }
    optimizer->step();
    EXPECT_EQ(optimizer->num_steps(), step + 1);
  }
  std::vector<at::Tensor> all;
  for (const std::string& name : sharded.parameter_names()) {
    all.push_back(sharded.full_parameter(name));
  }
  for (const StateTensor& state : optimizer->state_tensors()) {
    all.push_back(state.tensor.clone());
  }
  return all;
}

void expect_same_bits(const WorldPtr& world, const Setting& setting, const Rule& rule) {
  SCOPED_TRACE(rule.name + ", " + to_text(setting));
  const auto after = train(world, setting, rule, /*in_backward=*/false);
  const auto inside = train(world, setting, rule, /*in_backward=*/true);
  ASSERT_EQ(after.size(), inside.size());
  for (std::size_t i = 0; i < after.size(); ++i) {
    EXPECT_TENSORS_EQUAL(inside[i], after[i]);
  }
}

TEST(StepInBackwardTest, GivesTheBitsOfAStepAfterBackward) {
  for (const testing::RankBackend backend : shard::test::all_backends()) {
    testing::run_ranks(
        2,
        [](WorldPtr world) {
          for (const Strategy strategy :
               {Strategy::kDdp, Strategy::kZero1, Strategy::kZero2, Strategy::kZero3}) {
            expect_same_bits(world, {.strategy = strategy}, adamw_rule());
          }
          expect_same_bits(world, {.accumulation = 3}, sgd_rule(0.9, true));
          expect_same_bits(world, {.accumulation = 2, .sync_every = true}, adamw_rule());
          expect_same_bits(world, {.recompute = true}, adamw_rule());
          expect_same_bits(world, {.frozen = true}, adamw_rule());
          expect_same_bits(world, {.compute = at::kBFloat16}, adamw_rule());
          expect_same_bits(
              world, {.compute = at::kBFloat16, .reduce = at::kBFloat16}, adamw_rule()
          );
        },
        {.backend = backend}
    );
  }
}

TEST(StepInBackwardTest, GivesTheSameBitsOnOneRankAndOnTwoTiers) {
  testing::run_ranks(1, [](WorldPtr world) {
    expect_same_bits(world, {.ranks = 1}, adamw_rule());
  });
  for (const Strategy strategy : {Strategy::kHsdp, Strategy::kHierarchical}) {
    testing::run_ranks(4, [&](WorldPtr world) {
      for (const int accumulation : {1, 2}) {
        expect_same_bits(
            world,
            {.strategy = strategy, .ranks = 4, .replicate = 2, .accumulation = accumulation},
            adamw_rule()
        );
      }
    });
  }
}

TEST(StepInBackwardTest, KeepsNoReducedGradients) {
  testing::run_ranks(2, [](WorldPtr world) {
    Net model;
    model->to(at::kFloat);
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    const auto optimizer = adamw_rule().make_sharded(sharded);
    optimizer->step_in_backward(true);
    const at::Tensor before = sharded.full_parameter("blocks.1.a.weight");
    shard::test::loss_of(model->forward(make_inputs(4, 5, 0, at::kFloat))).backward();
    EXPECT_FALSE(at::equal(sharded.full_parameter("blocks.1.a.weight"), before));
    for (const auto& unit : sharded.engine().units()) {
      for (const auto& group : unit->groups()) {
        EXPECT_FALSE(group->reduced().defined()) << group->name();
        EXPECT_TRUE(group->gradient_is_fresh()) << group->name();
      }
    }
    optimizer->step();
    EXPECT_EQ(optimizer->num_steps(), 1);
  });
}

TEST(StepInBackwardTest, ClippingAndASecondOptimizerAreRefused) {
  testing::run_ranks(1, [](WorldPtr world) {
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    {
      const auto first = adamw_rule().make_sharded(sharded);
      const auto second = adamw_rule().make_sharded(sharded);
      first->step_in_backward(true);
      expect_part(
          thrown_by([&] { sharded.clip_grad_norm_(1.0); }), "the optimizer uses them up in backward"
      );
      expect_part(
          thrown_by([&] { second->step_in_backward(true); }),
          "another optimizer updates this model in backward"
      );
      first->step_in_backward(false);
      second->step_in_backward(true);
    }
    // Both are gone: the model's backward must not call them.
    shard::test::loss_of(model->forward(make_inputs(4, 5, 0))).backward();
    EXPECT_GT(sharded.clip_grad_norm_(1.0), 0);
  });
}

TEST(StepInBackwardTest, AHalfUpdatedModelIsRefusedUntilItHasNewWeights) {
  testing::run_ranks(1, [](WorldPtr world) {
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    const auto optimizer = adamw_rule().make_sharded(sharded);
    optimizer->step_in_backward(true);
    at::Tensor x = make_inputs(4, 5, 0).requires_grad_(true);
    x.register_hook([](const at::Tensor& grad) -> at::Tensor {
      throw std::runtime_error("the loader broke off");
      return grad;
    });
    const at::Tensor loss = shard::test::loss_of(model->forward(x));
    EXPECT_THROW(loss.backward(), std::runtime_error);
    const auto forward = [&] { model->forward(make_inputs(4, 5, 1)); };
    expect_part(thrown_by(forward), "the weights are a mix of two steps");
    expect_part(thrown_by(forward), "load a checkpoint");
    sharded.sync_runtime();
    EXPECT_EQ(thrown_by(forward), "nothing was thrown");
  });
}

/// Breaks backward off where it enters a module.
class BrokenOff : public nn::ForwardHooks {
 public:
  void pre_forward(std::span<at::Tensor* const> /*inputs*/) override {}
  void post_forward(std::span<at::Tensor* const> outputs) override {
    outputs.front()->register_hook([](const at::Tensor& grad) -> at::Tensor {
      throw std::runtime_error("the loader broke off");
      return grad;
    });
  }
};

// A reduction that is under way when backward fails is finished, since peers wait for it, but must
// not update its unit: the weights are the old ones, or the next forward refuses them.
TEST(StepInBackwardTest, AFailedBackwardUpdatesNothingUnnoticed) {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    testing::run_ranks(
        2,
        [](WorldPtr world) {
          Net model;
          FullyShardOptions options = block_units();
          options.gradient_buffers = 4;  // no unit waits for another's reduction
          const ShardedModel sharded = fully_shard(*model, make_mesh(world), options);
          const auto optimizer = adamw_rule().make_sharded(sharded);
          optimizer->step_in_backward(true);
          std::vector<at::Tensor> before;
          for (const at::Tensor& update : sharded.update_tensors()) {
            before.push_back(update.clone());
          }
          // Behind blocks.2, whose reduction has just been started.
          model->blocks[1]->as<shard::test::BlockImpl>()->add_forward_hooks(
              std::make_shared<BrokenOff>()
          );
          const at::Tensor loss = shard::test::loss_of(model->forward(make_inputs(4, 5, 0)));
          EXPECT_THROW(loss.backward(), std::runtime_error);
          sharded.zero_grad();  // finishes what is in flight
          bool is_old = true;
          for (std::size_t i = 0; i < before.size(); ++i) {
            is_old = is_old && at::equal(sharded.update_tensors()[i], before[i]);
          }
          if (!is_old) {
            expect_part(
                thrown_by([&] { model->forward(make_inputs(4, 5, 1)); }),
                "the weights are a mix of two steps"
            );
          }
        },
        {.backend = testing::RankBackend::kDelayed, .seed = seed}
    );
  }
}

}  // namespace
}  // namespace hypershard::optim::test
