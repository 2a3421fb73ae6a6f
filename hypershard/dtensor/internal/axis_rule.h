// Derives the placements of a call's outputs on one mesh axis from its dimension map.
// Every axis is judged alone; what several cuts of one dimension need together is judged after.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "hypershard/dtensor/dim_map.h"
#include "hypershard/dtensor/rule_call.h"
#include "hypershard/layout/mesh.h"

namespace hypershard::dtensor::internal {

/// What one axis does to a call: the outputs' placements, and the label that it cuts.
struct AxisOutcome {
  std::vector<layout::Placement> outputs;
  int label = Dim::kWhole;
  std::optional<Refusal> refusal;
};

/// Judges one axis of a mesh for one call.
class AxisRule {
 public:
  AxisRule(const RuleCall& call, const DimMap& map, const layout::DeviceMesh& mesh, int axis)
      : call_(call), map_(map), mesh_(mesh), axis_(axis) {}

  AxisOutcome derive() const;

 private:
  AxisOutcome through_partial(int partial) const;
  AxisOutcome along_label(int cut) const;
  std::optional<Refusal> check_partial(int partial) const;
  std::optional<Refusal> check_terms(layout::Placement::Reduce reduce) const;
  std::optional<Refusal> check_follows(int cut, int label, int operand) const;
  std::optional<Refusal> check_terms_have(int cut, int label) const;
  bool depends_on(const OutputMap& output, int label) const;
  layout::Placement placement(int operand) const;
  bool is_partial(int operand) const;

  /// Writes `'mat2' [512, 128] is Shard(0)`.
  std::string operand_text(int operand) const;
  std::string on_axis() const;
  AxisOutcome refused(std::string what, std::string fix) const;

  const RuleCall& call_;
  const DimMap& map_;
  const layout::DeviceMesh& mesh_;
  int axis_;
};

/// Returns the dimension with `label`, or -1; -2 if there are several.
int find_label(const Dims& dims, int label);

}  // namespace hypershard::dtensor::internal
