// The report of a resolved plan.
#include "hypershard/plan/resolved_plan.h"

#include <algorithm>

#include "hypershard/core/text.h"

namespace hypershard::plan {

namespace {

std::string flow_text(
    const char* direction, const BoundaryFlow& flow, const layout::DeviceMesh& mesh
) {
  std::string text = concat_text(
      "    ",
      direction,
      "  {",
      layout::to_text(flow.arriving, mesh),
      "} -> {",
      layout::to_text(flow.leaving, mesh),
      "}  "
  );
  if (flow.steps.empty()) {
    return text + "nothing to do\n";
  }
  for (std::size_t i = 0; i < flow.steps.size(); ++i) {
    text += (i == 0 ? "" : ", ") + layout::to_text(flow.steps[i], mesh);
  }
  return text +
         concat_text("  sends ", flow.sent_bytes, " B, receives ", flow.received_bytes, " B\n");
}

std::string boundary_text(const ResolvedBoundary& boundary, const layout::DeviceMesh& mesh) {
  std::string text = "  " + to_text(boundary.site);
  if (boundary.crossings == 0) {
    return text + "  (not reached by the run that was resolved)\n";
  }
  text += concat_text("  ", boundary.dtype, " ", boundary.shape);
  if (boundary.crossings > 1) {
    text += concat_text(", ", boundary.crossings, " times");
  }
  text += "\n" + flow_text("forward ", boundary.forward, mesh);
  if (boundary.backward.has_value()) {
    text += flow_text("backward", *boundary.backward, mesh);
  }
  return text;
}

bool is_ordinary(const ResolvedParameter& parameter) {
  const auto& placements = parameter.spec.layout.placements;
  return parameter.reduce_axes.empty() &&
         std::all_of(placements.begin(), placements.end(), [](const layout::Placement& placement) {
           return placement.kind == layout::Placement::Kind::kReplicate;
         });
}

std::string parameter_text(const ResolvedParameter& parameter, const layout::DeviceMesh& mesh) {
  std::string text = concat_text(
      "  ",
      parameter.name,
      " ",
      parameter.spec.shape,
      "  {",
      layout::to_text(parameter.spec.layout, mesh),
      "}"
  );
  if (!parameter.reduce_axes.empty()) {
    text += concat_text("  gradient all-reduced over ", parameter.reduce_axes);
  }
  return text + "\n";
}

}  // namespace

bool ResolvedPlan::is_data_axis(std::string_view axis) const {
  return std::find(data_axes.begin(), data_axes.end(), axis) != data_axes.end();
}

const ResolvedParameter* ResolvedPlan::find_parameter(const std::string& name) const {
  for (const ResolvedParameter& parameter : parameters) {
    if (parameter.name == name ||
        std::find(parameter.aliases.begin(), parameter.aliases.end(), name) !=
            parameter.aliases.end()) {
      return &parameter;
    }
  }
  return nullptr;
}

std::string to_text(const ResolvedPlan& plan, const layout::DeviceMesh& mesh) {
  std::string text = concat_text("boundaries on mesh ", mesh, "\n");
  for (const ResolvedBoundary& boundary : plan.boundaries) {
    text += boundary_text(boundary, mesh);
  }
  std::string special;
  std::size_t num_ordinary = 0;
  for (const ResolvedParameter& parameter : plan.parameters) {
    if (is_ordinary(parameter)) {
      ++num_ordinary;
    } else {
      special += parameter_text(parameter, mesh);
    }
  }
  text += concat_text(
      "parameters\n",
      special,
      "  ",
      num_ordinary,
      num_ordinary == 1 ? " other" : " others",
      ", replicated\n"
  );
  if (!plan.problems.empty()) {
    text += "problems\n";
    for (const LayoutFault& problem : plan.problems) {
      text += concat_text("  ", to_text(problem), "\n    hint: ", problem.fix, "\n");
    }
  }
  return text;
}

}  // namespace hypershard::plan
