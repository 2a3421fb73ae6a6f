// The law of one axis: cut indices stay cut or are reduced, Partial passes through linear terms.
#include "hypershard/dtensor/internal/axis_rule.h"

#include <algorithm>

#include "hypershard/core/error.h"

namespace hypershard::dtensor::internal {
namespace {

using layout::Placement;

bool is_shard(const Placement& placement) {
  return placement.kind == Placement::Kind::kShard;
}

bool passes(const Passes& passes, Placement::Reduce reduce) {
  switch (reduce) {
    case Placement::Reduce::kMax:
      return passes.max;
    case Placement::Reduce::kMin:
      return passes.min;
    default:
      return passes.sum;
  }
}

std::optional<Placement> reduced(Reduction reduction) {
  switch (reduction) {
    case Reduction::kRefused:
      return std::nullopt;
    case Reduction::kSum:
      return Placement::partial(Placement::Reduce::kSum);
    case Reduction::kMean:
      return Placement::partial(Placement::Reduce::kAvg);
    case Reduction::kMax:
      return Placement::partial(Placement::Reduce::kMax);
    case Reduction::kMin:
      return Placement::partial(Placement::Reduce::kMin);
    case Reduction::kInside:
      return Placement::replicate();
  }
  return std::nullopt;
}

}  // namespace

int find_label(const Dims& dims, int label) {
  int found = -1;
  for (std::size_t i = 0; i < dims.size(); ++i) {
    if (dims[i].label == label) {
      found = found == -1 ? static_cast<int>(i) : -2;
    }
  }
  return found;
}

Placement AxisRule::placement(int operand) const {
  const Role role = map_.operands[static_cast<std::size_t>(operand)].role;
  const Placement& stated = call_.spec(operand).layout.placements[static_cast<std::size_t>(axis_)];
  const bool is_unread_term = role == Role::kShape && stated.kind == Placement::Kind::kPartial;
  return role == Role::kIgnored || is_unread_term ? Placement::replicate() : stated;
}

bool AxisRule::is_partial(int operand) const {
  return placement(operand).kind == Placement::Kind::kPartial;
}

std::string AxisRule::on_axis() const {
  return concat_text(" on axis ", mesh_.axes()[static_cast<std::size_t>(axis_)].name);
}

std::string AxisRule::operand_text(int operand) const {
  return concat_text(
      "'", call_.operand_name(operand), "' ", call_.shape(operand), " is ", placement(operand)
  );
}

AxisOutcome AxisRule::refused(std::string what, std::string fix) const {
  AxisOutcome outcome;
  outcome.refusal = Refusal{std::move(what), std::move(fix)};
  return outcome;
}

AxisOutcome AxisRule::derive() const {
  int cut = -1;
  for (int i = 0; i < call_.num_operands(); ++i) {
    const Placement at = placement(i);
    if (at.kind == Placement::Kind::kPartial) {
      return through_partial(i);
    }
    cut = cut < 0 && is_shard(at) ? i : cut;
  }
  if (cut >= 0) {
    return along_label(cut);
  }
  AxisOutcome outcome;
  outcome.outputs.assign(map_.outputs.size(), Placement::replicate());
  return outcome;
}

std::optional<Refusal> AxisRule::check_partial(int partial) const {
  for (int i = 0; i < call_.num_operands(); ++i) {
    if (is_shard(placement(i))) {
      return Refusal{
          concat_text(
              operand_text(i),
              " beside ",
              operand_text(partial),
              on_axis(),
              ": a piece of one does not belong to a term of the other"
          ),
          concat_text("reduce '", call_.operand_name(partial), "' before, to Replicate or Shard")
      };
    }
    if (is_partial(i) && placement(i) != placement(partial)) {
      return Refusal{
          concat_text(
              operand_text(i),
              " beside ",
              operand_text(partial),
              on_axis(),
              ": terms of different reductions"
          ),
          "reduce both before"
      };
    }
    const bool is_linear =
        std::any_of(map_.terms.begin(), map_.terms.end(), [i](const std::vector<int>& term) {
          return std::find(term.begin(), term.end(), i) != term.end();
        });
    if (is_partial(i) && (!is_linear || !passes(map_.passes, placement(i).reduce))) {
      return Refusal{
          concat_text(
              operand_text(i),
              on_axis(),
              ": the operator of its terms is not a term of the operator of their "
              "reduction (it is not ",
              passes({}, placement(i).reduce) ? "linear" : "monotone",
              " in this operand)"
          ),
          concat_text(
              "reduce '",
              call_.operand_name(i),
              "' before, to Replicate or Shard: a boundary is missing behind what makes it "
              "Partial"
          )
      };
    }
  }
  return check_terms(placement(partial).reduce);
}

std::optional<Refusal> AxisRule::check_terms(Placement::Reduce reduce) const {
  for (const std::vector<int>& term : map_.terms) {
    std::vector<int> partials;
    std::copy_if(term.begin(), term.end(), std::back_inserter(partials), [this](int i) {
      return is_partial(i);
    });
    if (partials.size() == 1) {
      continue;
    }
    if (partials.size() > 1) {
      return Refusal{
          concat_text(
              operand_text(partials[0]),
              " and ",
              operand_text(partials[1]),
              on_axis(),
              ": a product of sums is not the sum of the terms' products"
          ),
          "reduce one of them before"
      };
    }
    const std::string added =
        term.empty() ? "a constant" : concat_text(operand_text(term[0]), on_axis());
    return Refusal{
        concat_text(
            added,
            " is added to an operand that is ",
            Placement::partial(reduce),
            on_axis(),
            ": it would be counted once for each rank of the axis"
        ),
        "reduce the Partial operand before, or make the other one Partial too"
    };
  }
  return std::nullopt;
}

AxisOutcome AxisRule::through_partial(int partial) const {
  AxisOutcome outcome;
  outcome.refusal = check_partial(partial);
  if (outcome.refusal) {
    return outcome;
  }
  for (const OutputMap& output : map_.outputs) {
    const bool depends =
        output.from.empty() || std::any_of(output.from.begin(), output.from.end(), [this](int i) {
          return is_partial(i);
        });
    outcome.outputs.push_back(depends ? placement(partial) : Placement::replicate());
  }
  return outcome;
}

std::optional<Refusal> AxisRule::check_follows(int cut, int label, int operand) const {
  const OperandMap& map = map_.operands[static_cast<std::size_t>(operand)];
  const Placement at = placement(operand);
  const int dim = find_label(map.dims, label);
  const bool is_right = dim >= 0 ? at == Placement::shard(dim) : !is_shard(at) && dim == -1;
  if (map.role == Role::kIgnored || is_right) {
    return std::nullopt;
  }
  const std::string name = call_.operand_name(operand);
  const std::string both = concat_text(operand_text(cut), ", ", operand_text(operand), on_axis());
  if (dim >= 0) {
    return Refusal{
        concat_text(
            both,
            ": dimension ",
            dim,
            " of '",
            name,
            "' runs over the index that '",
            call_.operand_name(cut),
            "' is cut along"
        ),
        concat_text(
            "redistribute '",
            name,
            "' to ",
            Placement::shard(dim),
            ", or '",
            call_.operand_name(cut),
            "' to another layout"
        )
    };
  }
  return Refusal{
      dim == -1 ? concat_text(both, ": they are cut along different indices")
                : concat_text(both, ": two dimensions of '", name, "' run over the cut index"),
      concat_text("redistribute '", name, "' to Replicate")
  };
}

std::optional<Refusal> AxisRule::check_terms_have(int cut, int label) const {
  for (const std::vector<int>& term : map_.terms) {
    const bool has = std::any_of(term.begin(), term.end(), [&](int i) {
      return find_label(map_.operands[static_cast<std::size_t>(i)].dims, label) >= 0;
    });
    if (!has) {
      const std::string added = term.empty() ? "a constant" : operand_text(term[0]);
      return Refusal{
          concat_text(
              operand_text(cut),
              on_axis(),
              " along a dimension that is summed over, and ",
              added,
              " is added: it would be counted once for each rank of the axis"
          ),
          "add it after the sum has been reduced, or make it Partial"
      };
    }
  }
  return std::nullopt;
}

bool AxisRule::depends_on(const OutputMap& output, int label) const {
  if (output.from.empty()) {
    return true;
  }
  return std::any_of(output.from.begin(), output.from.end(), [&](int i) {
    return find_label(map_.operands[static_cast<std::size_t>(i)].dims, label) >= 0;
  });
}

AxisOutcome AxisRule::along_label(int cut) const {
  const Dim& dim = map_.operands[static_cast<std::size_t>(cut)]
                       .dims[static_cast<std::size_t>(placement(cut).dim)];
  if (dim.label == Dim::kWhole) {
    return refused(
        concat_text(
            operand_text(cut),
            on_axis(),
            ": the operator needs every entry of this dimension on each rank"
        ),
        concat_text(
            "redistribute '",
            call_.operand_name(cut),
            "' to Replicate, or to Shard of another dimension"
        )
    );
  }
  AxisOutcome outcome;
  outcome.label = dim.label;
  for (int i = 0; i < call_.num_operands() && !outcome.refusal; ++i) {
    outcome.refusal = check_follows(cut, dim.label, i);
  }
  const std::optional<Placement> rest =
      reduced(map_.reductions[static_cast<std::size_t>(dim.label)]);
  bool is_reduced = false;
  for (const OutputMap& output : map_.outputs) {
    const int at = find_label(output.dims, dim.label);
    const bool depends = depends_on(output, dim.label);
    if (at == -2 || (at < 0 && depends && output.is_defined && !rest)) {
      return refused(
          concat_text(
              operand_text(cut),
              on_axis(),
              ": the operator's result mixes the pieces of this dimension"
          ),
          concat_text(
              "redistribute '",
              call_.operand_name(cut),
              "' to Replicate, or to Shard of another dimension"
          )
      );
    }
    is_reduced = is_reduced || (output.is_defined && at < 0 && depends);
    outcome.outputs.push_back(
        at >= 0 ? Placement::shard(at) : (depends && rest ? *rest : Placement::replicate())
    );
  }
  if (is_reduced && !outcome.refusal) {
    outcome.refusal = check_terms_have(cut, dim.label);
  }
  return outcome;
}

}  // namespace hypershard::dtensor::internal
