// What tests of two tiers share: ranks in supernodes, what crosses between these, and training
// beside the unsharded model.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/optim/sgd.h>

#include "hypershard/core/error.h"
#include "hypershard/layout/bucket.h"
#include "hypershard/shard/engine.h"
#include "hypershard/shard/test_models.h"

namespace hypershard::shard::test {

/// A mesh of so many ranks in so many supernodes.
struct Tiers {
  int num_ranks = 4;
  int num_supernodes = 2;
};
inline std::string to_text(const Tiers& tiers) {
  return std::to_string(tiers.num_supernodes) + "x" +
         std::to_string(tiers.num_ranks / tiers.num_supernodes);
}

inline constexpr layout::Strategy kAllStrategies[] = {
    layout::Strategy::kDdp,
    layout::Strategy::kZero1,
    layout::Strategy::kZero2,
    layout::Strategy::kZero3,
    layout::Strategy::kHsdp,
    layout::Strategy::kHierarchical,
};

inline constexpr Tiers kMeshes[] = {{2, 2}, {2, 1}, {4, 2}, {4, 1}, {4, 4}};

/// More than one block of Net or OddNet and less than all of them fill a bucket, on 2x1, 2x2 and
/// 4x1, in fp64; half of it in fp32.
inline constexpr std::int64_t kSomeUnits = 1500;

/// Inside one supernode there is no link, and so no bucket.
inline std::vector<std::int64_t> bucket_sizes(const Tiers& tiers) {
  if (tiers.num_supernodes == 1) {
    return {layout::kBucketOfOne};
  }
  return {layout::kBucketOfOne, kSomeUnits, layout::kBucketOfAll};
}

inline std::vector<std::string> supernodes_of(const Tiers& tiers) {
  std::vector<std::string> labels;
  for (int rank = 0; rank < tiers.num_ranks; ++rank) {
    labels.push_back("supernode " + std::to_string(rank * tiers.num_supernodes / tiers.num_ranks));
  }
  return labels;
}

inline testing::RunRanksOptions run_options(const Tiers& tiers, testing::RankBackend backend) {
  return {.backend = backend, .supernodes = supernodes_of(tiers)};
}

inline FullyShardOptions tier_options(
    layout::Strategy strategy, std::int64_t bucket_bytes = layout::kBucketOfOne
) {
  FullyShardOptions options = block_units();
  options.strategy = strategy;
  options.bucket_bytes = bucket_bytes;
  return options;
}

/// Returns a data axis, `replicate` lies between supernodes.
inline const DataAxis& axis_of(const ShardedModel& sharded, const std::string& name) {
  const DataParallel& parallel = sharded.engine().parallel();
  for (const auto* axes : {&parallel.cuts, &parallel.summed}) {
    for (const DataAxis& axis : *axes) {
      if (axis.name == name) {
        return axis;
      }
    }
  }
  HS_FAIL(InternalError, "the mesh has no data axis '", name, "'");
}

/// Sums over the axis between supernodes.
inline std::int64_t sent_between(const ShardedModel& sharded) {
  const DataAxis& axis = axis_of(sharded, "replicate");
  return axis.gather->stats().sent_bytes + axis.reduce->stats().sent_bytes;
}

inline comm::CollectiveLog& log_between(const ShardedModel& sharded) {
  return axis_of(sharded, "replicate").reduce->log();
}

inline int num_buckets(const ShardedModel& sharded) {
  std::set<std::string> names;
  for (const auto& unit : sharded.engine().units()) {
    names.insert(sharded.engine().buckets().name_of(unit->index()));
  }
  return static_cast<int>(names.size());
}

/// Gradients of the trainable parameters of the unsharded model by logical name.
inline std::map<std::string, at::Tensor> trainable_gradients(
    const std::function<at::Tensor()>& loss, torch::nn::Module& model
) {
  std::map<std::string, at::Tensor> gradients = reference_gradients(loss, model);
  for (const auto& item : model.named_parameters()) {
    if (!item.value().requires_grad()) {
      gradients.erase(item.key());
    }
  }
  return gradients;
}

/// Each tensor once: torch lists a tied one under all its names.
inline std::vector<at::Tensor> parameters_once(const torch::nn::Module& model) {
  std::vector<at::Tensor> found;
  for (const at::Tensor& parameter : model.parameters()) {
    const auto is_same = [&](const at::Tensor& other) { return other.is_same(parameter); };
    if (std::none_of(found.begin(), found.end(), is_same)) {
      found.push_back(parameter);
    }
  }
  return found;
}

/// The mean over all ranks. Collective: all ranks.
inline double mean_over(comm::World& world, const at::Tensor& loss) {
  const at::Tensor total = loss.detach().to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  world.world_communicator()->all_reduce(total.view({1}))->wait_released();
  return total.item<double>() / world.size();
}

/// Trains a model for some steps, sharded and alone, and expects equal losses, gradients and
/// parameters: losses up to `bound` of themselves, the others up to `bound`, in fp32 up to `bound`
/// of the largest element. Collective: all ranks.
template <class Holder>
void expect_same_training(
    const std::shared_ptr<comm::World>& world,
    const comm::ProcessMesh& mesh,
    const FullyShardOptions& options,
    int num_steps,
    double bound,
    const std::string& what,
    at::ScalarType dtype = at::kDouble
) {
  Holder oracle;
  Holder model;
  oracle->to(dtype);
  model->to(dtype);
  const auto deviation = dtype == at::kDouble ? Deviation::kAbsolute : Deviation::kRelative;
  const ShardedModel sharded = fully_shard(*model, mesh, options);
  // With longer steps gradients nearly vanish, and how weights are rounded shows in what is left.
  constexpr double kRate = 0.01;
  torch::optim::SGD plain(parameters_once(*oracle), torch::optim::SGDOptions(kRate));
  torch::optim::SGD optimizer(sharded.update_tensors(), torch::optim::SGDOptions(kRate));
  for (int step = 0; step < num_steps; ++step) {
    const at::Tensor batch = make_inputs(8, 5, step, dtype);
    at::Tensor wanted;
    const auto expected =
        trainable_gradients([&] { return wanted = loss_of(oracle->forward(batch)); }, *oracle);
    optimizer.zero_grad();
    const at::Tensor loss = loss_of(model->forward(rows_of(batch, world->rank(), world->size())));
    loss.backward();
    const double wanted_loss = wanted.item<double>();
    EXPECT_NEAR(mean_over(*world, loss), wanted_loss, bound * std::abs(wanted_loss))
        << what << ", step " << step;
    EXPECT_LE(worst_gradient(sharded, expected, deviation), bound) << what << ", step " << step;
    plain.step();
    optimizer.step();
  }
  for (const auto& item : oracle->named_parameters()) {
    const at::Tensor& wanted = item.value();
    const double scale = dtype == at::kDouble ? 1 : wanted.abs().max().item<double>();
    EXPECT_LE(largest_difference(sharded.full_parameter(item.key()), wanted), bound * scale)
        << what << ", " << item.key();
  }
}

}  // namespace hypershard::shard::test
