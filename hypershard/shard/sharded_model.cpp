// The handle's methods; see fully_shard.h. Clipping and the search for non-finite values are in
// gradient_norm.cpp.
#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "hypershard/core/error.h"
#include "hypershard/core/suggest.h"
#include "hypershard/shard/engine.h"
#include "hypershard/shard/fully_shard.h"

namespace hypershard::shard {

namespace {

struct Place {
  ParamGroup* group = nullptr;
  std::size_t param = 0;
};

Place find_parameter(const Engine& engine, std::string_view name) {
  std::vector<std::string> names;
  for (const auto& unit : engine.units()) {
    for (const auto& group : unit->groups()) {
      for (std::size_t i = 0; i < group->params().size(); ++i) {
        const LogicalParam& param = group->params()[i];
        if (param.name == name ||
            std::find(param.aliases.begin(), param.aliases.end(), name) != param.aliases.end()) {
          return {group.get(), i};
        }
        names.push_back(param.name);
      }
    }
  }
  HS_FAIL(
      InvalidArgument,
      "shard: there is no sharded parameter '",
      name,
      "' among ",
      names.size(),
      HS_HINT(suggestion(name, names))
  );
}

// The logical parameter out of a flat tensor that lies like the group's whole. Collective: ranks of
// the plan axes.
at::Tensor cut_out(const Engine& engine, const Place& place, const at::Tensor& whole) {
  const layout::Segment& segment = place.group->packing().segments[place.param];
  const LogicalParam& param = place.group->params()[place.param];
  const at::Tensor local = whole.narrow(0, segment.offset, segment.numel).view(segment.shape);
  const at::Tensor joined = join_parts(local, param.part, engine.parallel().plan.get(), param.name);
  return joined.is_same(local) ? local.clone() : joined;
}

// The reduced gradients of a group, flat and whole; undefined if there are none. Collective: ranks
// of the data axes.
at::Tensor gather_gradient(ParamGroup& group) {
  const c10::NoGradGuard no_grad;
  if (group.gradient_is_fresh()) {
    return {};
  }
  const layout::Range mine = group.update_range();
  at::Tensor own = at::zeros({mine.numel()}, group.update_plane().options());
  for (const UpdateTensor& update : group.updates()) {
    if (update.tensor.grad().defined() && update.range.numel() > 0) {
      own.narrow(0, update.range.begin - mine.begin, update.range.numel())
          .copy_(update.tensor.grad());
    }
  }
  return group.gather_update(own);
}

void visit_groups(
    const Engine& engine,
    const std::function<at::Tensor(ParamGroup&)>& gather,
    const ShardedModel::VisitFull& visit
) {
  for (const auto& unit : engine.units()) {
    for (const auto& group : unit->groups()) {
      const at::Tensor whole = gather(*group);
      for (std::size_t i = 0; whole.defined() && i < group->params().size(); ++i) {
        visit(group->params()[i].name, cut_out(engine, {group.get(), i}, whole));
      }
    }
  }
}

}  // namespace

ShardedModel::ShardedModel(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}

std::vector<UpdateTensor> ShardedModel::update_parameters() const {
  std::vector<UpdateTensor> all;
  for (const auto& unit : engine_->units()) {
    for (const auto& group : unit->groups()) {
      all.insert(all.end(), group->updates().begin(), group->updates().end());
    }
  }
  return all;
}

std::vector<at::Tensor> ShardedModel::update_tensors(std::string_view family) const {
  std::vector<at::Tensor> tensors;
  std::vector<std::string> families;
  for (const auto& unit : engine_->units()) {
    for (const auto& group : unit->groups()) {
      for (const LogicalParam& param : group->params()) {
        if (std::find(families.begin(), families.end(), param.family) == families.end()) {
          families.push_back(param.family);
        }
      }
      for (const UpdateTensor& update : group->updates()) {
        if (family.empty() || update.family == family) {
          tensors.push_back(update.tensor);
        }
      }
    }
  }
  HS_CHECK(
      family.empty() || std::find(families.begin(), families.end(), family) != families.end(),
      "shard: no parameter has update family '",
      family,
      "'; the model has ",
      families,
      HS_HINT(suggestion(family, families))
  );
  return tensors;
}

void ShardedModel::set_requires_gradient_sync(bool on) const {
  engine_->reduce_gradients = on;
}
void ShardedModel::set_requires_all_reduce(bool on) const {
  engine_->cross_replicas = on;
}

void ShardedModel::set_gradient_divide_factor(double divisor) const {
  HS_CHECK(
      std::isfinite(divisor) && divisor > 0,
      "shard: the gradient divide factor is ",
      divisor,
      "; expected a positive number"
  );
  engine_->gradient_divisor = divisor;
}

void ShardedModel::set_reshard_after_forward(bool on, std::string_view unit) const {
  if (!unit.empty()) {
    engine_->units()[static_cast<std::size_t>(unit_index(unit))]->reshard_after_forward = on;
    return;
  }
  for (const auto& each : engine_->units()) {
    each->reshard_after_forward = on && !each->is_root();
  }
}

int ShardedModel::unit_index(std::string_view unit) const {
  std::vector<std::string> paths;
  for (const auto& each : engine_->units()) {
    if (each->path() == unit) {
      return each->index();
    }
    paths.push_back(each->path());
  }
  HS_FAIL(
      InvalidArgument,
      "shard: there is no unit '",
      unit,
      "'; the model has ",
      paths,
      HS_HINT(suggestion(unit, paths))
  );
}

void ShardedModel::unshard(std::string_view unit) const {
  engine_->unshard(unit_index(unit));
}
void ShardedModel::reshard(std::string_view unit) const {
  engine_->reshard(unit_index(unit));
}
void ShardedModel::sync_runtime() const {
  engine_->sync_runtime();
}
void ShardedModel::begin_update() const {
  engine_->begin_update();
}

void ShardedModel::zero_grad() const {
  engine_->discard_gradients();
}

at::Tensor ShardedModel::full_parameter(std::string_view name) const {
  const Place place = find_parameter(*engine_, name);
  engine_->begin_gather();
  return cut_out(*engine_, place, place.group->gather_update(place.group->update_plane()));
}

at::Tensor ShardedModel::full_gradient(std::string_view name) const {
  const Place place = find_parameter(*engine_, name);
  engine_->begin_gather();
  const at::Tensor whole = gather_gradient(*place.group);
  return whole.defined() ? cut_out(*engine_, place, whole) : at::Tensor();
}

void ShardedModel::visit_full_parameters(const VisitFull& visit) const {
  engine_->begin_gather();
  visit_groups(
      *engine_, [](ParamGroup& group) { return group.gather_update(group.update_plane()); }, visit
  );
}

void ShardedModel::visit_full_gradients(const VisitFull& visit) const {
  engine_->begin_gather();
  visit_groups(*engine_, gather_gradient, visit);
}

std::vector<std::string> ShardedModel::parameter_names() const {
  std::vector<std::string> names;
  for (const auto& unit : engine_->units()) {
    for (const auto& group : unit->groups()) {
      for (const LogicalParam& param : group->params()) {
        names.push_back(param.name);
      }
    }
  }
  return names;
}

void ShardedModel::initialize(
    const std::function<nn::Init(std::string_view, at::IntArrayRef)>& init, std::uint64_t seed
) const {
  const c10::NoGradGuard no_grad;
  const ErrorContext context("initialize");
  engine_->begin_update();
  for (const UpdateTensor& update : update_parameters()) {
    for (const UpdatePiece& piece : update.pieces) {
      const nn::Init how = init(piece.name, piece.shape);
      const layout::Block whole = layout::whole_block(piece.shape);
      for (const layout::BlockRun& run :
           layout::common_runs(piece.block, piece.range, whole, {0, whole.numel()})) {
        const std::int64_t begin = piece.offset + run.first - piece.range.begin;
        nn::fill_range(
            update.tensor.narrow(0, begin, run.numel), how, seed, piece.name, run.second
        );
      }
    }
  }
  engine_->mark_initialised();
  engine_->sync_runtime();
}

const Counters& ShardedModel::counters() const {
  return engine_->counters();
}

void ShardedModel::reset_counters() const {
  Counters& counters = engine_->counters();
  const Counters before = counters;
  counters = {};
  counters.live_unsharded_bytes = before.live_unsharded_bytes;
  counters.peak_unsharded_bytes = before.live_unsharded_bytes;
  counters.gradient_buffer_bytes = before.gradient_buffer_bytes;
}

}  // namespace hypershard::shard
