// A group: parameters of one unit with the same dtypes and trainability, packed side by side.
// It owns the three planes of the design: runtime, gradient and update; everything above works on
// groups.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/layout/packing.h"
#include "hypershard/shard/buffer_pool.h"
#include "hypershard/shard/counters.h"
#include "hypershard/shard/data_parallel.h"
#include "hypershard/shard/parameter_part.h"
#include "hypershard/shard/staged_work.h"
#include "hypershard/shard/swappable_storage.h"
#include "hypershard/shard/unit_reduction.h"

namespace hypershard::shard {

/// A parameter as the model's author knows it.
struct LogicalParam {
  std::string name;                  ///< path of its first registration
  std::vector<std::string> aliases;  ///< further paths of the same tensor (tied parameters)
  at::Tensor tensor;  ///< the module's own handle; its data become a view of the group's buffer
  std::vector<std::int64_t> shape;  ///< of `tensor`, on this rank
  ParameterPart part;               ///< of the logical parameter, what `tensor` is
  std::string family;               ///< update family: parameters of one family lie side by side
  bool on_meta = false;             ///< constructed without memory; must be initialised
};

/// The dtypes of a group, all settled.
struct GroupDtypes {
  c10::ScalarType storage{};
  c10::ScalarType compute{};
  c10::ScalarType reduce{};
  c10::ScalarType update{};
  std::optional<c10::ScalarType> wire = {};  ///< only if it is not the reduce dtype
  bool operator==(const GroupDtypes&) const = default;
};

/// Where the whole of a group's runtime parameters lies.
enum class RuntimeMode : std::uint8_t {
  kResident,  ///< whole on this rank, always
  kGathered,  ///< a shard here; made whole in a buffer of this rank
  kPooled,    ///< a shard here; made whole in a buffer that the ranks of the supernode share
  kShared,    ///< one buffer mapped by all ranks of the supernode; this rank writes its slice
};
std::string to_text(RuntimeMode mode);

/// A piece of a logical parameter inside an update tensor. Units: elements.
struct UpdatePiece {
  std::string name;                 ///< logical parameter
  std::vector<std::int64_t> shape;  ///< its global shape
  layout::Block block;              ///< what of it this rank's local tensor is; mostly the whole
  bool is_first = true;             ///< see ParameterPart::is_first
  layout::Range range;              ///< of the block's flattened elements
  std::int64_t offset = 0;          ///< where they start in the update tensor
};

/// What an optimizer owns: a flat run of one family's parameters on this rank.
struct UpdateTensor {
  std::string name;  ///< `blocks.3/decay`; the same on all ranks
  std::string family;
  at::Tensor
      tensor;  ///< 1-D, update dtype; its grad is the reduced gradient; padding in it is zero
  layout::Range range;  ///< of the group's packing
  std::vector<UpdatePiece> pieces;
};

/// Views of the buffers that a group's gradients pass through, each made once.
class BufferViews {
 public:
  static constexpr std::size_t kMostBuffers = 1024;
  /// Returns `numel` elements of `memory` (1-D uint8) from a byte on; valid as long as this object.
  /// Errors: InternalError for more buffers than kMostBuffers.
  const at::Tensor& at(
      const at::Tensor& memory, std::int64_t offset_bytes, std::int64_t numel, c10::ScalarType dtype
  );

 private:
  struct View {
    const void* data = nullptr;
    at::Tensor tensor;
  };
  std::deque<View> views_;
};

/// One collective of a reduction, the same every time.
struct SumStep {
  const DataAxis* axis = nullptr;  ///< null: nothing to sum
  bool scatters = false;           ///< else all ranks get the whole sum
  layout::Range range;             ///< of the packing, that this rank has afterwards
  std::vector<std::int64_t> counts;
};

/// A reduce-scatter between supernodes that is to be started, with others or alone.
struct SumBetween {
  comm::ReduceSegment segment;
  comm::Reduction how;
  comm::Communicator* ranks = nullptr;
};

/// One group of one unit on one rank.
///
/// Life cycle: constructed from the module's parameters; place_*() gives it memory and takes the
/// parameters over; then cycles of unshard_stages / finish_unshard / reshard, gradients, a
/// reduction (begin_reduction to rest), write_runtime, publish_stages. Memory: the planes live as
/// long as the group; see
/// NOTE [shared planes].
///
/// NOTE [shared planes]: if storage and update agree in dtype, the update tensor is a slice of the
/// runtime shard: one memory, no publish. Threads: the rank's thread.
class ParamGroup {
 public:
  ParamGroup(
      std::string name,
      std::string unit,
      std::vector<LogicalParam> params,
      GroupDtypes dtypes,
      bool trainable,
      const DataParallel* parallel,
      Counters* counters
  );
  ParamGroup(const ParamGroup&) = delete;
  ParamGroup& operator=(const ParamGroup&) = delete;

  const std::string& name() const { return name_; }
  const std::string& unit() const { return unit_; }
  const std::vector<LogicalParam>& params() const { return params_; }
  const layout::GroupPacking& packing() const { return packing_; }
  const GroupDtypes& dtypes() const { return dtypes_; }
  RuntimeMode mode() const { return mode_; }
  /// Tells whether the whole must be brought together by communication.
  bool gathers() const { return mode_ == RuntimeMode::kGathered || mode_ == RuntimeMode::kPooled; }
  /// The plan axes over which its gradients are summed; mostly none.
  const std::vector<std::string>& reduce_axes() const { return params_.front().part.reduce_axes; }
  /// Tells whether the update tensor is a slice of the runtime shard.
  bool update_is_runtime() const { return update_is_runtime_; }
  bool trainable() const { return trainable_; }
  void set_trainable(bool trainable) { trainable_ = trainable; }
  bool gradients_hooked =
      false;  ///< the engine takes the gradients of these parameters; kept by the engine

  std::int64_t whole_storage_bytes() const { return bytes(dtypes_.storage); }
  std::int64_t whole_compute_bytes() const { return bytes(dtypes_.compute); }
  /// Bytes of a buffer for the gradients: on all ranks of the plan axes as many as on the one that
  /// needs most, so that all of them hand buffers from unit to unit alike.
  std::int64_t gradient_buffer_bytes() const {
    return buffer_numel_ * static_cast<std::int64_t>(c10::elementSize(dtypes_.reduce));
  }
  void set_gradient_buffer_numel(std::int64_t numel) { buffer_numel_ = numel; }
  layout::Range runtime_range() const {
    return packing_.range(parallel_->coordinates(parallel_->runtime_levels));
  }
  layout::Range gradient_range() const {
    return packing_.range(parallel_->coordinates(parallel_->gradient_levels));
  }
  layout::Range update_range() const {
    return packing_.range(parallel_->coordinates(parallel_->update_levels));
  }

  // --- placing

  /// Says where the runtime plane may lie: kResident if nothing is split, kShared only if the
  /// layout and dtypes allow it (`why_not` tells why not).
  static RuntimeMode choose_mode(
      const DataParallel& parallel, const GroupDtypes& dtypes, bool may_share, std::string* why_not
  );
  /// Gives the group memory. `read`/`write` are the two mappings of its whole in kShared, else
  /// null. Takes the current values of the parameters (rank-own part) and makes the parameters
  /// views of the runtime buffer. After that every plane but gathered ones is attached.
  void place(
      RuntimeMode mode, const std::byte* read, std::byte* write, std::shared_ptr<void> owner
  );

  // --- runtime plane

  /// Stages that fill the buffers (uint8, from a pool) with the whole, in kPooled with what this
  /// rank brings to it; empty if nothing is gathered.
  void add_unshard_stages(
      std::vector<StagedWork::Stage>& stages,
      const at::Tensor& storage_bytes,
      const at::Tensor& compute_bytes
  );
  /// Puts memory under the parameters: the pool's buffer, if the whole is gathered, or their own.
  void attach(const at::Tensor& compute_bytes);
  /// Takes it away; accesses throw from now on. kResident stays.
  void detach();
  /// Writes this rank's part of the runtime shard from its update parameters (cast if they are
  /// apart), and gives every parameter a new version; frozen parameters that were published since
  /// they are frozen only if `even_frozen`. Returns whether it did; equal on all ranks of the data
  /// axes.
  bool write_runtime(bool even_frozen);
  /// The sum of its update tensors' version counters: another one after any of them was written.
  std::uint64_t update_version() const;
  /// Errors: InvalidArgument if update tensors were written since they were published as frozen.
  void check_frozen() const;
  /// Stages that fill the rest of the runtime shard, where the update plane is cut finer; none if
  /// nothing was written.
  void add_publish_stages(std::vector<StagedWork::Stage>& stages);
  void bump_versions();

  // --- gradient plane

  /// Uses a stretch of `memory` (1-D uint8) for the gradients of one accumulation: reduce dtype,
  /// whole, packed as the parameters.
  void set_gradient_buffer(const at::Tensor& memory, std::int64_t offset_bytes);
  /// The same with the stretch itself.
  void set_gradient_slot(const at::Tensor& slot);
  bool has_gradient_buffer() const { return slot_.defined(); }
  const at::Tensor& gradient_view(std::size_t param) const { return (*slot_views_)[param]; }
  bool written(std::size_t param) const { return written_[param] != 0; }
  void set_written(std::size_t param) { written_[param] = 1; }
  /// Notes that the gradient of a parameter has come in this backward; false if it had before.
  bool arrive(std::size_t param) { return std::exchange(arrived_[param], char{1}) == 0; }
  void forget_arrivals() { arrived_.assign(params_.size(), 0); }
  /// Zeroes what nobody wrote and the padding.
  void complete_gradient();
  /// The steps of a reduction, in order: see NOTE [steps of a reduction]. begin_reduction() decides
  /// where the result goes; the next four start a collective each, if there is anything to do
  /// (sum_between() leaves a reduce-scatter to its caller); rest() leaves the sum as gradients of
  /// the update tensors.
  GroupReduction begin_reduction(const ReduceOptions& options);
  void sum_inside(GroupReduction& reduction);
  std::optional<SumBetween> sum_between(GroupReduction& reduction);
  void sum_plan(GroupReduction& reduction);
  void join_inside(GroupReduction& reduction);
  void rest(GroupReduction& reduction);
  /// Tells whether the sum inside the supernode lies outside the gradient buffer.
  bool leaves_early(const GroupReduction& reduction) const;
  /// Tells whether its sum goes on to other supernodes.
  bool crosses(const GroupReduction& reduction) const {
    return between_.axis != nullptr && reduction.rest != Rest::kPartial;
  }
  /// Tells whether that sum should get memory of its own, so that the gradient buffer need not wait
  /// for what lies between supernodes.
  bool wants_slice(const ReduceOptions& options) const;
  std::int64_t slice_bytes() const;
  /// Bytes that its sum puts on the link between supernodes; 0 if there is none. Equal on all ranks
  /// of the plan axes.
  std::int64_t crossing_bytes() const;
  /// Bytes of the runtime shard that a publish completes, whether it crosses or not. Equal there.
  std::int64_t publish_bytes() const;
  /// Returns what of the packing this rank brings to other supernodes; all if there are none.
  layout::Range crossing_range() const { return inside_.range; }
  /// Returns how many elements each rank of the supernode brings across; for one that joins_inside.
  const std::vector<std::int64_t>& crossing_shares() const { return inside_.counts; }
  /// Tells whether the sum is cut among the ranks of the supernode to cross, and joined after that.
  bool joins_inside() const { return joins_inside_; }
  void set_slice(GroupReduction& reduction, const at::Tensor& memory, std::int64_t offset_bytes);
  void drop_gradient_buffer();
  /// Returns a buffer for gradients that needs no reduction elsewhere: the gradient plane itself,
  /// if it is whole, of the same dtype and holds nothing yet.
  at::Tensor whole_rest();
  /// Returns the reduced gradient (update dtype, gradient range), undefined before the first
  /// reduction.
  const at::Tensor& reduced() const { return rest_; }

  // --- update plane

  /// Returns this rank's update tensors: one a family that has elements here, at least one a group.
  const std::vector<UpdateTensor>& updates() const { return updates_; }
  /// Tells whether every update tensor is without a gradient, so that the next reduction may
  /// overwrite.
  bool gradient_is_fresh() const;
  /// Drops the gradients of the update tensors and a sum that was not reduced over all axes.
  void drop_reduced();
  /// Returns the update plane of this rank as one flat tensor (it shares memory with updates()).
  const at::Tensor& update_plane() const { return update_; }
  /// Gathers a flat tensor that lies like the update plane into the whole, packed. Collective:
  /// ranks of the data axes.
  at::Tensor gather_update(const at::Tensor& own);

 private:
  std::int64_t bytes(c10::ScalarType dtype) const {
    return packing_.numel * static_cast<std::int64_t>(c10::elementSize(dtype));
  }
  void adopt_parameters();
  void allocate_rest();
  bool gradient_is_whole() const;
  void add_gather_stages(
      std::vector<StagedWork::Stage>& stages,
      const at::Tensor& whole,
      layout::Range whole_range,
      int from_level,
      int to_level
  );
  void make_update_tensors();
  void copy_to_runtime();
  void plan_reduction();
  void share_crossing();
  bool sum_joins(const GroupReduction& reduction) const;
  bool widens_to_update() const;
  const at::Tensor& new_partial(std::int64_t numel);
  bool sums_at_rest() const;
  comm::Reduction sum_or_mean(GroupReduction& reduction, bool is_last) const;
  void zero_gradient(layout::Range range);
  void keep_partial(const at::Tensor& sum);
  void bring_to_rest(std::size_t index, const GroupReduction& reduction);

  std::string name_;
  std::string unit_;
  std::vector<LogicalParam> params_;
  GroupDtypes dtypes_;
  bool trainable_;
  const DataParallel* parallel_;
  Counters* counters_;
  comm::Communicator* plan_reduce_;  // null: gradients are complete once the data axes are done
  layout::GroupPacking packing_;
  std::int64_t buffer_numel_;
  std::vector<layout::Range> gaps_;

  RuntimeMode mode_ = RuntimeMode::kResident;
  at::Tensor shard_;  // storage dtype, runtime range; writable
  std::optional<SwappableStorage> whole_;
  void* resident_data_ = nullptr;  // kResident, kShared: what attach() puts under the parameters
  bool update_is_runtime_ = false;
  at::Tensor update_;
  std::vector<UpdateTensor> updates_;
  bool is_publishing_ = false;
  std::optional<std::uint64_t> frozen_version_;  // of update tensors, published while frozen

  SumStep inside_;   ///< inside the supernode
  SumStep between_;  ///< over the `replicate` axis
  bool joins_inside_ = false;
  struct SlotViews {
    const void* data = nullptr;
    std::vector<at::Tensor> views;
  };
  std::deque<SlotViews> slot_cache_;  // referred to by address
  BufferViews slots_;
  BufferViews slices_;
  at::Tensor slot_;
  const std::vector<at::Tensor>* slot_views_ = nullptr;
  std::vector<char> written_;
  std::vector<char> arrived_;
  at::Tensor rest_;
  std::vector<at::Tensor> rest_of_;  // rest_ by update tensor: tensors of their own, since an
                                     // optimizer may detach a gradient in place
  at::Tensor partial_;
  bool partial_live_ = false;
};

}  // namespace hypershard::shard
