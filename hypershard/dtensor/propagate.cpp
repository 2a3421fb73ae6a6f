// From a dimension map to a verdict: global shapes, layouts axis by axis, cuts that must align.
#include <algorithm>
#include <map>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>

#include "hypershard/core/error.h"
#include "hypershard/dtensor/internal/axis_rule.h"
#include "hypershard/dtensor/internal/rule_registry.h"
#include "hypershard/dtensor/op_rules.h"
#include "hypershard/dtensor/rule_call.h"
#include "hypershard/layout/sharding.h"

namespace hypershard::dtensor {
namespace {

using internal::AxisOutcome;
using internal::AxisRule;
using layout::Layout;
using layout::TensorSpec;

/// One derivation; the steps are called in order and stop at the first refusal.
class Derivation {
 public:
  Derivation(const RuleCall& call, const DimMap& map, const layout::DeviceMesh& mesh)
      : call_(call), map_(map), mesh_(mesh), label_sizes_(map.reductions.size(), -1) {}

  Verdict run() {
    check_map();
    if (size_labels() && derive_axes() && check_cuts()) {
      make_outputs();
      check_written();
    }
    if (verdict_.refusal) {
      verdict_.refusal->what = concat_text(call_.name(), ": ", verdict_.refusal->what);
      verdict_.outputs.clear();
    }
    return std::move(verdict_);
  }

 private:
  bool refuse_call(std::string what, std::string fix) {
    verdict_.refusal = Refusal{std::move(what), std::move(fix)};
    return false;
  }

  void check_map() const {
    HS_CHECK_EQ(
        map_.operands.size(),
        static_cast<std::size_t>(call_.num_operands()),
        "dtensor.rules: the rule of ",
        call_.name(),
        " describes another number of operands"
    );
    for (int i = 0; i < call_.num_operands(); ++i) {
      HS_CHECK_EQ(
          map_.operands[static_cast<std::size_t>(i)].dims.size(),
          call_.shape(i).size(),
          "dtensor.rules: the rule of ",
          call_.name(),
          " describes another number of dimensions of '",
          call_.operand_name(i),
          "'"
      );
    }
  }

  bool size_labels() {
    for (int i = 0; i < call_.num_operands(); ++i) {
      const Dims& dims = map_.operands[static_cast<std::size_t>(i)].dims;
      for (std::size_t d = 0; d < dims.size(); ++d) {
        if (dims[d].label != Dim::kWhole && !size_label(i, d, dims[d])) {
          return false;
        }
      }
    }
    return true;
  }

  bool size_label(int operand, std::size_t d, const Dim& dim) {
    const std::int64_t extent = call_.shape(operand)[d];
    std::int64_t& size = label_sizes_[static_cast<std::size_t>(dim.label)];
    const bool is_fit = dim.block > 0 && extent % dim.block == 0;
    if (!is_fit || (size >= 0 && size != extent / dim.block)) {
      return refuse_call(
          concat_text(
              "dimension ",
              d,
              " of '",
              call_.operand_name(operand),
              "' ",
              call_.shape(operand),
              " (global shape) does not fit the other operands: expected ",
              std::max<std::int64_t>(size, 0),
              " blocks of ",
              dim.block,
              ", found ",
              extent
          ),
          "a layout is not what it seems: local shapes fit, global ones do not; redistribute the "
          "operands to layouts that cut the same dimension"
      );
    }
    size = extent / dim.block;
    return true;
  }

  bool derive_axes() {
    for (int axis = 0; axis < mesh_.num_axes(); ++axis) {
      AxisOutcome outcome = AxisRule(call_, map_, mesh_, axis).derive();
      if (outcome.refusal && mesh_.axes()[static_cast<std::size_t>(axis)].size == 1) {
        outcome = {};  // pieces and terms are the whole: nothing can be wrong
        outcome.outputs.assign(map_.outputs.size(), layout::Placement::replicate());
      }
      if (outcome.refusal) {
        verdict_.refusal = std::move(outcome.refusal);
        return false;
      }
      axes_.push_back(std::move(outcome));
    }
    return true;
  }

  /// Lists the axes that cut a label, outermost first. False if operands disagree on the order.
  bool order_cuts(int label, std::vector<int>& order) {
    int first = -1;
    for (int i = 0; i < call_.num_operands(); ++i) {
      const OperandMap& operand = map_.operands[static_cast<std::size_t>(i)];
      const int dim = internal::find_label(operand.dims, label);
      if (dim < 0 || operand.role == Role::kIgnored) {
        continue;
      }
      std::vector<int> cuts = call_.spec(i).layout.cut_axes(dim);
      std::erase_if(cuts, [&](int axis) {
        return axes_[static_cast<std::size_t>(axis)].label != label;
      });
      if (first >= 0 && cuts != order) {
        return refuse_call(
            concat_text(
                "'",
                call_.operand_name(first),
                "' and '",
                call_.operand_name(i),
                "' are cut along one index in different orders of axes: ",
                to_text(call_.spec(first).layout, mesh_),
                " against ",
                to_text(call_.spec(i).layout, mesh_)
            ),
            concat_text("redistribute '", call_.operand_name(i), "' to the other one's order")
        );
      }
      first = first < 0 ? i : first;
      order = std::move(cuts);
    }
    return true;
  }

  bool check_cuts() {
    for (const AxisOutcome& axis : axes_) {
      if (axis.label == Dim::kWhole || orders_.contains(axis.label)) {
        continue;
      }
      if (!order_cuts(axis.label, orders_[axis.label]) || !check_pieces(axis.label)) {
        return false;
      }
    }
    return true;
  }

  bool has_uneven_blocks(int label) const {
    std::int64_t block = -1;
    bool is_uneven = false;
    const auto compare = [&](const Dims& dims) {
      const int at = internal::find_label(dims, label);
      if (at >= 0) {
        const std::int64_t found = dims[static_cast<std::size_t>(at)].block;
        is_uneven = is_uneven || (block >= 0 && found != block);
        block = found;
      }
    };
    for (const OperandMap& operand : map_.operands) {
      compare(operand.dims);
    }
    for (const OutputMap& output : map_.outputs) {
      compare(output.dims);
    }
    return is_uneven;
  }

  bool is_reduced(int label) const {
    return std::any_of(map_.outputs.begin(), map_.outputs.end(), [label](const OutputMap& output) {
      return output.is_defined && internal::find_label(output.dims, label) < 0;
    });
  }

  /// What all cuts of one index need together.
  bool check_pieces(int label) {
    std::int64_t num_pieces = 1;
    for (const int axis : orders_[label]) {
      num_pieces *= mesh_.axes()[static_cast<std::size_t>(axis)].size;
    }
    const std::int64_t size = label_sizes_[static_cast<std::size_t>(label)];
    const Reduction reduction = map_.reductions[static_cast<std::size_t>(label)];
    const std::string cut = concat_text(cut_text(label), " into ", num_pieces, " pieces");
    if (size % num_pieces != 0 && has_uneven_blocks(label)) {
      return refuse_call(
          concat_text(
              cut,
              ": they do not hold whole blocks of the dimensions that are split or "
              "merged (",
              size,
              " blocks)"
          ),
          "make the number of blocks a multiple of the pieces, or redistribute to Replicate"
      );
    }
    if (reduction == Reduction::kMean && is_reduced(label) && size % num_pieces != 0) {
      return refuse_call(
          concat_text(cut, " of unequal size: the mean of their means is not the mean"),
          "make the size a multiple of the pieces, or sum and divide by the global size"
      );
    }
    if (!map_.takes_empty && size < num_pieces && size > 0) {
      return refuse_call(
          concat_text(cut, ", some empty: the operator takes no empty tensors"),
          "redistribute to Replicate"
      );
    }
    const bool needs_entries = reduction == Reduction::kMax || reduction == Reduction::kMin;
    if (needs_entries && is_reduced(label) && size < num_pieces) {
      return refuse_call(
          concat_text(cut, ", some empty: they have no maximum or minimum"),
          "redistribute to Replicate"
      );
    }
    return true;
  }

  std::string cut_text(int label) const {
    for (int i = 0; i < call_.num_operands(); ++i) {
      const int dim = internal::find_label(map_.operands[static_cast<std::size_t>(i)].dims, label);
      if (dim >= 0) {
        return concat_text(
            "dimension ",
            dim,
            " of '",
            call_.operand_name(i),
            "' ",
            call_.shape(i),
            " (",
            to_text(call_.spec(i).layout, mesh_),
            ") is cut"
        );
      }
    }
    return "a dimension is cut";
  }

  void make_outputs() {
    verdict_.is_random = map_.is_random;
    for (std::size_t i = 0; i < map_.outputs.size(); ++i) {
      TensorSpec spec;
      if (map_.outputs[i].is_defined) {
        for (const Dim& dim : map_.outputs[i].dims) {
          spec.shape.push_back(output_size(dim));
          add_order(dim, spec.layout);
        }
        for (const AxisOutcome& axis : axes_) {
          spec.layout.placements.push_back(axis.outputs[i]);
        }
      }
      verdict_.outputs.push_back(std::move(spec));
    }
  }

  std::int64_t output_size(const Dim& dim) const {
    const std::int64_t size = dim.label == Dim::kWhole
                                  ? dim.size
                                  : label_sizes_[static_cast<std::size_t>(dim.label)] * dim.block;
    HS_CHECK_GE(size, 0, "dtensor.rules: the rule of ", call_.name(), " leaves a size open");
    return size;
  }

  void add_order(const Dim& dim, Layout& layout) const {
    const auto order = orders_.find(dim.label);
    if (order != orders_.end() && !std::is_sorted(order->second.begin(), order->second.end())) {
      layout.cut_order.insert(layout.cut_order.end(), order->second.begin(), order->second.end());
    }
  }

  /// A written tensor keeps its layout: nothing tells its other users that it changed.
  void check_written() {
    const auto& written = call_.written();
    const auto& returns = call_.op().schema().returns();
    const auto num_outputs = verdict_.outputs.size();
    std::size_t next = 0;
    for (std::size_t i = 0; i < num_outputs && next < written.size(); ++i) {
      const bool is_write = returns.size() != num_outputs || returns[i].alias_info() == nullptr
                                ? returns.empty()
                                : returns[i].alias_info()->isWrite();
      if (is_write && !(*written[next].spec == verdict_.outputs[i])) {
        const TensorSpec& found = *written[next].spec;
        refuse_call(
            concat_text(
                "'",
                written[next].name,
                "' ",
                found.shape,
                " (",
                to_text(found.layout, mesh_),
                ") is written, but the result is ",
                verdict_.outputs[i].shape,
                " (",
                to_text(verdict_.outputs[i].layout, mesh_),
                ")"
            ),
            "a written tensor keeps its layout: use the functional form, or redistribute before"
        );
        return;
      }
      next += is_write ? 1 : 0;
    }
    if (returns.empty()) {
      verdict_.outputs.clear();
    }
  }

  const RuleCall& call_;
  const DimMap& map_;
  const layout::DeviceMesh& mesh_;
  std::vector<std::int64_t> label_sizes_;
  std::vector<AxisOutcome> axes_;
  std::map<int, std::vector<int>> orders_;  ///< label -> axes that cut it, outermost first
  Verdict verdict_;
};

}  // namespace

Verdict propagate(const OpCall& call, const layout::DeviceMesh& mesh) {
  for (const TensorSpec& spec : call.operands) {
    layout::check_spec(spec, mesh);
  }
  const RuleCall view(call, mesh);
  Verdict verdict;
  const OpRule* rule = internal::RuleRegistry::global().find(view.name());
  if (rule == nullptr) {
    verdict.refusal = Refusal{
        concat_text(view.name(), " has no layout rule"),
        concat_text(
            "state how its dimensions correspond: register_op_rule(\"",
            view.name(),
            "\", rule), or use operators that have rules"
        )
    };
    return verdict;
  }
  const DimMap map = (*rule)(view);
  if (map.refusal) {
    verdict.refusal = map.refusal;
    verdict.refusal->what = concat_text(view.name(), ": ", map.refusal->what);
    return verdict;
  }
  return Derivation(view, map, mesh).run();
}

}  // namespace hypershard::dtensor
