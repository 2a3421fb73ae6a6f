// Runs one operator on all simulated ranks and on whole tensors, and compares.
#include "hypershard/dtensor/internal/property/rule_check.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "hypershard/core/error.h"
#include "hypershard/core/hash.h"
#include "hypershard/dtensor/internal/property/call_form.h"
#include "hypershard/dtensor/internal/property/layout_draw.h"
#include "hypershard/dtensor/op_rules.h"
#include "hypershard/layout/sharding.h"

namespace hypershard::dtensor::property {
namespace {

using layout::Placement;
using layout::TensorSpec;

c10::OperatorHandle find_op(const std::string& op) {
  const std::size_t dot = op.find('.');
  const std::string overload = dot == std::string::npos ? "" : op.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchemaOrThrow(
      op.substr(0, dot).c_str(), overload.c_str()
  );
}

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

/// Out forms of libtorch resize outputs for their own purposes, and warn of it.
class SilentWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& /*warning*/) override {}
};

/// Tells whether `form` is `op` with a tensor to write for each result.
bool is_out_form(const c10::FunctionSchema& form, const c10::FunctionSchema& op) {
  const std::size_t given = op.arguments().size();
  const std::size_t returned = op.returns().size();
  if (returned == 0 || form.arguments().size() != given + returned ||
      form.returns().size() != returned) {
    return false;
  }
  for (std::size_t i = 0; i < given; ++i) {
    const c10::Argument& a = form.arguments()[i];
    const c10::Argument& b = op.arguments()[i];
    if (a.name() != b.name() || !(*a.type() == *b.type()) || b.alias_info() != nullptr) {
      return false;
    }
  }
  for (std::size_t i = given; i < form.arguments().size(); ++i) {
    const c10::Argument& argument = form.arguments()[i];
    const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (!is_written || !argument.kwarg_only() ||
        argument.type()->kind() != c10::TypeKind::TensorType) {
      return false;
    }
  }
  return true;
}

/// Finds the out form of an operator among its overloads.
std::optional<c10::OperatorHandle> find_out_form(const c10::OperatorHandle& op) {
  static const auto* overloads = [] {
    auto* names = new std::multimap<std::string, std::string>;
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      if (name.name.starts_with("aten::")) {
        names->emplace(name.name, name.overload_name);
      }
    }
    return names;
  }();
  const std::string& name = op.operator_name().name;
  for (auto [at, end] = overloads->equal_range(name); at != end; ++at) {
    const auto form = c10::Dispatcher::singleton().findSchema({name, at->second});
    if (form.has_value() && is_out_form(form->schema(), op.schema())) {
      return form;
    }
  }
  return std::nullopt;
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
        out_form_(find_out_form(op_)),
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
    const CallForm form(op_, case_.make(draw_));
    Stack plain;
    try {
      plain = call(op_, form.with(clones(form.whole()), beginnings(form.whole())));
    } catch (const c10::Error&) {
      return;  // this draw's sizes suit nobody, such as maxima of nothing
    }
    specs_ = draw_layouts(form.whole(), mesh_, draw_.random);
    const std::vector<Tensors> locals = cut_all(form.whole());
    const Stack first = form.with(locals[0], offsets_of(0));
    verdict_ = propagate({op_, first, specs_}, mesh_);
    for (std::size_t rank = 1; rank < locals.size(); ++rank) {
      const Stack stack = form.with(locals[rank], offsets_of(rank));
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
    for (std::size_t rank = 0; rank < locals.size(); ++rank) {
      results.push_back(results_of(call(op_, form.with(clones(locals[rank]), offsets_of(rank)))));
    }
    compare(results, results_of(plain));
    const bool is_counted = !std::all_of(specs_.begin(), specs_.end(), is_plain);
    if (is_counted && result_.fault.empty()) {
      result_.accepted += 1;
      result_.partial += std::any_of(specs_.begin(), specs_.end(), is_partial) ? 1 : 0;
      check_in_place(form, locals, results_of(plain));
      check_out(form, locals, results);
    }
  }

  static Offsets beginnings(const Tensors& whole) {
    Offsets all;
    for (const at::Tensor& tensor : whole) {
      all.emplace_back(static_cast<std::size_t>(tensor.dim()), 0);
    }
    return all;
  }

  Offsets offsets_of(std::size_t rank) const {
    Offsets all;
    for (const TensorSpec& spec : specs_) {
      all.push_back(layout::local_offset(spec, mesh_, static_cast<int>(rank)));
    }
    return all;
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
      const CallForm& form, const std::vector<Tensors>& locals, const Tensors& plain
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
    const Stack first = form.with(locals[0], offsets_of(0));
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
    for (std::size_t rank = 0; rank < locals.size(); ++rank) {
      const Tensors copies = clones(locals[rank]);
      call(*written, form.with(copies, offsets_of(rank)));
      results.push_back({copies[0]});
    }
    result_.written += 1;
    compare(results, plain);
  }

  /// The out form of an accepted call is accepted if what it writes lies as the results do; a
  /// rank's outputs are then what the operator returned there.
  void check_out(
      const CallForm& form, const std::vector<Tensors>& locals, const std::vector<Tensors>& expected
  ) {
    const bool is_defined =
        std::all_of(expected[0].begin(), expected[0].end(), [](const at::Tensor& tensor) {
          return tensor.defined();
        });
    if (!out_form_.has_value() || !is_defined || !result_.fault.empty()) {
      return;
    }
    SilentWarnings silent;
    const c10::WarningUtils::WarningHandlerGuard silence(&silent);
    std::vector<TensorSpec> specs = specs_;
    specs.insert(specs.end(), verdict_.outputs.begin(), verdict_.outputs.end());
    const Stack first = with_outputs(form.with(clones(locals[0]), offsets_of(0)), expected[0]);
    const Verdict verdict = propagate({*out_form_, first, specs}, mesh_);
    if (verdict.refusal.has_value() || verdict.outputs != verdict_.outputs) {
      return fail(concat_text(
          "the out form comes to another verdict",
          verdict.refusal ? ": " + verdict.refusal->what : std::string()
      ));
    }
    Placement& placement = specs.back().layout.placements.front();
    placement = placement == Placement::replicate() ? Placement::partial() : Placement::replicate();
    if (!propagate({*out_form_, first, specs}, mesh_).refusal.has_value()) {
      return fail("the out form writes a tensor that lies otherwise");
    }
    for (std::size_t rank = 0; rank < locals.size(); ++rank) {
      const Stack stack =
          with_outputs(form.with(clones(locals[rank]), offsets_of(rank)), expected[rank]);
      call(*out_form_, stack);
      const Tensors found = outputs_of(stack, expected[rank].size());
      if (case_.compare == Compare::kValues &&
          !std::equal(found.begin(), found.end(), expected[rank].begin(), agree)) {
        return;  // some of libtorch's out forms compute something else than their operators
      }
    }
    result_.filled += 1;
  }

  /// Adds memory for what a call is expected to return, full of something else.
  static Stack with_outputs(Stack stack, const Tensors& expected) {
    for (const at::Tensor& result : expected) {
      stack.emplace_back(at::full_like(result, 77));
    }
    return stack;
  }

  static Tensors outputs_of(const Stack& stack, std::size_t count) {
    return results_of(Stack(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end()));
  }

  const RuleCase& case_;
  const layout::DeviceMesh& mesh_;
  c10::OperatorHandle op_;
  std::optional<c10::OperatorHandle> out_form_;
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
