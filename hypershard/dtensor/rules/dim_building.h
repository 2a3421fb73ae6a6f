// The few moves that most rules are made of: label dimensions, broadcast, drop, keep whole.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "hypershard/core/text.h"
#include "hypershard/dtensor/dim_map.h"
#include "hypershard/dtensor/rule_call.h"

namespace hypershard::dtensor::rules {

inline std::size_t at(int index) {
  return static_cast<std::size_t>(index);
}

inline constexpr Passes kMoves = {.sum = true, .max = true, .min = true};
inline constexpr Passes kMonotone = {.sum = false, .max = true, .min = true};

/// A map whose operands are whole in every dimension and whose outputs are open.
DimMap whole_map(const RuleCall& call);

/// Gives a new label to one dimension of an operand and returns it as an output's dimension.
Dim label_dim(DimMap& map, int operand, int dim, Reduction reduction = Reduction::kRefused);

/// Gives new labels to all dimensions of an operand but those in `whole`; returns dimensions for an
/// output of the same shape.
Dims label_all(DimMap& map, const RuleCall& call, int operand, std::span<const int> whole = {});

/// Lets dimension `dim` of `operand` run over the same index as `like`, if its size is the index's;
/// a dimension of size 1 that is stretched stays whole.
void share_dim(DimMap& map, int operand, int dim, const Dim& like);

/// Returns the global size of a dimension of an output, from the operands that have its label.
std::int64_t global_size(const DimMap& map, const RuleCall& call, const Dim& dim);

/// Labels operands that broadcast against each other, aligned at their last dimensions; returns the
/// broadcast dimensions. Sets `map.refusal` if global shapes do not broadcast.
/// Operands of -1 are skipped. `skip` last dimensions of each operand are left alone.
Dims broadcast(DimMap& map, const RuleCall& call, std::span<const int> operands, int skip = 0);

/// Tells whether `dim` is among `dims`.
bool contains(std::span<const int> dims, int dim);

/// Linear terms by argument names, read once: "self|tensor1*tensor2" is `self + tensor1 * tensor2`.
class Terms {
 public:
  Terms() = default;
  explicit Terms(std::string_view text);

  /// Adds the terms to a map. An argument that is a number is a factor or, alone, a constant: a
  /// term of no operands unless it is zero. Lists of tensors give one term an entry.
  void apply(DimMap& map, const RuleCall& call) const;

 private:
  std::vector<std::vector<std::string>> terms_;
};

/// Sets the terms of one operand that the operator only moves (or drops).
void moves(DimMap& map, int operand);
/// The same for a linear operator.
void linear(DimMap& map, int operand);

/// A rule whose only output has the first operand's shape, all its dimensions free.
DimMap same_shape(const RuleCall& call);

/// Tells whether a call's `dtype` argument, if any, and the operand's own keep real values, so that
/// the cast is linear.
bool casts_linearly(const RuleCall& call, int operand);

}  // namespace hypershard::dtensor::rules
