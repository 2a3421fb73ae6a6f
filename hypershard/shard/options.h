// What a user may choose when a model is sharded.
// Plain structs with defaults; checked once, by fully_shard.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>

#include "hypershard/layout/strategy.h"
#include "hypershard/layout/tensor_spec.h"

namespace hypershard::shard {

/// The four dtypes of a parameter's life, each a setting of its own.
///
/// Unset: storage and compute are the parameter's own dtype; update is fp32, or fp64 for an fp64
/// parameter (never a half type by inheritance); reduce is the wider of compute and fp32.
struct MixedPrecision {
  /// Sharded runtime parameters: what is kept and gathered.
  std::optional<c10::ScalarType> storage = {};
  /// Unsharded runtime parameters: what kernels read.
  std::optional<c10::ScalarType> compute = {};
  /// Unsharded gradients: what is written and summed over ranks.
  std::optional<c10::ScalarType> reduce = {};
  /// Gradients between supernodes: bf16 rounds the sum of each supernode once; they are summed in
  /// fp32 all the same. Unset: the reduce dtype.
  std::optional<c10::ScalarType> wire = {};
  /// Update parameters, their gradients and optimizer state.
  std::optional<c10::ScalarType> update = {};
  /// Floating results of the root's forward; unset: left alone.
  std::optional<c10::ScalarType> output = {};
  bool cast_inputs = true;  ///< cast floating inputs of each unit to `compute` if that is set
};

/// Whether ranks of one supernode map one runtime buffer instead of gathering copies. A transport,
/// never a semantics: the same bits.
enum class Share : std::uint8_t {
  kAuto,  ///< where the back end has shared memory and the layout allows it
  kOn,    ///< as kAuto, but an error where it cannot be
  kOff,   ///< every rank gathers into a buffer of its own
};

/// What an access to a resharded parameter meets, beside the error that names its unit.
enum class ReshardDebug : std::uint8_t {
  kThrow,  ///< nothing more
  kNan,    ///< returned buffers are filled with NaN, and fresh ones too
};

/// How ranks come to agree on the values of a module that was built with real tensors.
enum class InitialValues : std::uint8_t {
  kCheckEqual,  ///< compare hashes between ranks and throw naming the first parameter that differs
  kBroadcast,   ///< take rank 0's
  kTrust,       ///< take each rank's own part unchecked
};

/// What a plan says of a parameter whose local tensor is a part of a larger one, or whose gradient
/// is Partial on a mesh axis that is no data axis; see NOTE [plan axes] in shard/parameter_part.h.
struct ParameterSpec {
  /// Global shape, and the layout on the whole mesh: Replicate on the data axes, Replicate or
  /// Shard on others.
  layout::TensorSpec spec = {};
  /// Axes (no data axes) on which its gradient is Partial: summed there after the data axes.
  std::vector<std::string> reduce_axes = {};
};

/// Options of fully_shard.
struct FullyShardOptions {
  layout::Strategy strategy = layout::Strategy::kZero3;
  /// States the three layouts instead of `strategy`.
  std::optional<layout::PlaneLayouts> layouts = {};
  /// Globs over module paths (`blocks.*`); each match becomes a unit. Parameters of no unit belong
  /// to the root unit. A glob that matches no module is an error.
  std::vector<std::string> units = {};
  /// Globs over parameter paths that stay plain, replicated tensors, left to the caller.
  std::vector<std::string> ignored = {};
  /// Parameters that a plan cuts or whose gradients it leaves Partial, by any of their names;
  /// plan::parameter_specs makes them. Absent: the local tensor is the whole and its gradient
  /// complete, equal on all ranks but those of the data axes.
  std::map<std::string, ParameterSpec> parameters = {};
  /// Names the update family of a parameter from its global shape; parameters of one family share
  /// update tensors, so that an optimizer can treat families differently. Unset: `decay` for two
  /// dimensions and more, else `no_decay`.
  std::function<std::string(std::string_view path, std::span<const std::int64_t> shape)>
      update_family = {};
  MixedPrecision precision = {};
  /// Frees a unit's unsharded parameters between its forward and its backward. The root unit stays
  /// unsharded in any case.
  bool reshard_after_forward = true;
  int forward_prefetch = 1;   ///< units whose unshard is started ahead of need, forward
  int backward_prefetch = 1;  ///< the same, backward
  int gradient_buffers = 2;   ///< units whose reduction may be in flight at once
  /// Bytes that the units of a bucket put on the link between supernodes, at least: 0 is one unit a
  /// bucket. Unset: so many that the link's measured latency is a tenth of their time.
  std::optional<std::int64_t> bucket_bytes = {};
  Share share = Share::kAuto;
  InitialValues initial_values = InitialValues::kCheckEqual;
  ReshardDebug reshard_debug = ReshardDebug::kThrow;  ///< HS_DEBUG_RESHARD=nan turns kNan on
};

}  // namespace hypershard::shard
