// See resolve.h. The tape of the one run gives the gradients of every boundary and parameter.
#include "hypershard/plan/resolve.h"

#include <algorithm>
#include <exception>
#include <map>
#include <new>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include "hypershard/core/error.h"
#include "hypershard/layout/sharding.h"
#include "hypershard/plan/gradient_layouts.h"
#include "hypershard/plan/internal/cut_parameters.h"
#include "hypershard/plan/internal/gradient_faults.h"
#include "hypershard/plan/internal/known_cuts.h"
#include "hypershard/plan/internal/local_shapes.h"
#include "hypershard/plan/internal/plain_shapes.h"
#include "hypershard/plan/internal/site_hooks.h"
#include "hypershard/plan/tracker.h"

namespace hypershard::plan {

using layout::Layout;
using layout::Placement;
using layout::TensorSpec;

namespace {

Layout wanted_layout(const Layout& arriving, const BoundarySite& site) {
  Layout wanted = arriving;
  for (std::size_t axis = 0; axis < site.wanted.size(); ++axis) {
    if (site.wanted[axis].has_value()) {
      wanted.placements[axis] = *site.wanted[axis];
    }
  }
  if (wanted.placements != arriving.placements) {
    wanted.cut_order.clear();
  }
  return wanted;
}

class Resolver final : public TrackerObserver {
 public:
  Resolver(
      torch::nn::Module& model,
      const ShardingPlan& plan,
      const layout::DeviceMesh& mesh,
      int rank,
      const ResolveOptions& options
  )
      : model_(model),
        mesh_(mesh),
        rank_(rank),
        options_(options),
        matched_(match_plan(plan, model, mesh)),
        tracker_(mesh, rank, *this) {
    for (const std::string& axis : options.data_axes) {
      mesh.axis_index(axis);  // throws for an unknown one
    }
    result_.axes = mesh.axes();
    check_parameters();
    result_.data_axes = options.data_axes;
    for (const BoundarySite& site : matched_.sites) {
      result_.boundaries.push_back({.site = site});
    }
    crossings_.resize(matched_.sites.size());
  }

  ResolvedPlan run(const std::vector<PlannedInput>& inputs, const ForwardRun& forward) {
    if (options_.compare_with_plain) {
      plain_ =
          internal::PlainComparison(internal::plain_operators(model_, mesh_, rank_, inputs, forward)
          );
    }
    const internal::LocalShapes local(matched_.parameters, mesh_, rank_);
    std::vector<std::pair<int, BoundarySite>> sites;
    for (std::size_t i = 0; i < matched_.sites.size(); ++i) {
      sites.emplace_back(static_cast<int>(i), matched_.sites[i]);
    }
    const internal::SiteHooks hooks(model_, sites, [this](int site, at::Tensor& tensor) {
      cross(static_cast<std::size_t>(site), tensor);
    });
    const TrackingGuard guard(tracker_, model_);
    const at::AutoGradMode with_grad(true);
    tracker_.begin_forward();
    for (const MatchedParameter& parameter : matched_.parameters) {
      tracker_.set_spec(parameter.tensor, parameter.spec, parameter.name);
      values_.push_back(tracker_.value_of(parameter.tensor, parameter.name));
    }
    for (const PlannedInput& input : inputs) {
      tracker_.set_spec(input.local, input.spec, input.name);
    }
    std::optional<std::vector<at::Tensor>> outputs;
    try {
      outputs = forward();
    } catch (const LayoutError&) {
      settle_consequence();
    } catch (const internal::SiteError&) {
      settle_consequence();
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& error) {
      settle_failure(error);
    }
    if (outputs.has_value()) {
      settle(*outputs);
    }
    return std::move(result_);
  }

  void enter_module(const std::string&, c10::ArrayRef<at::Tensor> inputs) override {
    if (tracker_.module_depth() == 1) {
      note_inputs(inputs);
    }
  }

  void after_operator(const SeenOperator& seen, c10::ArrayRef<at::Tensor>) override {
    const std::string difference = plain_.next(seen);
    if (difference.empty()) {
      return;
    }
    const bool is_from_nothing = seen.operands.empty() || seen.name.starts_with("aten::new_");
    LayoutFault fault{
        .module = tracker_.module(),
        .subject = seen.name,
        .operands = {},
        .what = difference,
        .fix =
            is_from_nothing
                ? "a tensor made from nothing counts as whole on every rank: make it from the "
                  "tensor that is cut (zeros_like, ones_like, a view or expand of it), so that it "
                  "lies as that one does, or give it its global size"
                : "a size in the model's code does not follow the cut: compute it from the local "
                  "tensor's sizes or write -1 (heads, hidden units), or state a boundary before"
    };
    for (std::size_t i = 0; i < seen.operands.size(); ++i) {
      fault.operands.push_back(operand_text(seen.specs[i], seen.operands[i].sizes().vec(), mesh_));
    }
    on_fault(fault);
  }

  void on_fault(const LayoutFault& fault) override {
    plain_.stop();  // after a guess, shapes follow from it
    if (options_.on_problem == OnProblem::kThrow) {
      TrackerObserver::on_fault(fault);
    }
    result_.problems.push_back(fault);
  }

 private:
  // Checks of the model's own, before any operator that a rule could refuse.
  // Inside a handler: what came after a problem follows from it, and the problem says more.
  void settle_consequence() {
    if (result_.problems.empty()) {
      throw;  // raw-throw: what is being handled
    }
    result_.is_complete = false;
  }

  void settle_failure(const std::exception& error) {
    if (!result_.problems.empty()) {
      settle_consequence();
      return;
    }
    if (!options_.compare_with_plain) {
      throw;  // raw-throw: the model may fail without a plan as well
    }
    const std::string& module = tracker_.failed_module();
    std::string text = error.what();
    text.resize(std::min(text.find('\n'), text.size()));
    if (text.starts_with("[rank ")) {
      text.erase(0, text.find(']') + 2);  // the message has it in front
    }
    LayoutFault fault{
        .module = module,
        .subject = module,
        .operands = {},
        .what = concat_text(
            "the unsharded model runs, but with this rank's parts it fails with '", text, "'"
        ),
        .fix =
            "cut together what must fit together, such as rows of one weight and columns of the "
            "next, or state a boundary that makes the module's input whole"
    };
    for (const MatchedParameter& parameter : matched_.parameters) {
      const std::string prefix = module == module_text("") ? "" : module + ".";
      if (parameter.name.starts_with(prefix)) {
        fault.what += concat_text(
            fault.what.ends_with("'") ? "; there " : ", ",
            parameter.name.substr(prefix.size()),
            " is {",
            layout::to_text(parameter.spec.layout, mesh_),
            "} of ",
            parameter.spec.shape
        );
      }
    }
    on_fault(fault);
    result_.is_complete = false;
  }

  void check_parameters() const {
    for (const MatchedParameter& parameter : matched_.parameters) {
      for (const std::string& axis : options_.data_axes) {
        const auto& placement =
            parameter.spec.layout.placements[static_cast<std::size_t>(mesh_.axis_index(axis))];
        HS_CHECK(
            parameter.is_buffer || placement == Placement::replicate(),
            "plan: parameter '",
            parameter.name,
            "' is ",
            placement,
            " on the data axis '",
            axis,
            "'",
            HS_HINT(
                "leave parameters whole on data axes: the data-parallel strategy shards them there"
            )
        );
      }
      HS_CHECK(
          !internal::is_part(parameter.tensor),
          "plan: parameter '",
          parameter.name,
          "' of shape ",
          parameter.tensor.sizes().vec(),
          " is this rank's part already: a plan was applied to the model",
          HS_HINT(
              "put all rules into one plan, and resolve it with a model whose parameters are whole"
          )
      );
    }
  }

  // The root's own boundaries come first and replace what its arguments were.
  void note_inputs(c10::ArrayRef<at::Tensor> inputs) {
    result_.inputs.resize(std::max(result_.inputs.size(), inputs.size()));
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const auto spec = tracker_.spec_of(inputs[i]);
      if (!result_.inputs[i].has_value() && spec.has_value()) {
        result_.inputs[i] = spec->layout;
      }
    }
  }

  void cross(std::size_t number, at::Tensor& tensor) {
    const BoundarySite& site = matched_.sites[number];
    ResolvedBoundary& boundary = result_.boundaries[number];
    const std::string name = to_text(site);
    const TensorSpec spec = tracker_.spec_or_assume(tensor, name);
    if (site.module.empty() && site.kind == RuleKind::kInput) {
      const auto index = static_cast<std::size_t>(site.index);
      result_.inputs.resize(std::max(result_.inputs.size(), index + 1));
      result_.inputs[index] = spec.layout;
    }
    const Layout wanted = wanted_layout(spec.layout, site);
    check_crossing(boundary, spec, wanted, tensor);
    if (boundary.crossings++ == 0) {
      boundary.shape = spec.shape;
      boundary.dtype = c10::toString(tensor.scalar_type());
      element_bytes_[number] = static_cast<std::int64_t>(tensor.element_size());
      boundary.forward = flow(number, spec.layout, wanted);
      boundary.cut_by = cuts_.origins(spec);
    }
    cuts_.note(static_cast<int>(number), spec, wanted);
    const TensorSpec result_spec{spec.shape, wanted};
    at::Tensor result = received(tensor, result_spec);
    TapeOperator op{.name = name};
    op.boundary = static_cast<int>(number);
    for (const auto& placement : site.wanted) {
      op.is_named.push_back(placement.has_value() ? 1 : 0);
    }
    tracker_.record_boundary(tensor, result, result_spec, std::move(op));
    crossings_[number].push_back(static_cast<int>(tracker_.tape().ops().size()) - 1);
    tensor = std::move(result);
  }

  void check_crossing(
      const ResolvedBoundary& boundary,
      const TensorSpec& spec,
      const Layout& wanted,
      const at::Tensor& tensor
  ) {
    const auto fault = [&](std::string what, std::string fix) {
      on_fault(
          {.module = tracker_.module(),
           .subject = to_text(boundary.site),
           .operands = {operand_text(spec, tensor.sizes().vec(), mesh_)},
           .what = std::move(what),
           .fix = std::move(fix)}
      );
    };
    const auto num_dims = static_cast<int>(spec.shape.size());
    for (std::size_t axis = 0; axis < wanted.placements.size(); ++axis) {
      const Placement& placement = wanted.placements[axis];
      if (placement.kind != Placement::Kind::kShard || placement.dim < num_dims) {
        continue;
      }
      fault(
          concat_text(
              "the plan wants a layout that the tensor cannot have: ",
              placement,
              " on axis '",
              mesh_.axes()[axis].name,
              "' of a tensor of ",
              num_dims,
              " dimensions"
          ),
          concat_text(
              "correct the rule [",
              boundary.site.rule,
              "]: dimensions count from 0, and a scalar is replicate or partial"
          )
      );
      // Cannot go on with a layout that does not exist.
      layout::check_spec({spec.shape, wanted}, mesh_);
    }
    if (boundary.crossings > 0 && !(boundary.forward.arriving == spec.layout)) {
      fault(
          concat_text(
              "the module runs more than once in a forward, and this time {",
              layout::to_text(spec.layout, mesh_),
              "} arrives instead of {",
              layout::to_text(boundary.forward.arriving, mesh_),
              "}"
          ),
          "let every caller of the module give it tensors of one layout"
      );
    }
  }

  // Blocks repeat: most boundaries of a model are alike.
  BoundaryFlow flow(std::size_t number, const Layout& arriving, const Layout& leaving) {
    const std::int64_t bytes = element_bytes_.at(number);
    for (const auto& [shape, element_bytes, known] : flows_) {
      if (shape == result_.boundaries[number].shape && element_bytes == bytes &&
          known.arriving == arriving && known.leaving == leaving) {
        return known;
      }
    }
    flows_.emplace_back(
        result_.boundaries[number].shape, bytes, plan_flow(number, arriving, leaving)
    );
    return std::get<2>(flows_.back());
  }

  BoundaryFlow plan_flow(std::size_t number, const Layout& arriving, const Layout& leaving) const {
    const ResolvedBoundary& boundary = result_.boundaries[number];
    BoundaryFlow flow{.arriving = arriving, .leaving = leaving, .steps = {}};
    flow.steps = layout::plan_redistribution(boundary.shape, arriving, leaving, mesh_);
    for (const auto& step : flow.steps) {
      const auto traffic = layout::step_traffic(step, boundary.shape, mesh_, rank_);
      flow.sent_bytes += traffic.sent * element_bytes_.at(number);
      flow.received_bytes += traffic.received * element_bytes_.at(number);
    }
    return flow;
  }

  // What the boundary would hand on, with zeros for values.
  at::Tensor received(const at::Tensor& tensor, const TensorSpec& spec) const {
    const TrackingPause pause;
    const auto shape = layout::local_shape(spec, mesh_, rank_);
    if (tensor.sizes() == at::IntArrayRef(shape)) {
      return tensor.view_as(tensor);  // a tensor of its own: other uses keep the arriving layout
    }
    const at::Tensor zeros = at::zeros(shape, tensor.options().requires_grad(false));
    // Not a leaf, so that the module may write to it in place.
    return tensor.requires_grad() ? zeros.requires_grad_(true).clone() : zeros;
  }

  void settle(const std::vector<at::Tensor>& outputs) {
    HS_CHECK(
        !outputs.empty(),
        "plan: the forward that resolves the plan returned no tensor, so nothing is known of its "
        "gradients",
        HS_HINT("return what is differentiated: the loss, or the model's outputs")
    );
    std::vector<int> seeds;
    for (const at::Tensor& output : outputs) {
      result_.outputs.push_back(tracker_.spec_or_assume(output, "result of the forward"));
      const int value = tracker_.value_of(output, "result of the forward");
      if (tracker_.tape().value(value).differentiable) {
        seeds.push_back(value);
      }
    }
    for (const auto& fault : internal::seed_faults(tracker_, result_.outputs, result_)) {
      on_fault(fault);
    }
    const GradientLayouts gradients = derive_gradients(tracker_.tape(), seeds, mesh_);
    for (const GradientConflict& conflict : gradients.conflicts) {
      on_fault(internal::conflict_fault(tracker_, tracker_.tape(), conflict));
    }
    settle_boundaries(gradients);
    settle_parameters(gradients);
  }

  void settle_boundaries(const GradientLayouts& gradients) {
    std::map<int, const BoundaryGradient*> by_op;
    for (const BoundaryGradient& each : gradients.boundaries) {
      by_op[each.op] = &each;
    }
    for (std::size_t i = 0; i < crossings_.size(); ++i) {
      for (const int op : crossings_[i]) {
        const auto found = by_op.find(op);
        if (found != by_op.end()) {
          settle_backward(i, *found->second);
        }
      }
    }
  }

  void settle_backward(std::size_t number, const BoundaryGradient& gradient) {
    ResolvedBoundary& boundary = result_.boundaries[number];
    if (!boundary.backward.has_value()) {
      boundary.backward = flow(number, gradient.arriving, gradient.leaving);
      return;
    }
    if (!(boundary.backward->arriving == gradient.arriving)) {
      on_fault(
          {.module = module_text(boundary.site.module),
           .subject = to_text(boundary.site),
           .operands = {},
           .what = concat_text(
               "the module runs more than once in a forward, and its gradients arrive as {",
               layout::to_text(boundary.backward->arriving, mesh_),
               "} and as {",
               layout::to_text(gradient.arriving, mesh_),
               "}"
           ),
           .fix = "state boundaries behind the module, so that each call's gradient comes alike"}
      );
    }
  }

  void settle_parameters(const GradientLayouts& gradients) {
    for (std::size_t i = 0; i < matched_.parameters.size(); ++i) {
      const MatchedParameter& matched = matched_.parameters[i];
      ResolvedParameter parameter{
          .name = matched.name,
          .aliases = matched.aliases,
          .spec = matched.spec,
          .is_buffer = matched.is_buffer,
          .is_trained = !matched.is_buffer && matched.tensor.requires_grad(),
          .gradient = gradients.of_value.at(static_cast<std::size_t>(values_[i]))
      };
      for (std::size_t axis = 0; parameter.gradient && axis < mesh_.axes().size(); ++axis) {
        const auto& [name, size] = mesh_.axes()[axis];
        if (parameter.gradient->placements[axis].kind == Placement::Kind::kPartial && size > 1) {
          (result_.is_data_axis(name) ? parameter.data_axes : parameter.reduce_axes)
              .push_back(name);
        }
      }
      result_.parameters.push_back(std::move(parameter));
    }
  }

  torch::nn::Module& model_;
  const layout::DeviceMesh& mesh_;
  int rank_;
  const ResolveOptions& options_;
  MatchedPlan matched_;
  LayoutTracker tracker_;
  ResolvedPlan result_;
  internal::PlainComparison plain_{{}};
  std::vector<std::tuple<std::vector<std::int64_t>, std::int64_t, BoundaryFlow>> flows_;
  std::map<std::size_t, std::int64_t> element_bytes_;  // by site
  internal::KnownCuts cuts_{mesh_};
  std::vector<std::vector<int>> crossings_;  // by site: operators of the tape
  std::vector<int> values_;                  // by parameter: values of the tape
};

}  // namespace

TensorSpec even_spec(const at::Tensor& local, Layout layout, const layout::DeviceMesh& mesh) {
  TensorSpec spec{local.sizes().vec(), std::move(layout)};
  for (std::size_t axis = 0; axis < spec.layout.placements.size(); ++axis) {
    const Placement& placement = spec.layout.placements[axis];
    if (placement.kind == Placement::Kind::kShard) {
      spec.shape.at(static_cast<std::size_t>(placement.dim)) *= mesh.axes().at(axis).size;
    }
  }
  return spec;
}

ResolvedPlan resolve(
    torch::nn::Module& model,
    const ShardingPlan& plan,
    const layout::DeviceMesh& mesh,
    int rank,
    const std::vector<PlannedInput>& inputs,
    const ForwardRun& forward,
    const ResolveOptions& options
) {
  return Resolver(model, plan, mesh, rank, options).run(inputs, forward);
}

}  // namespace hypershard::plan
