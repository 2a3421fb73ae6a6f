// What neighbouring systems get wrong: steps at the wrong time, frozen parts, empty slices, wrong
// moments.
#include "hypershard/optim/elementwise_optimizer.h"
#include "hypershard/optim/test_rules.h"

namespace hypershard::optim::test {
namespace {

TEST(ElementwiseUsageTest, StepBetweenForwardAndBackwardIsRefused) {
  testing::run_ranks(2, [](WorldPtr world) {
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    AdamW optimizer(sharded);
    const at::Tensor loss =
        shard::test::loss_of(model->forward(rows_of(make_inputs(4, 5, 0), world->rank(), 2)));
    expect_part(thrown_by([&] { optimizer.step(); }), "update parameters may not be written now");
    EXPECT_EQ(optimizer.num_steps(), 0);
    loss.backward();
    optimizer.step();
    EXPECT_EQ(optimizer.num_steps(), 1);
  });
}

TEST(ElementwiseUsageTest, ClosureRunsWithGradientsBeforeTheUpdate) {
  testing::run_ranks(2, [](WorldPtr world) {
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    const auto optimizer = adamw_rule().make_sharded(sharded);
    int calls = 0;
    at::Tensor made;
    const at::NoGradGuard no_grad;
    const at::Tensor loss = optimizer->step([&] {
      ++calls;
      made = shard::test::loss_of(model->forward(rows_of(make_inputs(8, 5, 0), world->rank(), 2)));
      made.backward();
      return made;
    });
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(loss.is_same(made));
    EXPECT_FALSE(optimizer->step().defined());
    optimizer->zero_grad();
    EXPECT_FALSE(sharded.update_tensors().front().grad().defined());
  });
}

TEST(ElementwiseUsageTest, ClosureGivesTheSameUpdateAsTorch) {
  Net oracle;
  const OptimizerPtr plain = adamw_rule().make_plain(plain_groups(*oracle));
  shard::test::loss_of(oracle->forward(make_inputs(8, 5, 0))).backward();
  plain->step();
  testing::run_ranks(2, [&](WorldPtr world) {
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    const auto optimizer = adamw_rule().make_sharded(sharded);
    optimizer->step([&] {
      at::Tensor loss =
          shard::test::loss_of(model->forward(rows_of(make_inputs(8, 5, 0), world->rank(), 2)));
      loss.backward();
      return loss;
    });
    for (const auto& item : oracle->named_parameters()) {
      EXPECT_TENSORS_CLOSE(sharded.full_parameter(item.key()), item.value().detach(), 1e-12, 1e-12);
    }
  });
}

// Frozen for three steps, then trained: its bias correction starts at one, and no decay before.
TEST(ElementwiseUsageTest, UnfrozenParametersCountTheirOwnSteps) {
  Net oracle;
  oracle->in->weight.set_requires_grad(false);
  oracle->in->bias.set_requires_grad(false);
  const Rule rule = adamw_rule();
  const OptimizerPtr plain = rule.make_plain(plain_groups(*oracle));
  const auto unfreeze = [](const Net& net) {
    net->in->weight.set_requires_grad(true);
    net->in->bias.set_requires_grad(true);
  };
  for (int step = 0; step < 6; ++step) {
    if (step == 3) {
      unfreeze(oracle);
    }
    plain->zero_grad();
    shard::test::loss_of(oracle->forward(make_inputs(8, 5, step))).backward();
    plain->step();
  }
  testing::run_ranks(2, [&](WorldPtr world) {
    Net model;
    model->in->weight.set_requires_grad(false);
    model->in->bias.set_requires_grad(false);
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    const auto optimizer = rule.make_sharded(sharded);
    for (int step = 0; step < 6; ++step) {
      if (step == 3) {
        unfreeze(model);
        const std::vector<UpdateTensor> now = sharded.update_parameters();
        for (const StateTensor& state : optimizer->state_tensors()) {
          for (const UpdatePiece& piece : now[state.update].pieces) {
            EXPECT_NE(piece.name.substr(0, 3), "in.") << "state of a frozen parameter";
          }
        }
      }
      optimizer->zero_grad();
      shard::test::loss_of(model->forward(rows_of(make_inputs(8, 5, step), world->rank(), 2)))
          .backward();
      optimizer->step();
    }
    const std::vector<UpdateTensor> updates = sharded.update_parameters();
    const std::vector<std::int64_t> steps = optimizer->update_steps();
    for (std::size_t i = 0; i < updates.size(); ++i) {
      for (const UpdatePiece& piece : updates[i].pieces) {
        EXPECT_EQ(steps[i], piece.name.substr(0, 3) == "in." ? 3 : 6) << piece.name;
      }
    }
    for (const auto& item : oracle->named_parameters()) {
      SCOPED_TRACE(item.key());
      EXPECT_TENSORS_CLOSE(sharded.full_parameter(item.key()), item.value().detach(), 1e-10, 1e-10);
    }
  });
}

struct EmptyImpl : nn::Hookable<EmptyImpl, at::Tensor(at::Tensor), torch::nn::Module> {
  EmptyImpl() {
    none = register_parameter("none", at::empty({0, 3}, at::kDouble));
    scalar = register_parameter("scalar", at::tensor(1.5, at::kDouble));
    single = register_parameter("single", at::ones({1, 2}));
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    return x.sum() * scalar + none.sum() + single.sum().to(at::kDouble);
  }
  at::Tensor none, scalar, single;
};
TORCH_MODULE(Empty);

// More ranks than elements: most slices are empty, one parameter is empty everywhere, and two
// dtypes share a parameter group.
TEST(ElementwiseUsageTest, EmptySlicesStepAndCount) {
  for (const Rule& rule : all_rules()) {
    testing::run_ranks(4, [&](WorldPtr world) {
      Empty oracle;
      const OptimizerPtr plain = rule.make_plain(plain_groups(*oracle));
      Empty model;
      const ShardedModel sharded = fully_shard(*model, make_mesh(world), {});
      const auto optimizer = rule.make_sharded(sharded);
      for (int step = 0; step < 3; ++step) {
        plain->zero_grad();
        optimizer->zero_grad();
        const at::Tensor x = at::full({2}, 0.5 + step, at::kDouble);
        oracle->forward(x).backward();
        plain->step();
        model->forward(x).backward();
        optimizer->step();
      }
      for (const std::int64_t steps : optimizer->update_steps()) {
        EXPECT_EQ(steps, 3);
      }
      EXPECT_TENSORS_CLOSE(sharded.full_parameter("scalar"), oracle->scalar.detach(), 1e-12, 0);
      EXPECT_TENSORS_CLOSE(sharded.full_parameter("single"), oracle->single.detach(), 1e-6, 0);
      EXPECT_EQ(sharded.full_parameter("none").numel(), 0);
    });
  }
}

// What a NaN does to an element is torch's business and that element's alone.
TEST(ElementwiseUsageTest, NanAndInfinityPassThroughAsInTorch) {
  for (const Rule& rule : all_rules()) {
    testing::run_ranks(2, [&](WorldPtr world) {
      Net oracle;
      const OptimizerPtr plain = rule.make_plain(plain_groups(*oracle));
      Net model;
      const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
      const auto optimizer = rule.make_sharded(sharded);
      constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
      constexpr double kInf = std::numeric_limits<double>::infinity();
      for (int step = 0; step < 2; ++step) {
        set_plain_gradients(*oracle, step);
        set_sharded_gradients(sharded, step);
        if (step == 0) {
          oracle->in->weight.mutable_grad().view({-1})[3] = kNan;
          oracle->in->weight.mutable_grad().view({-1})[17] = kInf;
          for (UpdateTensor& update : sharded.update_parameters()) {
            for (const UpdatePiece& piece : update.pieces) {
              for (const auto& [index, value] :
                   {std::pair<std::int64_t, double>{3, kNan}, {17, kInf}}) {
                if (piece.name == "in.weight" && piece.range.begin <= index &&
                    index < piece.range.end) {
                  update.tensor.mutable_grad()[piece.offset + index - piece.range.begin] = value;
                }
              }
            }
          }
        }
        plain->step();
        optimizer->step();
      }
      std::int64_t non_finite = 0;
      for (const auto& item : oracle->named_parameters()) {
        const at::Tensor found = sharded.full_parameter(item.key());
        non_finite += at::isfinite(found).logical_not().sum().item<std::int64_t>();
        EXPECT_TENSORS_EQUAL(at::isnan(found), at::isnan(item.value()));
        EXPECT_TENSORS_CLOSE(
            at::nan_to_num(found), at::nan_to_num(item.value().detach()), 1e-12, 1e-12
        );
      }
      EXPECT_EQ(non_finite, 2);
    });
  }
}

TEST(ElementwiseUsageTest, OptionsOutOfRangeAreRefusedByName) {
  testing::run_ranks(1, [](WorldPtr world) {
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    const auto adamw = [&](const AdamWOptions& options) {
      return thrown_by([&] { AdamW optimizer(sharded, options); });
    };
    expect_part(adamw({.lr = -1}), "adamw.lr is -1");
    expect_part(adamw({.beta1 = 1}), "adamw.beta1 is 1");
    expect_part(adamw({.beta2 = -0.5}), "adamw.beta2 is -0.5");
    expect_part(adamw({.eps = 0}), "adamw.eps is 0");
    expect_part(adamw({.weight_decay = -1}), "adamw.weight_decay is -1");
    expect_part(
        thrown_by([&] { Sgd optimizer(sharded, {.nesterov = true}); }), "nesterov needs momentum"
    );
  });
}

TEST(ElementwiseUsageTest, ForeignAndRepeatedTensorsAreRefused) {
  testing::run_ranks(1, [](WorldPtr world) {
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    AdamW foreign(sharded);
    foreign.param_groups()[1].params().push_back(at::ones({3}));
    expect_part(thrown_by([&] { foreign.step(); }), "is no update tensor");
    AdamW repeated(sharded);
    repeated.param_groups()[1].params().push_back(repeated.param_groups()[0].params()[0]);
    expect_part(thrown_by([&] { repeated.step(); }), "in two parameter groups");
    AdamW wrong(sharded);
    sharded.update_tensors().front().mutable_grad() = at::ones({2}, at::kDouble);
    expect_part(thrown_by([&] { wrong.step(); }), "tensor of 2 elements");
    EXPECT_EQ(wrong.num_steps(), 0);
  });
}

TEST(ElementwiseUsageTest, StateIsRestoredByCountsAndTensors) {
  testing::run_ranks(2, [](WorldPtr world) {
    Net first_model;
    const ShardedModel first = fully_shard(*first_model, make_mesh(world), block_units());
    AdamW before(first, {.lr = 0.02});
    EXPECT_TRUE(before.state_tensors().empty());
    for (int step = 0; step < 3; ++step) {
      set_sharded_gradients(first, step);
      before.step();
    }
    Net second_model;
    const ShardedModel second = fully_shard(*second_model, make_mesh(world), block_units());
    AdamW after(second, {.lr = 0.02});
    after.restore_steps(before.num_steps(), before.update_steps());
    const std::vector<StateTensor> source = before.state_tensors();
    const std::vector<StateTensor> target = after.state_tensors();
    ASSERT_EQ(source.size(), target.size());
    for (std::size_t i = 0; i < source.size(); ++i) {
      EXPECT_EQ(source[i].name, target[i].name);
      EXPECT_EQ(target[i].tensor.count_nonzero().item<std::int64_t>(), 0);
      target[i].tensor.copy_(source[i].tensor);
    }
    for (std::size_t i = 0; i < first.update_tensors().size(); ++i) {
      second.update_tensors()[i].copy_(first.update_tensors()[i]);
    }
    for (const auto& [sharded, optimizer] : {std::pair{&first, &before}, {&second, &after}}) {
      sharded->sync_runtime();
      set_sharded_gradients(*sharded, 3);
      optimizer->step();
    }
    for (const std::string& name : first.parameter_names()) {
      EXPECT_TENSORS_EQUAL(first.full_parameter(name), second.full_parameter(name));
    }
    after.set_num_steps(0);
    EXPECT_TRUE(after.state_tensors().empty());
    expect_part(thrown_by([&] { after.set_num_steps(-1); }), "num_steps");
    expect_part(thrown_by([&] { after.restore_steps(1, {1}); }), "a count for each");
  });
}

TEST(ElementwiseUsageTest, TorchArchivesAreRefused) {
  testing::run_ranks(1, [](WorldPtr world) {
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    const AdamW optimizer(sharded);
    torch::serialize::OutputArchive archive;
    try {
      optimizer.save(archive);
      FAIL() << "accepted";
    } catch (const Unsupported& error) {
      expect_part(error.what(), "checkpoint::save");
    }
  });
}

}  // namespace
}  // namespace hypershard::optim::test
