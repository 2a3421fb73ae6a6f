// Why: every test of saving and loading trains a little before and after; the model, the optimizer
// and the loop are the same in all of them. Tests only; not installed.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "hypershard/checkpoint/checkpoint.h"
#include "hypershard/optim/adamw.h"
#include "hypershard/optim/sgd.h"
#include "hypershard/shard/engine.h"
#include "hypershard/shard/test_models.h"

namespace hypershard::checkpoint::test {

using WorldPtr = std::shared_ptr<comm::World>;

/// A net with odd sizes: a vocabulary of 7, a scalar, a matrix of one row, an empty parameter, a
/// tied head and one unit for each block.
struct OddNetImpl : nn::Hookable<OddNetImpl, at::Tensor(at::Tensor), torch::nn::Module> {
  explicit OddNetImpl(double scale = 1, bool tied = true) {
    embed = register_parameter("embed", at::zeros({7, 6}, at::kDouble));
    for (int i = 0; i < 2; ++i) {
      blocks->push_back(shard::test::Block(6, 5));
    }
    register_module("blocks", blocks);
    head = register_parameter("head", tied ? embed : at::zeros({7, 6}, at::kDouble));
    row = register_parameter("row", at::zeros({1, 6}, at::kDouble));
    scalar = register_parameter("scalar", at::zeros({}, at::kDouble));
    none = register_parameter("none", at::zeros({0, 3}, at::kDouble));
    to(at::kDouble);
    shard::test::fill_by_formula(*this);
    const at::NoGradGuard no_grad;
    for (auto& item : named_parameters()) {
      if (item.key() != "head" || !tied) {
        item.value().mul_(scale);
      }
    }
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    at::Tensor h = x.matmul(embed) + row;
    for (std::size_t i = 0; i < blocks->size(); ++i) {
      h = blocks[i]->as<shard::test::BlockImpl>()->forward(h);
    }
    return h.matmul(head.t()) * scalar + none.sum();
  }
  using torch::nn::Module::to;
  at::Tensor embed;
  torch::nn::ModuleList blocks;
  at::Tensor head, row, scalar, none;
};
TORCH_MODULE(OddNet);

/// How a run is cut and what it computes in.
struct Setup {
  int ranks = 1;
  int replicate = 1;
  layout::Strategy strategy = layout::Strategy::kZero3;
  bool frozen = false;  ///< blocks.0 does not train
  bool bf16 = false;    ///< runtime parameters
  bool sgd = false;
  bool other_values = false;  ///< start from other values, as a run that is to be resumed
};

inline std::string to_text(const Setup& setup) {
  return layout::to_text(setup.strategy) + " on " + std::to_string(setup.ranks) + "/" +
         std::to_string(setup.replicate);
}

/// One rank's model, optimizer and mesh.
struct Run {
  Run(WorldPtr world, const Setup& given)
      : setup(given),
        model(given.other_values ? -3.0 : 1.0),
        mesh(shard::test::make_mesh(std::move(world), given.replicate)) {
    if (setup.bf16) {
      model->to(at::kFloat);
    }
    if (setup.frozen) {
      for (auto& parameter : model->blocks[0]->parameters()) {
        parameter.set_requires_grad(false);
      }
    }
    shard::FullyShardOptions options;
    options.strategy = setup.strategy;
    options.units = {"blocks.*"};
    if (setup.bf16) {
      options.precision.compute = at::kBFloat16;
      options.precision.output = at::kFloat;
    }
    sharded = std::make_unique<shard::ShardedModel>(shard::fully_shard(*model, mesh, options));
    if (setup.sgd) {
      optimizer = std::make_unique<optim::Sgd>(
          *sharded, optim::SgdOptions{.lr = 0.01, .momentum = 0.9, .weight_decay = 0.1}
      );
    } else {
      optimizer = std::make_unique<optim::AdamW>(*sharded, optim::AdamWOptions{.lr = 0.01});
    }
  }

  /// Trains on steps [first, last) and returns the losses of this rank.
  std::vector<double> train(int first, int last) {
    std::vector<double> losses;
    const at::ScalarType dtype = setup.bf16 ? at::kFloat : at::kDouble;
    for (int step = first; step < last; ++step) {
      optimizer->zero_grad();
      const at::Tensor batch = shard::test::make_inputs(12, 7, step, dtype);
      const at::Tensor loss =
          shard::test::loss_of(model->forward(shard::test::rows_of(batch, mesh.rank(), setup.ranks))
          );
      losses.push_back(loss.item<double>());
      loss.backward();
      optimizer->step();
    }
    return losses;
  }

  std::string save_to(const std::string& directory, std::int64_t step) {
    return save(
        directory,
        *sharded,
        optimizer.get(),
        {.step = step, .seed = 17, .config_toml = "a = 1\n"},
        mesh
    );
  }
  TrainState load_from(const std::string& path) {
    return load(path, *sharded, optimizer.get(), mesh);
  }

  Setup setup;
  OddNet model;
  comm::ProcessMesh mesh;
  std::unique_ptr<shard::ShardedModel> sharded;
  std::unique_ptr<optim::ShardedOptimizer> optimizer;
};

/// Runs `body` with a Run on every rank.
template <class Body>
void on_ranks(const Setup& setup, const Body& body, testing::RunRanksOptions options = {}) {
  testing::run_ranks(
      setup.ranks,
      [&](WorldPtr world) {
        Run run(std::move(world), setup);
        body(run);
      },
      options
  );
}

inline std::map<std::string, at::Tensor> by_name(const std::vector<NamedTensor>& tensors) {
  std::map<std::string, at::Tensor> result;
  for (const NamedTensor& each : tensors) {
    result[each.name] = each.tensor;
  }
  return result;
}

}  // namespace hypershard::checkpoint::test
