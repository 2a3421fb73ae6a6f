// Runs one operator on all simulated ranks and on whole tensors, and compares.
#include "hypershard/dtensor/property/rule_check.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "hypershard/core/error.h"
#include "hypershard/core/hash.h"
#include "hypershard/dtensor/op_rules.h"
#include "hypershard/layout/sharding.h"

namespace hypershard::dtensor::property {
namespace {

using layout::Placement;
using layout::TensorSpec;
using Stack = std::vector<c10::IValue>;

c10::OperatorHandle find_op(const std::string& op) {
  const std::size_t dot = op.find('.');
  const std::string overload = dot == std::string::npos ? "" : op.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchemaOrThrow(
      op.substr(0, dot).c_str(), overload.c_str()
  );
}

/// Lists the defined tensors of a stack, in order.
Tensors tensors_of(const Stack& stack) {
  Tensors all;
  for (const c10::IValue& value : stack) {
    if (value.isTensor() && value.toTensor().defined()) {
      all.push_back(value.toTensor());
    } else if (value.isList()) {
      for (const c10::IValue& entry : value.toListRef()) {
        if (entry.isTensor() && entry.toTensor().defined()) {
          all.push_back(entry.toTensor());
        }
      }
    }
  }
  return all;
}

/// A call without its sizes: they are made from each rank's tensors.
class Template {
 public:
  Template(const c10::OperatorHandle& op, const Arguments& arguments) : op_(op) {
    const auto& schema = op.schema().arguments();
    std::vector<bool> given(schema.size());
    values_.resize(schema.size());
    makers_.resize(schema.size());
    std::size_t next = 0;
    for (const Argument& argument : arguments) {
      std::size_t slot = argument.name.empty() ? next++ : 0;
      while (!argument.name.empty() && schema[slot].name() != argument.name) {
        HS_CHECK_LT(slot + 1, schema.size(), "no argument ", argument.name);
        ++slot;
      }
      HS_CHECK_LT(slot, schema.size(), "too many arguments");
      given[slot] = true;
      values_[slot] = fitted(argument.value, schema[slot]);
      makers_[slot] = argument.from_tensors;
    }
    for (std::size_t i = 0; i < schema.size(); ++i) {
      if (!given[i] && schema[i].default_value().has_value()) {
        values_[i] = *schema[i].default_value();
      }
    }
    whole_ = tensors_of(values_);
  }

  const Tensors& whole() const { return whole_; }

  /// Puts `tensors` in place of the whole ones, and sizes made from them.
  Stack with(const Tensors& tensors) const {
    Stack stack = values_;
    std::size_t next = 0;
    for (std::size_t i = 0; i < stack.size(); ++i) {
      if (stack[i].isTensor() && stack[i].toTensor().defined()) {
        stack[i] = tensors[next++];
      } else if (stack[i].isTensorList()) {
        Tensors list;
        for (std::size_t n = stack[i].toListRef().size(); n > 0; --n) {
          list.push_back(tensors[next++]);
        }
        stack[i] = c10::IValue(list);
      } else if (stack[i].isList()) {
        stack[i] = replaced_optionals(stack[i], tensors, next);
      }
    }
    for (std::size_t i = 0; i < stack.size(); ++i) {
      if (makers_[i]) {
        stack[i] = makers_[i](tensors);
      }
    }
    return stack;
  }

 private:
  /// Lists of optional tensors come as lists of tensors, undefined ones for none.
  static c10::IValue fitted(const c10::IValue& value, const c10::Argument& schema) {
    if (value.isTensorList() && schema.type()->str() == "Tensor?[]") {
      c10::List<std::optional<at::Tensor>> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt);
      }
      return list;
    }
    return value;
  }

  static c10::IValue replaced_optionals(
      const c10::IValue& value, const Tensors& tensors, std::size_t& next
  ) {
    const auto entries = value.toListRef();
    const bool has_tensors = std::any_of(entries.begin(), entries.end(), [](const c10::IValue& v) {
      return v.isTensor();
    });
    if (!has_tensors) {
      return value;
    }
    c10::List<std::optional<at::Tensor>> list;
    for (const c10::IValue& entry : entries) {
      list.push_back(entry.isTensor() ? std::optional<at::Tensor>(tensors[next++]) : std::nullopt);
    }
    return list;
  }

  const c10::OperatorHandle& op_;
  Stack values_;
  std::vector<std::function<c10::IValue(const Tensors&)>> makers_;
  Tensors whole_;
};

/// Chooses layouts. Blind choice is nearly always refused by operators with many operands, so cuts
/// mostly go through dimensions of one size, and Partial mostly through one or all operands.
class LayoutDraw {
 public:
  LayoutDraw(const Tensors& tensors, const layout::DeviceMesh& mesh, Random& random)
      : tensors_(tensors), random_(random) {
    for (const at::Tensor& tensor : tensors) {
      specs_.push_back({tensor.sizes().vec(), {}});
    }
    for (int axis = 0; axis < mesh.num_axes(); ++axis) {
      for (TensorSpec& spec : specs_) {
        spec.layout.placements.push_back(Placement::replicate());
      }
      const std::int64_t mode = draw(random_, 10);
      if (!tensors.empty() && mode < 5) {
        cut_by_size();
      } else if (!tensors.empty() && mode < 8) {
        make_partial();
      } else if (mode < 9) {
        choose_blindly();
      }
    }
  }

  std::vector<TensorSpec> specs() && { return std::move(specs_); }

 private:
  std::size_t any() { return static_cast<std::size_t>(draw(random_, count())); }
  std::int64_t count() const { return static_cast<std::int64_t>(tensors_.size()); }

  void cut_by_size() {
    const at::Tensor& chosen = tensors_[any()];
    if (chosen.dim() == 0) {
      return;
    }
    const std::int64_t size = chosen.size(draw(random_, chosen.dim()));
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      std::vector<int> dims;
      for (int dim = 0; dim < tensors_[i].dim(); ++dim) {
        if (tensors_[i].size(dim) == size) {
          dims.push_back(dim);
        }
      }
      if (!dims.empty() && chance(random_, 0.95)) {
        const bool is_first = chance(random_, 0.6);
        const auto pick = draw(random_, static_cast<std::int64_t>(dims.size()));
        specs_[i].layout.placements.back() =
            Placement::shard(dims[is_first ? 0 : static_cast<std::size_t>(pick)]);
      }
    }
  }

  bool can_be_partial(std::size_t i) const { return at::isFloatingType(tensors_[i].scalar_type()); }

  void make_partial() {
    constexpr Placement::Reduce kReduces[] = {
        Placement::Reduce::kSum,
        Placement::Reduce::kSum,
        Placement::Reduce::kAvg,
        Placement::Reduce::kMax,
        Placement::Reduce::kMin
    };
    const Placement::Reduce reduce = kReduces[draw(random_, 5)];
    const bool is_one = chance(random_, 0.6);
    const std::size_t one = any();
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const bool is_chosen = is_one ? i == one : chance(random_, 0.7);
      if (is_chosen && can_be_partial(i) && fits(i, reduce)) {
        specs_[i].layout.placements.back() = Placement::partial(reduce);
      }
    }
  }

  /// Sums beside maxima depend on the order of reductions: kept apart here.
  bool fits(std::size_t i, Placement::Reduce reduce) const {
    const auto& placements = specs_[i].layout.placements;
    return std::all_of(placements.begin(), placements.end(), [&](const Placement& placement) {
      return placement.kind != Placement::Kind::kPartial || placement.reduce == reduce;
    });
  }

  void choose_blindly() {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const std::int64_t rank = tensors_[i].dim();
      const std::int64_t choice = draw(random_, rank + 2);
      if (choice < rank) {
        specs_[i].layout.placements.back() = Placement::shard(static_cast<int>(choice));
      } else if (choice == rank && can_be_partial(i) && fits(i, Placement::Reduce::kSum)) {
        specs_[i].layout.placements.back() = Placement::partial();
      }
    }
  }

  const Tensors& tensors_;
  Random& random_;
  std::vector<TensorSpec> specs_;
};

bool is_plain(const TensorSpec& spec) {
  return std::all_of(
      spec.layout.placements.begin(),
      spec.layout.placements.end(),
      [](const Placement& placement) { return placement == Placement::replicate(); }
  );
}

bool is_partial(const TensorSpec& spec) {
  return std::any_of(
      spec.layout.placements.begin(),
      spec.layout.placements.end(),
      [](const Placement& placement) { return placement.kind == Placement::Kind::kPartial; }
  );
}

std::string specs_text(const std::vector<TensorSpec>& specs, const layout::DeviceMesh& mesh) {
  std::string text;
  for (const TensorSpec& spec : specs) {
    text += concat_text(text.empty() ? "" : "; ", spec.shape, " ", to_text(spec.layout, mesh));
  }
  return text;
}

Stack call(const c10::OperatorHandle& op, Stack stack) {
  op.callBoxed(&stack);
  return stack;
}

/// Lists results with undefined ones, lists flattened.
Tensors results_of(const Stack& stack) {
  Tensors all;
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) {
      all.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        all.push_back(tensor);
      }
    }
  }
  return all;
}

class Check {
 public:
  Check(const RuleCase& rule_case, const layout::DeviceMesh& mesh)
      : case_(rule_case),
        mesh_(mesh),
        op_(find_op(rule_case.op)),
        draw_(
            hash_bytes(rule_case.op) + static_cast<std::uint64_t>(mesh.size() * 8 + mesh.num_axes())
        ) {}

  CheckResult run(int num_draws, int enough) {
    for (int i = 0; i < num_draws && result_.accepted < enough && result_.fault.empty(); ++i) {
      try {
        once();
      } catch (const std::exception& error) {
        fail(concat_text("threw ", std::string(error.what()).substr(0, 500)));
      }
    }
    return result_;
  }

 private:
  void fail(const std::string& what) {
    result_.fault = concat_text(
        case_.op,
        ": ",
        what,
        "\n  operands ",
        specs_text(specs_, mesh_),
        "\n  outputs  ",
        specs_text(verdict_.outputs, mesh_),
        verdict_.refusal ? "\n  refused: " + verdict_.refusal->what : ""
    );
  }

  void once() {
    verdict_ = {};
    const Template form(op_, case_.make(draw_));
    Stack plain;
    try {
      plain = call(op_, form.with(clones(form.whole())));
    } catch (const c10::Error&) {
      return;  // this draw's sizes suit nobody, such as maxima of nothing
    }
    specs_ = LayoutDraw(form.whole(), mesh_, draw_.random).specs();
    const std::vector<Tensors> locals = cut_all(form.whole());
    const Stack first = form.with(locals[0]);
    verdict_ = propagate({op_, first, specs_}, mesh_);
    for (std::size_t rank = 1; rank < locals.size(); ++rank) {
      const Stack stack = form.with(locals[rank]);
      // Reasons show local shapes, so only accepted verdicts are alike to the letter.
      const Verdict other = propagate({op_, stack, specs_}, mesh_);
      if (other.refusal.has_value() != verdict_.refusal.has_value() ||
          other.outputs != verdict_.outputs || other.is_random != verdict_.is_random) {
        return fail(concat_text("rank ", rank, " comes to another verdict than rank 0"));
      }
    }
    if (verdict_.refusal) {
      result_.refused += 1;
      return;
    }
    std::vector<Tensors> results;
    for (const Tensors& local : locals) {
      results.push_back(results_of(call(op_, form.with(clones(local)))));
    }
    compare(results, results_of(plain));
    const bool is_counted = !std::all_of(specs_.begin(), specs_.end(), is_plain);
    if (is_counted && result_.fault.empty()) {
      result_.accepted += 1;
      result_.partial += std::any_of(specs_.begin(), specs_.end(), is_partial) ? 1 : 0;
      check_in_place(form, locals, results_of(plain));
    }
  }

  static Tensors clones(const Tensors& tensors) {
    Tensors all;
    for (const at::Tensor& tensor : tensors) {
      all.push_back(tensor.clone());
    }
    return all;
  }

  /// By rank, then by tensor.
  std::vector<Tensors> cut_all(const Tensors& whole) {
    std::vector<Tensors> locals(static_cast<std::size_t>(mesh_.size()));
    for (std::size_t i = 0; i < whole.size(); ++i) {
      const Tensors pieces = cut(whole[i], specs_[i], mesh_, draw_.random);
      for (std::size_t rank = 0; rank < pieces.size(); ++rank) {
        locals[rank].push_back(pieces[rank]);
      }
    }
    return locals;
  }

  void compare(const std::vector<Tensors>& results, const Tensors& plain) {
    if (verdict_.outputs.size() != plain.size()) {
      return fail(concat_text(
          "the verdict has ", verdict_.outputs.size(), " outputs, the operator ", plain.size()
      ));
    }
    for (std::size_t i = 0; i < plain.size() && result_.fault.empty(); ++i) {
      Tensors pieces;
      for (const Tensors& local : results) {
        pieces.push_back(local[i]);
      }
      compare_output(pieces, plain[i], verdict_.outputs[i], i);
    }
  }

  void compare_output(
      const Tensors& pieces, const at::Tensor& plain, const TensorSpec& spec, std::size_t output
  ) {
    if (!plain.defined()) {
      const bool is_empty = spec.layout.placements.empty() && !pieces[0].defined();
      return is_empty ? void() : fail(concat_text("output ", output, " should be undefined"));
    }
    if (Sizes(plain.sizes().vec()) != spec.shape) {
      return fail(concat_text("output ", output, " has global shape ", plain.sizes()));
    }
    for (std::size_t rank = 0; rank < pieces.size(); ++rank) {
      const Sizes expected = layout::local_shape(spec, mesh_, static_cast<int>(rank));
      if (pieces[rank].sizes().vec() != expected) {
        return fail(concat_text(
            "rank ", rank, " has local shape ", pieces[rank].sizes(), " of output ", output
        ));
      }
    }
    if (case_.compare == Compare::kShapes) {
      return;
    }
    std::string fault;
    const at::Tensor joined = join(pieces, spec, mesh_, fault);
    if (fault.empty() && !agree(joined, plain)) {
      fault = "gathers to another value than the plain operator's";
    }
    if (!fault.empty()) {
      fail(concat_text("output ", output, " ", fault));
    }
  }

  /// The in-place form of an accepted call is accepted if the written operand keeps its layout.
  void check_in_place(
      const Template& form, const std::vector<Tensors>& locals, const Tensors& plain
  ) {
    const std::string overload =
        case_.op.find('.') == std::string::npos ? "" : case_.op.substr(case_.op.find('.') + 1);
    const auto written =
        c10::Dispatcher::singleton().findSchema({case_.name() + "_", overload.c_str()});
    const bool is_same_form =
        written && written->schema().arguments().size() == op_.schema().arguments().size() &&
        plain.size() == 1 && !specs_.empty() &&
        plain[0].scalar_type() == locals[0][0].scalar_type();
    if (!is_same_form) {
      return;
    }
    const Stack first = form.with(locals[0]);
    const Verdict verdict = propagate({*written, first, specs_}, mesh_);
    if (verdict.refusal.has_value() == (specs_[0] == verdict_.outputs[0])) {
      return fail(concat_text(
          "the in-place form is ",
          verdict.refusal ? "refused: " + verdict.refusal->what : "accepted"
      ));
    }
    if (verdict.refusal) {
      return;
    }
    std::vector<Tensors> results;
    for (const Tensors& local : locals) {
      const Tensors copies = clones(local);
      call(*written, form.with(copies));
      results.push_back({copies[0]});
    }
    result_.written += 1;
    compare(results, plain);
  }

  const RuleCase& case_;
  const layout::DeviceMesh& mesh_;
  c10::OperatorHandle op_;
  Draw draw_;
  CheckResult result_;
  std::vector<TensorSpec> specs_;
  Verdict verdict_;
};

}  // namespace

CheckResult check_rule(
    const RuleCase& rule_case, const layout::DeviceMesh& mesh, int num_draws, int enough
) {
  return Check(rule_case, mesh).run(num_draws, enough);
}

}  // namespace hypershard::dtensor::property
