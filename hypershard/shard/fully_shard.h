// The entry for modules: one call shards a model, its handle does the rest.
// Verbs are FSDP2's, so that what people know carries over.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/comm/world.h"
#include "hypershard/nn/init.h"
#include "hypershard/shard/counters.h"
#include "hypershard/shard/group.h"
#include "hypershard/shard/options.h"

namespace torch::nn {
class Module;
}

namespace hypershard::shard {

class Engine;

/// A model whose parameters are sharded: the handle that an optimizer, a checkpoint and a training
/// loop work with.
///
/// The module stays the caller's and is used as before: `model->forward(...)`, `loss.backward()`.
/// Between forward and backward of a unit its parameters may be resharded; touching one then throws
/// and names the unit. Gradients and optimizer state belong to update_parameters(). Copies share
/// the same state. Threads: the rank's thread.
class ShardedModel {
 public:
  explicit ShardedModel(std::shared_ptr<Engine> engine);

  /// Returns the tensors that an optimizer steps on: flat runs of one family each, in the update
  /// dtype, with the reduced gradient as grad().
  std::vector<UpdateTensor> update_parameters() const;
  /// The same as plain tensors, for torch::optim; only those of one family if it is named.
  /// Errors: InvalidArgument naming the families there are.
  std::vector<at::Tensor> update_tensors(std::string_view family = {}) const;

  /// Off: backward adds up local gradients and reduces nothing, for all but the last micro-batch of
  /// an accumulation.
  void set_requires_gradient_sync(bool on) const;
  /// Off: backward reduces inside `shard` only and keeps the sum; on again for the last micro-batch
  /// (hsdp). No effect without a `replicate` axis.
  void set_requires_all_reduce(bool on) const;
  /// Divides reduced gradients by `divisor` instead of the number of ranks that see different data.
  /// Errors: InvalidArgument unless positive and finite.
  void set_gradient_divide_factor(double divisor) const;
  /// Changes the policy of one unit, or of all but the root if `unit` is empty.
  void set_reshard_after_forward(bool on, std::string_view unit = {}) const;

  /// Makes a unit's parameters readable until reshard(). Collective: ranks of the data axes.
  /// Errors: InvalidArgument for an unknown unit.
  void unshard(std::string_view unit) const;
  /// Takes a unit apart again. Collective: ranks of the data axes.
  void reshard(std::string_view unit) const;
  /// Makes runtime parameters current after update tensors were written by hand; needed if an
  /// optimizer steps in backward or the parameters are frozen, else the next forward does the same.
  /// Collective: ranks of the data axes. Errors: CommError.
  void sync_runtime() const;
  /// To be called by an optimizer before it writes. Errors: InvalidArgument if it may not.
  void begin_update() const;
  /// Drops all gradients (as set_to_none), those of micro-batches without reduction too. The
  /// module's own zero_grad() does the same, when the next forward begins.
  void zero_grad() const;

  /// Scales all reduced gradients so that their joint p-norm is at most `max_norm`; returns the
  /// norm before, the same on all ranks.
  ///
  /// Every element counts once, however planes and parameters are cut. p > 0, or infinity for the
  /// largest absolute value. A non-finite norm is returned and scales nothing. Collective: all
  /// ranks of the mesh. Errors: InvalidArgument if max_norm is negative or not a number, or p is
  /// not positive.
  double clip_grad_norm_(double max_norm, double norm_type = 2.0) const;

  /// Returns a logical parameter whole, in the update dtype and its global shape. Collective: all
  /// ranks of the mesh.
  /// Errors: InvalidArgument with the nearest name.
  at::Tensor full_parameter(std::string_view name) const;
  /// Returns the reduced gradient of a logical parameter whole; undefined if there is none.
  /// Collective and errors as full_parameter.
  at::Tensor full_gradient(std::string_view name) const;
  /// Called with a logical name and its whole tensor, a copy that may be kept.
  using VisitFull = std::function<void(const std::string& name, const at::Tensor& full)>;
  /// Visits all logical parameters as full_parameter gives them, in the order of parameter_names;
  /// what one gather brings together is gathered once. Collective and errors as full_parameter.
  void visit_full_parameters(const VisitFull& visit) const;
  /// The same for reduced gradients; parameters without one are left out.
  /// Collective and errors as full_parameter.
  void visit_full_gradients(const VisitFull& visit) const;
  /// Returns the logical names in order of registration; a tied parameter appears once.
  std::vector<std::string> parameter_names() const;

  /// Gives every parameter values that depend on `seed`, its name and element index only, so that
  /// any mesh starts from the same weights. `init` is given the global shape. Collective: ranks of
  /// the data axes.
  void initialize(
      const std::function<nn::Init(std::string_view name, at::IntArrayRef shape)>& init,
      std::uint64_t seed
  ) const;

  /// Names the first update tensor whose gradient (or value) is not finite on any rank: `parameter
  /// 'x' (gradient) on rank 3`; empty if all are. Collective: all ranks of the mesh.
  std::string find_non_finite() const;

  const Counters& counters() const;
  void reset_counters() const;
  Engine& engine() const { return *engine_; }

 private:
  int unit_index(std::string_view unit) const;
  std::shared_ptr<Engine> engine_;
};

/// Shards the parameters of `module` over the data axes of `mesh` and hooks it, so that forward and
/// backward unshard, reshard and reduce by themselves.
///
/// Every module that matches `options.units`, and `module` itself, must be hookable (nn::Hookable
/// or nn::Hooked). Parameters may be on the meta device: then call initialize() or load a
/// checkpoint before the first forward. What a plan cut over other axes is stated in
/// options.parameters; a mesh of plan axes alone has one data rank a part. Memory:     the
/// parameters' own memory is freed unless someone else holds it; planes are allocated once.
/// Collective: all ranks of the mesh, with the same module and options. Errors:     InvalidArgument
/// for patterns that match nothing, modules without hooks, a module sharded before, ranks whose
/// parameters differ; names path and rank.
ShardedModel fully_shard(
    torch::nn::Module& module, const comm::ProcessMesh& mesh, const FullyShardOptions& options = {}
);

}  // namespace hypershard::shard
