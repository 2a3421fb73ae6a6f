// Losses: entry by entry or class by class, then reduced: a cut index leaves Partial(sum) or, for
// pieces of equal size, Partial(avg).
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "hypershard/dtensor/rules/dim_building.h"
#include "hypershard/dtensor/rules/families.h"

namespace hypershard::dtensor::rules {
namespace {

constexpr std::int64_t kNoReduction = 0;
constexpr std::int64_t kMeanReduction = 1;

void set_reductions(DimMap& map, const RuleCall& call, const Dims& dims) {
  const bool is_mean = call.integer("reduction") == kMeanReduction;
  for (const Dim& dim : dims) {
    if (dim.label != Dim::kWhole) {
      map.reductions[at(dim.label)] = is_mean ? Reduction::kMean : Reduction::kSum;
    }
  }
}

DimMap entrywise(const RuleCall& call) {
  DimMap map = whole_map(call);
  std::vector<int> all;
  for (int i = 0; i < call.num_operands(); ++i) {
    all.push_back(i);
  }
  Dims dims = broadcast(map, call, all);
  if (call.integer("reduction") == kNoReduction) {
    map.outputs = {{std::move(dims)}};
  } else {
    set_reductions(map, call, dims);
    map.outputs = {{{}}};
  }
  return map;
}

/// Scores [N, C, ...] or [C] against class numbers [N, ...] or probabilities of the scores' shape.
/// A mean with class weights divides by the weights met, which differs between pieces.
DimMap classwise(const RuleCall& call, bool tells_weight) {
  DimMap map = whole_map(call);
  const int self = 0;
  const int target = call.operand("target");
  const int channel = call.rank(self) > 1 ? 1 : 0;
  const bool has_probabilities = call.shape(self) == call.shape(target) &&
                                 at::isFloatingType(call.tensor(target).scalar_type());
  Dims dims;
  for (int dim = 0; dim < call.rank(self); ++dim) {
    if (dim == channel) {
      continue;
    }
    dims.push_back(label_dim(map, self, dim));
    share_dim(map, target, has_probabilities || dim < channel ? dim : dim - 1, dims.back());
  }
  const bool is_weighted_mean =
      call.has("weight") && call.integer("reduction") == kMeanReduction && !has_probabilities;
  if (call.integer("reduction") == kNoReduction) {
    map.outputs = {{std::move(dims)}};
  } else {
    if (!is_weighted_mean) {
      set_reductions(map, call, dims);
    }
    map.outputs = {{{}}};
  }
  if (tells_weight) {  // the sum of the targets' weights, whatever the reduction; 0 for none
    if (call.integer("reduction") == kMeanReduction) {
      map.reductions.assign(map.reductions.size(), Reduction::kRefused);
    }
    map.outputs.push_back({{}});
    if (call.integer("reduction") == kNoReduction) {
      map.outputs.back().from = {self};
      map.reductions.assign(map.reductions.size(), Reduction::kSum);
    }
  }
  return map;
}

}  // namespace

void add_losses(internal::RuleRegistry& registry) {
  const auto add = [&](const char* name, OpRule rule) {
    registry.add(std::string("aten::") + name, "losses", std::move(rule));
  };
  for (const char* name :
       {"mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "kl_div",
        "soft_margin_loss",
        "hinge_embedding_loss",
        "poisson_nll_loss"}) {
    add(name, entrywise);
  }
  for (const char* name : {"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"}) {
    add(name, [](const RuleCall& call) { return classwise(call, false); });
  }
  for (const char* name : {"nll_loss_forward", "nll_loss2d_forward"}) {
    add(name, [](const RuleCall& call) { return classwise(call, true); });
  }
}

}  // namespace hypershard::dtensor::rules
