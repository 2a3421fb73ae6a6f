// AdamW and SGD over update tensors equal torch's own optimizers over whole parameters, whatever
// the cut; and what neighbouring systems get wrong: padding, frozen parts, empty slices, wrong
// moments.
#include "hypershard/optim/elementwise_optimizer.h"

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/output-archive.h>

#include "hypershard/core/error.h"
#include "hypershard/optim/adamw.h"
#include "hypershard/optim/sgd.h"
#include "hypershard/shard/engine.h"
#include "hypershard/shard/test_models.h"
#include "hypershard/testing/tensor_matchers.h"

namespace hypershard::optim {
namespace {

using layout::Strategy;
using shard::fully_shard;
using shard::FullyShardOptions;
using shard::ShardedModel;
using shard::UpdatePiece;
using shard::UpdateTensor;
using shard::test::make_inputs;
using shard::test::make_mesh;
using shard::test::Net;
using shard::test::rows_of;

using WorldPtr = std::shared_ptr<comm::World>;
using OptimizerPtr = std::unique_ptr<torch::optim::Optimizer>;
using TorchGroups = std::vector<torch::optim::OptimizerParamGroup>;

FullyShardOptions block_units(Strategy strategy = Strategy::kZero3) {
  FullyShardOptions options;
  options.strategy = strategy;
  options.units = {"blocks.*"};
  return options;
}

std::string thrown_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was thrown";
}

void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

// A gradient that depends on the step, the element and the value itself, so that a wrong update
// shows again in the next step.
at::Tensor gradient_of(const at::Tensor& value, int step) {
  const at::Tensor wave =
      at::arange(value.numel(), at::kDouble).mul(0.31).add(0.7 * step).sin().view(value.sizes());
  return (wave + value.to(at::kDouble) * 0.5).to(value.scalar_type());
}

void set_plain_gradients(torch::nn::Module& module, int step) {
  for (auto& item : module.named_parameters()) {
    item.value().mutable_grad() = gradient_of(item.value().detach(), step);
  }
}

// The same gradients, each rank its pieces. `full` are the values before the step.
void set_sharded_gradients(const ShardedModel& sharded, int step) {
  std::map<std::string, at::Tensor> full;
  for (const std::string& name : sharded.parameter_names()) {
    full[name] = gradient_of(sharded.full_parameter(name), step).reshape({-1});
  }
  for (UpdateTensor& update : sharded.update_parameters()) {
    at::Tensor grad = at::zeros_like(update.tensor);
    for (const UpdatePiece& piece : update.pieces) {
      grad.narrow(0, piece.offset, piece.range.numel())
          .copy_(full[piece.name].narrow(0, piece.range.begin, piece.range.numel()));
    }
    update.tensor.mutable_grad() = grad;
  }
}

struct Rule {
  std::string name;
  std::function<OptimizerPtr(TorchGroups)> make_plain;
  std::function<std::unique_ptr<ShardedOptimizer>(const ShardedModel&)> make_sharded;
};

Rule adamw_rule() {
  return {
      "adamw",
      [](const TorchGroups& groups) -> OptimizerPtr {
        const auto options = torch::optim::AdamWOptions(0.02).betas({0.9, 0.95}).weight_decay(0.1);
        auto optimizer = std::make_unique<torch::optim::AdamW>(groups, options);
        auto& undecayed = optimizer->param_groups()[1].options();
        static_cast<torch::optim::AdamWOptions&>(undecayed).weight_decay(0);
        return optimizer;
      },
      [](const ShardedModel& model) -> std::unique_ptr<ShardedOptimizer> {
        return std::make_unique<AdamW>(model, AdamWOptions{.lr = 0.02});
      }
  };
}

Rule sgd_rule(double momentum, bool nesterov) {
  return {
      "sgd",
      [=](const TorchGroups& groups) -> OptimizerPtr {
        const auto options =
            torch::optim::SGDOptions(0.05).momentum(momentum).nesterov(nesterov).weight_decay(0.2);
        auto optimizer = std::make_unique<torch::optim::SGD>(groups, options);
        auto& undecayed = optimizer->param_groups()[1].options();
        static_cast<torch::optim::SGDOptions&>(undecayed).weight_decay(0);
        return optimizer;
      },
      [=](const ShardedModel& model) -> std::unique_ptr<ShardedOptimizer> {
        return std::make_unique<Sgd>(
            model,
            SgdOptions{.lr = 0.05, .momentum = momentum, .nesterov = nesterov, .weight_decay = 0.2}
        );
      }
  };
}

std::vector<Rule> all_rules() {
  return {adamw_rule(), sgd_rule(0, false), sgd_rule(0.9, false), sgd_rule(0.9, true)};
}

TorchGroups plain_groups(torch::nn::Module& module) {
  std::vector<at::Tensor> matrices;
  std::vector<at::Tensor> vectors;
  for (const auto& item : module.named_parameters()) {
    (item.value().dim() >= 2 ? matrices : vectors).push_back(item.value());
  }
  TorchGroups groups;
  groups.emplace_back(matrices);
  groups.emplace_back(vectors);
  return groups;
}

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

TEST(ElementwiseOptimizerTest, StepBetweenForwardAndBackwardIsRefused) {
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

TEST(ElementwiseOptimizerTest, ClosureRunsWithGradientsBeforeTheUpdate) {
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

TEST(ElementwiseOptimizerTest, ClosureGivesTheSameUpdateAsTorch) {
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
TEST(ElementwiseOptimizerTest, UnfrozenParametersCountTheirOwnSteps) {
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
TEST(ElementwiseOptimizerTest, EmptySlicesStepAndCount) {
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
TEST(ElementwiseOptimizerTest, NanAndInfinityPassThroughAsInTorch) {
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

TEST(ElementwiseOptimizerTest, OptionsOutOfRangeAreRefusedByName) {
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

TEST(ElementwiseOptimizerTest, ForeignAndRepeatedTensorsAreRefused) {
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

TEST(ElementwiseOptimizerTest, StateIsRestoredByCountsAndTensors) {
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

TEST(ElementwiseOptimizerTest, TorchArchivesAreRefused) {
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
}  // namespace hypershard::optim
