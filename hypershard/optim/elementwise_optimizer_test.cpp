// AdamW and SGD over update tensors equal torch's own optimizers over whole parameters, whatever
// the cut.
#include "hypershard/optim/elementwise_optimizer.h"

#include "hypershard/optim/test_rules.h"

namespace hypershard::optim::test {
namespace {

TEST(ElementwiseOptimizerTest, TwentyStepsEqualTorchOnOneToFourRanks) {
  for (const Rule& rule : all_rules()) {
    for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
      const double bound = dtype == at::kDouble ? 1e-12 : 1e-6;
      Net oracle;
      oracle->to(dtype);
      const OptimizerPtr plain = rule.make_plain(plain_groups(*oracle));
      for (int step = 0; step < 20; ++step) {
        set_plain_gradients(*oracle, step);
        plain->step();
      }
      for (const int ranks : {1, 2, 3, 4}) {
        testing::run_ranks(ranks, [&](WorldPtr world) {
          Net model;
          model->to(dtype);
          const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
          const auto optimizer = rule.make_sharded(sharded);
          for (int step = 0; step < 20; ++step) {
            set_sharded_gradients(sharded, step);
            optimizer->step();
          }
          EXPECT_EQ(optimizer->num_steps(), 20);
          for (const auto& item : oracle->named_parameters()) {
            SCOPED_TRACE(rule.name + " on " + std::to_string(ranks) + ": " + item.key());
            EXPECT_TENSORS_CLOSE(
                sharded.full_parameter(item.key()), item.value().detach(), bound, bound
            );
          }
        });
      }
    }
  }
}

// Not with made-up gradients but with those of a model; hsdp and ddp keep replicas of state.
TEST(ElementwiseOptimizerTest, TrainingEqualsTorchForEveryStrategy) {
  Net oracle;
  const Rule rule = adamw_rule();
  const OptimizerPtr plain = rule.make_plain(plain_groups(*oracle));
  for (int step = 0; step < 20; ++step) {
    plain->zero_grad();
    shard::test::loss_of(oracle->forward(make_inputs(8, 5, step))).backward();
    plain->step();
  }
  for (const Strategy strategy :
       {Strategy::kDdp, Strategy::kZero1, Strategy::kZero3, Strategy::kHsdp, Strategy::kHierarchical
       }) {
    testing::run_ranks(4, [&](WorldPtr world) {
      Net model;
      const ShardedModel sharded = fully_shard(*model, make_mesh(world, 2), block_units(strategy));
      const auto optimizer = rule.make_sharded(sharded);
      for (int step = 0; step < 20; ++step) {
        optimizer->zero_grad();
        const at::Tensor batch = rows_of(make_inputs(8, 5, step), world->rank(), 4);
        shard::test::loss_of(model->forward(batch)).backward();
        optimizer->step();
      }
      for (const auto& item : oracle->named_parameters()) {
        SCOPED_TRACE(to_text(strategy) + ": " + item.key());
        EXPECT_TENSORS_CLOSE(
            sharded.full_parameter(item.key()), item.value().detach(), 1e-10, 1e-10
        );
      }
    });
  }
}

// Zero gradients leave decay alone at work: a step multiplies by 1 - lr * wd or changes nothing.
TEST(ElementwiseOptimizerTest, OnlyTheNamedFamiliesDecay) {
  testing::run_ranks(2, [](WorldPtr world) {
    Net before;
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    AdamW optimizer(sharded, {.lr = 0.5, .weight_decay = 0.25});
    for (UpdateTensor& update : sharded.update_parameters()) {
      update.tensor.mutable_grad() = at::zeros_like(update.tensor);
    }
    optimizer.step();
    for (const auto& item : before->named_parameters()) {
      const double factor = item.value().dim() >= 2 ? 1 - 0.5 * 0.25 : 1.0;
      SCOPED_TRACE(item.key());
      EXPECT_TENSORS_EQUAL(sharded.full_parameter(item.key()), item.value().detach().mul(factor));
    }
  });
}

TEST(ElementwiseOptimizerTest, UnknownDecayFamilyIsRefusedWithTheNearest) {
  testing::run_ranks(1, [](WorldPtr world) {
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    const std::string text =
        thrown_by([&] { AdamW optimizer(sharded, {.decay_families = {"decoy"}}); });
    expect_part(text, "decay_families names 'decoy'");
    expect_part(text, "did you mean 'decay'");
  });
}

struct VectorsImpl : nn::Hookable<VectorsImpl, at::Tensor(at::Tensor), torch::nn::Module> {
  VectorsImpl() { w = register_parameter("w", at::arange(5, at::kDouble)); }
  at::Tensor forward_impl(const at::Tensor& x) { return (w * x).sum(); }
  at::Tensor w;
};
TORCH_MODULE(Vectors);

TEST(ElementwiseOptimizerTest, ModelOfVectorsNeedsNoDecayFamily) {
  testing::run_ranks(1, [](WorldPtr world) {
    Vectors model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), {});
    const AdamW optimizer(sharded);
    EXPECT_TRUE(optimizer.param_groups()[0].params().empty());
    EXPECT_EQ(optimizer.param_groups()[1].params().size(), 1);
  });
}

TEST(ElementwiseOptimizerTest, PaddingStaysExactlyZero) {
  for (const Rule& rule : all_rules()) {
    testing::run_ranks(4, [&](WorldPtr world) {
      Net model;
      const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
      const auto optimizer = rule.make_sharded(sharded);
      for (int step = 0; step < 5; ++step) {
        set_sharded_gradients(sharded, step);
        optimizer->step();
      }
      const std::vector<UpdateTensor> updates = sharded.update_parameters();
      std::int64_t padding = 0;
      const auto check = [&](const at::Tensor& flat, const UpdateTensor& update) {
        at::Tensor rest = flat.clone();
        for (const UpdatePiece& piece : update.pieces) {
          rest.narrow(0, piece.offset, piece.range.numel()).zero_();
          padding -= piece.range.numel();
        }
        padding += flat.numel();
        EXPECT_EQ(rest.count_nonzero().item<std::int64_t>(), 0) << update.name;
      };
      for (const UpdateTensor& update : updates) {
        check(update.tensor, update);
      }
      for (const StateTensor& state : optimizer->state_tensors()) {
        EXPECT_EQ(state.tensor.numel(), updates[state.update].tensor.numel());
        check(state.tensor, updates[state.update]);
      }
      at::Tensor sum = at::full({1}, static_cast<double>(padding), at::kDouble);
      world->world_communicator()->all_reduce(sum)->wait_released();
      EXPECT_GT(sum.item<double>(), 0) << "the model has no padding to test";
    });
  }
}

TEST(ElementwiseOptimizerTest, TorchSchedulerDrivesTheRateOfBothGroups) {
  Net oracle;
  const Rule rule = adamw_rule();
  const OptimizerPtr plain = rule.make_plain(plain_groups(*oracle));
  torch::optim::StepLR plain_schedule(*plain, 3, 0.5);
  for (int step = 0; step < 10; ++step) {
    set_plain_gradients(*oracle, step);
    plain->step();
    plain_schedule.step();
  }
  testing::run_ranks(3, [&](WorldPtr world) {
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    const auto optimizer = rule.make_sharded(sharded);
    torch::optim::StepLR schedule(*optimizer, 3, 0.5);
    for (int step = 0; step < 10; ++step) {
      set_sharded_gradients(sharded, step);
      optimizer->step();
      schedule.step();
    }
    EXPECT_EQ(optimizer->lr(), 0.02 / 8);
    EXPECT_EQ(optimizer->param_groups()[1].options().get_lr(), 0.02 / 8);
    for (const auto& item : oracle->named_parameters()) {
      EXPECT_TENSORS_CLOSE(sharded.full_parameter(item.key()), item.value().detach(), 1e-12, 1e-12);
    }
    optimizer->set_lr(0.125);
    EXPECT_EQ(optimizer->param_groups()[0].options().get_lr(), 0.125);
    EXPECT_EQ(optimizer->param_groups()[1].options().get_lr(), 0.125);
  });
}

TEST(ElementwiseOptimizerTest, OptionsOfOneGroupMayBeChangedBetweenSteps) {
  testing::run_ranks(2, [](WorldPtr world) {
    Net before;
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    Sgd optimizer(sharded, {.lr = 1});
    auto& vectors = static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[1].options());
    vectors.lr(0);
    for (UpdateTensor& update : sharded.update_parameters()) {
      update.tensor.mutable_grad() = at::ones_like(update.tensor);
    }
    optimizer.step();
    for (const auto& item : before->named_parameters()) {
      const double change = item.value().dim() >= 2 ? 1.0 : 0.0;
      EXPECT_TENSORS_EQUAL(sharded.full_parameter(item.key()), item.value().detach().sub(change));
    }
    vectors.dampening(0.5);
    EXPECT_THROW(optimizer.step(), Unsupported);
    vectors.dampening(0).momentum(1.5);
    expect_part(thrown_by([&] { optimizer.step(); }), "sgd.momentum is 1.5");
  });
}

}  // namespace
}  // namespace hypershard::optim::test
