// See elementwise_optimizer.h. Everything is collected and checked before the first element is
// written, so that a refused step changes nothing.
#include "hypershard/optim/elementwise_optimizer.h"

#include <algorithm>
#include <map>
#include <utility>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include "hypershard/core/error.h"
#include "hypershard/core/suggest.h"
#include "hypershard/shard/engine.h"

namespace hypershard::optim {

namespace {

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// The families of the whole model, the same on every rank.
std::vector<std::string> families_of(const shard::ShardedModel& model) {
  std::vector<std::string> families;
  for (const auto& unit : model.engine().units()) {
    for (const auto& group : unit->groups()) {
      for (const shard::LogicalParam& param : group->params()) {
        if (!contains(families, param.family)) {
          families.push_back(param.family);
        }
      }
    }
  }
  return families;
}

// A model of vectors only has no `decay` family, which is no mistake; any other name that is not
// there would leave weights undecayed in silence.
void check_families(
    const shard::ShardedModel& model, const std::vector<std::string>& decay_families
) {
  const std::vector<std::string> families = families_of(model);
  const bool only_vectors = std::all_of(families.begin(), families.end(), [](const auto& family) {
    return family == "no_decay";
  });
  for (const std::string& family : decay_families) {
    HS_CHECK(
        contains(families, family) || (only_vectors && family == "decay"),
        "optim: decay_families names '",
        family,
        "', but no parameter has that update family; the model has ",
        families,
        HS_HINT(suggestion(family, families))
    );
  }
}

std::vector<torch::optim::OptimizerParamGroup> make_groups(
    const shard::ShardedModel& model, const std::vector<std::string>& decay_families
) {
  check_families(model, decay_families);
  std::vector<at::Tensor> decayed;
  std::vector<at::Tensor> undecayed;
  for (const shard::UpdateTensor& update : model.update_parameters()) {
    (contains(decay_families, update.family) ? decayed : undecayed).push_back(update.tensor);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::move(decayed));
  groups.emplace_back(std::move(undecayed));
  return groups;
}

void check_gradient(const shard::UpdateTensor& update, const at::Tensor& grad) {
  HS_CHECK(
      grad.scalar_type() == update.tensor.scalar_type() && grad.numel() == update.tensor.numel() &&
          grad.is_contiguous(),
      "optim: the gradient of update tensor '",
      update.name,
      "' is a ",
      grad.is_contiguous() ? "contiguous " : "non-contiguous ",
      c10::toString(grad.scalar_type()),
      " tensor of ",
      grad.numel(),
      " elements; expected contiguous ",
      c10::toString(update.tensor.scalar_type()),
      " of ",
      update.tensor.numel()
  );
}

}  // namespace

ElementwiseOptimizer::ElementwiseOptimizer(
    shard::ShardedModel model,
    const std::vector<std::string>& decay_families,
    const Options& decayed,
    const Options& undecayed
)
    : ShardedOptimizer(make_groups(model, decay_families), decayed.clone()),
      model_(std::move(model)),
      updates_(model_.update_parameters()),
      updates_state_(updates_.size()),
      steps_(updates_.size(), 0) {
  // Set and not passed to the base: torch takes an option that equals its own default for one that
  // was left open, and would give the second group the decay of the first.
  param_groups()[0].set_options(decayed.clone());
  param_groups()[1].set_options(undecayed.clone());
  for (std::size_t i = 0; i < updates_.size(); ++i) {
    index_[updates_[i].tensor.unsafeGetTensorImpl()] = i;
  }
}

std::size_t ElementwiseOptimizer::index_of(const at::Tensor& tensor) const {
  const auto found = index_.find(tensor.unsafeGetTensorImpl());
  HS_CHECK(
      found != index_.end(),
      "optim: a parameter group of '",
      kind(),
      "' holds a tensor of shape ",
      tensor.sizes(),
      " that is no update tensor of the sharded model",
      HS_HINT("add tensors of ShardedModel::update_tensors() only")
  );
  return found->second;
}

const ElementwiseOptimizer::Options* ElementwiseOptimizer::options_of(std::size_t update) const {
  for (const torch::optim::OptimizerParamGroup& group : param_groups()) {
    for (const at::Tensor& param : group.params()) {
      if (param.is_same(updates_[update].tensor)) {
        return &group.options();
      }
    }
  }
  return nullptr;
}

void ElementwiseOptimizer::ensure_state(std::size_t update, const std::vector<std::string>& names) {
  State& state = updates_state_[update];
  for (const std::string& name : names) {
    if (!contains(state.names, name)) {
      state.names.push_back(name);
      state.tensors.push_back(at::zeros_like(updates_[update].tensor));
    }
  }
}

void ElementwiseOptimizer::add_to_batch(Batch& batch, std::size_t update, const at::Tensor& step) {
  const State& state = updates_state_[update];
  batch.params.push_back(updates_[update].tensor);
  batch.grads.push_back(updates_[update].tensor.grad());
  batch.state.resize(state.tensors.size());
  for (std::size_t i = 0; i < state.tensors.size(); ++i) {
    batch.state[i].push_back(state.tensors[i]);
  }
  batch.steps.push_back(step);
}

// Once a step: groups may be added, and their options changed, between steps.
void ElementwiseOptimizer::find_options() {
  options_.assign(updates_.size(), nullptr);
  for (const torch::optim::OptimizerParamGroup& group : param_groups()) {
    const Options& options = group.options();
    check_options(options);
    for (const at::Tensor& param : group.params()) {
      const std::size_t i = index_of(param);
      HS_CHECK(
          options_[i] == nullptr,
          "optim: update tensor '",
          updates_[i].name,
          "' is in two parameter groups, and would be stepped twice"
      );
      options_[i] = &options;
    }
  }
}

void ElementwiseOptimizer::step_range(std::size_t begin, std::size_t end) {
  std::map<std::pair<const Options*, c10::ScalarType>, Batch> batches;
  std::map<std::int64_t, at::Tensor> step_tensors;
  std::vector<std::size_t> stepped;
  for (std::size_t i = begin; i < end; ++i) {
    const at::Tensor& param = updates_[i].tensor;
    const at::Tensor& grad = param.grad();
    if (!grad.defined() || options_[i] == nullptr) {
      continue;
    }
    check_gradient(updates_[i], grad);
    stepped.push_back(i);
    ensure_state(i, state_names_of(*options_[i]));
    if (param.numel() == 0) {
      continue;  // counted, since its parameter has elements on other ranks
    }
    at::Tensor& step = step_tensors[steps_[i] + 1];
    if (!step.defined()) {
      step = at::full({}, static_cast<double>(steps_[i] + 1), param.options().dtype(at::kFloat));
    }
    add_to_batch(batches[{options_[i], param.scalar_type()}], i, step);
  }
  for (auto& [key, batch] : batches) {
    apply(*key.first, batch);
  }
  for (const std::size_t update : stepped) {
    ++steps_[update];
  }
}

ElementwiseOptimizer::~ElementwiseOptimizer() {
  if (steps_in_backward_) {
    model_.engine().update_in_backward = nullptr;
  }
}

void ElementwiseOptimizer::step_in_backward(bool on) {
  if (on == steps_in_backward_) {
    return;
  }
  shard::Engine& engine = model_.engine();
  HS_CHECK(
      !on || !engine.update_in_backward,
      "optim: another optimizer updates this model in backward",
      HS_HINT("one optimizer owns the update parameters; destroy the other, or call "
              "step_in_backward(false) on it")
  );
  steps_in_backward_ = on;
  engine.update_in_backward = nullptr;
  if (!on) {
    return;
  }
  unit_begins_.assign(1, 0);
  for (const auto& unit : engine.units()) {
    std::size_t end = unit_begins_.back();
    for (const auto& group : unit->groups()) {
      end += group->updates().size();
    }
    unit_begins_.push_back(end);
  }
  engine.update_in_backward = [this](const shard::Unit& unit) { update_unit(unit); };
}

void ElementwiseOptimizer::update_unit(const shard::Unit& unit) {
  const c10::NoGradGuard no_grad;
  const ErrorContext context("optimizer step in backward");
  if (options_.empty()) {
    find_options();
  }
  const auto index = static_cast<std::size_t>(unit.index());
  step_range(unit_begins_[index], unit_begins_[index + 1]);
}

at::Tensor ElementwiseOptimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const c10::AutoGradMode enable_grad(true);
    loss = closure();
  }
  const c10::NoGradGuard no_grad;
  const ErrorContext context("optimizer step");
  model_.begin_update();
  find_options();
  step_range(0, updates_.size());  // what backward updated has no gradient any more
  options_.clear();
  ++num_steps_;
  return loss;
}

std::vector<std::string> ElementwiseOptimizer::state_names(std::size_t update) const {
  HS_CHECK_LT(update, updates_.size(), "optim: there is no such update tensor");
  const Options* options = options_of(update);
  return options == nullptr ? std::vector<std::string>() : state_names_of(*options);
}

std::vector<StateTensor> ElementwiseOptimizer::state_tensors() {
  const c10::NoGradGuard no_grad;
  std::vector<StateTensor> all;
  for (std::size_t i = 0; i < updates_.size(); ++i) {
    if (steps_[i] > 0) {
      ensure_state(i, state_names(i));
    }
    const State& state = updates_state_[i];
    for (std::size_t k = 0; k < state.names.size(); ++k) {
      all.push_back({.name = state.names[k], .update = i, .tensor = state.tensors[k]});
    }
  }
  return all;
}

void ElementwiseOptimizer::set_num_steps(std::int64_t steps) {
  HS_CHECK_GE(steps, 0, "optim: num_steps counts steps");
  num_steps_ = steps;
  steps_.assign(updates_.size(), steps);
  if (steps == 0) {
    updates_state_.assign(updates_.size(), {});
  }
}

void ElementwiseOptimizer::restore_steps(
    std::int64_t num_steps, const std::vector<std::int64_t>& update_steps
) {
  HS_CHECK_GE(num_steps, 0, "optim: num_steps counts steps");
  HS_CHECK_EQ(
      update_steps.size(),
      updates_.size(),
      "optim: restore_steps wants a count for each update tensor"
  );
  for (std::size_t i = 0; i < update_steps.size(); ++i) {
    HS_CHECK_GE(update_steps[i], 0, "optim: the steps of update tensor '", updates_[i].name, "'");
  }
  num_steps_ = num_steps;
  steps_ = update_steps;
  updates_state_.assign(updates_.size(), {});
}

void ElementwiseOptimizer::set_lr(double lr) {
  for (torch::optim::OptimizerParamGroup& group : param_groups()) {
    group.options().set_lr(lr);
  }
}

double ElementwiseOptimizer::lr() const {
  return param_groups().front().options().get_lr();
}

}  // namespace hypershard::optim
