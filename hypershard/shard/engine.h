// The engine: turns a front end's events (before and after a unit's forward, before its backward, a
// gradient's arrival, the end of backward) into unshards, reshards, reductions and publishes. It
// works on named tensors and events only; modules are the business of fully_shard.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/nn/recompute.h"
#include "hypershard/shard/buckets.h"
#include "hypershard/shard/buffer_pool.h"
#include "hypershard/shard/counters.h"
#include "hypershard/shard/data_parallel.h"
#include "hypershard/shard/gradient_buffers.h"
#include "hypershard/shard/options.h"
#include "hypershard/shard/publisher.h"
#include "hypershard/shard/unit.h"

namespace hypershard::shard {

/// A parameter as a front end hands it over.
struct UnitParam {
  LogicalParam param;
  GroupDtypes dtypes;
};

/// A unit as a front end hands it over; the first unit is the root.
struct UnitSpec {
  std::string path;  ///< module path; "" is printed as `root`
  std::vector<UnitParam> params;
};

/// Drives the units of one model on one rank.
///
/// NOTE [order of collectives]: unshards of a pass are started strictly in the order that the first
/// forward recorded (declaration order until then), reductions strictly in the reverse order of
/// first use; a unit that is skipped on this rank is started all the same when a later one is
/// needed or the pass ends, and contributes zero gradients. So ranks whose control flow differs
/// still issue the same collectives.
///
/// NOTE [when a unit posts]: its reduction may start once every trainable parameter's
/// AccumulateGrad node has run. That node runs once a backward for a unit without recompute,
/// however often it was used. For a unit inside recompute segments it runs once a segment, so the
/// last segment counts. For a unit that holds segments, or is used both ways, it waits for the end
/// of backward.
///
/// NOTE [write window]: update parameters may be written from the end of a reducing backward (or of
/// a forward without gradients, or sync_runtime) until the next root forward. It opens with a
/// rendezvous of the ranks that share the runtime buffer, and once the rank's own update parameters
/// are no longer being sent: nobody writes while a peer may read. It closes unit by unit (NOTE
/// [publishing]): a unit's forward waits for its own publish and, of the ranks that share it, for
/// every owner's; the last one has arrived when the outermost forward ends, so that publishes are
/// under way during forwards only (and while a unit is unsharded by hand). `update_in_backward`
/// writes earlier, a unit at a time: once a unit's reduction has ended every rank has posted it,
/// and what posts is not read again before the next root forward. Some of these units are published
/// at once (NOTE [early publishes]); they have arrived when backward ends.
///
/// Its own operators, whose order depends on timing, are kept from whoever watches the program's
/// (see nn/watched_operators.h); casts of inputs and outputs are the program's.
///
/// Life cycle: constructed collectively; events come from one thread; an exception from an event
/// leaves the iteration, which the next root forward starts afresh. Threads: one, the rank's.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  /// Collective: ranks of the data axes, and of the plan axes (NOTE [plan axes]) if there are any.
  /// Errors: InvalidArgument for counts out of range; Unsupported if sharing is demanded and
  /// impossible.
  Engine(DataParallel parallel, FullyShardOptions options, std::vector<UnitSpec> specs);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Takes over the gradients of the trainable parameters; once, after construction (the hooks
  /// refer to this object).
  void hook_all_parameters() { refresh_trainability(); }

  // --- events
  /// A unit's forward begins: makes it whole and casts its inputs.
  void pre_forward(int unit, std::span<at::Tensor* const> inputs);
  /// Its forward ended: hooks the outputs and reshards by policy.
  void post_forward(int unit, std::span<at::Tensor* const> outputs);
  /// Its forward threw.
  void forward_failed() noexcept;
  /// A gradient reached one of its outputs: makes it whole again and gives it a gradient buffer.
  void pre_backward(int unit);
  /// A unit's input gradients are complete: nothing of its backward is left.
  void inputs_done(int unit);
  /// `gradient` is undefined if a layer wrote it through its slot, or there is none.
  void gradient_ready(int unit, std::size_t group, std::size_t param, const at::Tensor& gradient);
  /// The outermost backward ended: finishes every reduction and opens the write window.
  void end_backward();
  /// A recompute segment that the unit ran in is about to run again, or has ended its backward.
  void segment_starts_again(int unit);
  /// The second life of such a segment ended.
  void segment_done(int unit) noexcept;

  // --- by hand
  /// Makes a unit whole until reshard(). Collective: ranks of the data axes. Errors: CommError.
  void unshard(int unit);
  /// Takes it apart again. Collective: ranks of the data axes; between steps, the last unit's opens
  /// the write window.
  void reshard(int unit);
  /// Makes the runtime parameters current: publishes, and closes the write window. Collective:
  /// ranks of the data axes.
  void sync_runtime();
  /// Waits until this rank may write update parameters. Errors: InvalidArgument during a forward,
  /// and from a forward with gradients to the end of a backward that reduced over all data axes.
  void begin_update();
  /// To be called first by what gathers over the data axes by itself, so that all ranks keep one
  /// order: waits for the publishes that are under way. Errors: CommError; InvalidArgument in a
  /// backward that publishes, where how many are is a matter of timing.
  void begin_gather();
  /// Drops all gradients: reduced, partly reduced and kept from micro-batches without reduction.
  /// Errors: InvalidArgument during a backward.
  void discard_gradients();

  // --- settings that may change between iterations
  bool reduce_gradients = true;  ///< off: gradients stay local and add up
  bool cross_replicas = true;    ///< off: reduce inside `shard` only and keep the sum
  double gradient_divisor = 0;   ///< 0: the number of ranks that see different data
  /// Called in the middle of backward when a unit's gradients have come to rest, reduced over all
  /// axes, as grad() of its update tensors. It may write those: every rank is done with the unit's
  /// parameters until the next forward. The gradients are gone when it returns, and with them the
  /// memory that would have kept them to the end of backward. nullptr: gradients stay.
  std::function<void(const Unit& unit)> update_in_backward;

  const DataParallel& parallel() const { return parallel_; }
  const FullyShardOptions& options() const { return options_; }
  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  Counters& counters() { return counters_; }
  const Publisher& publisher() const { return *publisher_; }
  const std::vector<int>& recorded_order() const { return order_; }
  /// Returns how many gradient buffers units of one size share.
  int gradient_buffer_depth() const;
  /// The same for the slices that cross supernodes.
  int slice_depth() const;
  const Buckets& buckets() const { return *buckets_; }
  const std::string& why_not_shared() const { return why_not_shared_; }
  /// Tells the engine that meta parameters have been given values.
  void mark_initialised() { uninitialised_.clear(); }
  /// Gradient destination of a parameter for layers that write their own, undefined outside a
  /// backward that wants it; see nn::GradientSlot.
  std::pair<at::Tensor, bool> claim_gradient(int unit, std::size_t group, std::size_t param);

 private:
  enum class Pass : std::uint8_t { kNone, kForward, kBackward };
  void build_units(std::vector<UnitSpec> specs);
  void place_groups();
  void make_shared_pool();
  void agree_on_buffer_sizes();
  void make_buckets();
  void make_gradient_buffers();
  void hook_parameters(Unit& unit, std::size_t group);
  void refresh_trainability();

  void begin_forward(int unit);
  void end_forward();
  void begin_backward();
  void need(int unit);
  void start_up_to(std::size_t end);
  void start(Unit& unit);
  void start_gathers();
  bool is_unsharding(int unit) const;
  void finish(int unit);
  void release(Unit& unit);
  std::shared_ptr<const std::function<void()>> event(int unit, void (Engine::*method)(int));
  void hook_outputs(int unit, std::span<at::Tensor* const> outputs);
  void hook_inputs(int unit, std::span<at::Tensor* const> inputs);
  void cast_inputs(const Unit& unit, std::span<at::Tensor* const> inputs) const;
  void agree_on_order();
  void plan_early_publishes();
  bool is_published_early(const Unit& unit) const;
  void publish_rest_early();
  void set_order(const std::vector<int>& begins, const std::vector<int>& ends);
  void expect_gradients(Unit& unit);
  bool may_post_early(const Unit& unit) const;
  void post_if_complete(Unit& unit);
  void post(Unit& unit);
  void start_ready_reductions();
  void progress();
  void leave_buffer(UnitReduction& reduction);
  void finish_reduction(UnitReduction& reduction);
  bool advance_inside(bool block);
  bool advance_front(bool block);
  void abandon_front();
  void pop_reduction();
  void update_unit(Unit& unit);
  void end_backward_span(int unit);
  void reset_iteration();
  void recover();
  void finish_publishes();
  void drop_gradients();
  bool reduces_over_all_axes() const;
  void renew_tombstones();
  void take_buffer(Unit& unit);

  void open_window();
  void close_window(bool keep);
  std::uint64_t update_versions() const;

  DataParallel parallel_;
  FullyShardOptions options_;
  Counters counters_;
  BufferPool pool_;
  std::unique_ptr<SharedUnitPool> shared_pool_;  ///< null if nothing is made whole there
  std::vector<std::unique_ptr<Unit>> units_;
  std::unique_ptr<GradientBuffers> gradient_buffers_;
  std::unique_ptr<GradientBuffers> slices_;  ///< of sums that cross supernodes
  std::unique_ptr<Buckets> buckets_;
  std::string why_not_shared_;
  std::vector<std::string> uninitialised_;

  // shared runtime buffer
  std::shared_ptr<comm::SharedBuffer> shared_;
  std::shared_ptr<comm::EpochBoard> epochs_;
  std::uint64_t released_epoch_ = 0;
  std::unique_ptr<Publisher> publisher_;
  std::vector<bool> early_units_;       // what a backward that updates all units publishes
  bool updates_in_backward_ = false;    // as this backward began
  bool publishes_in_backward_ = false;  // and some of early_units_ are to be published
  std::uint64_t versions_after_backward_ = 0;
  bool window_open_ = true;
  bool may_update_ = true;  ///< no gradient of a forward that ran is still to come
  bool needs_publish_ = true;
  bool publish_frozen_ = false;
  int torn_units_ = 0;  ///< posted in a backward that failed and updates: a mix of two steps
  std::uint64_t seen_versions_ = 0;

  // the pass that runs
  Pass pass_ = Pass::kNone;
  std::vector<int> stack_;               // units whose forward runs, outermost first
  std::vector<OpenSpan> forward_spans_;  // beside stack_
  int backward_unit_ = -1;               // whose backward came last: its span is open
  bool root_pass_ =
      false;  // the outermost unit of this pass is the root: the recorded order applies
  bool training_pass_ = false;
  std::vector<int> order_;  // unshards of a forward, in order
  std::vector<int> backward_order_;
  std::vector<int> reduce_order_;
  bool order_agreed_ = false;
  std::vector<int> recording_;       // units as their forwards begin
  std::vector<int> recording_ends_;  // and end
  std::vector<int> pass_order_;
  std::deque<int> unsharding_;  // started and not finished, oldest first; the last ones may wait
                                // for their publish
  std::size_t started_ = 0;     // entries of pass_order_ passed by
  bool in_backward_ = false;
  std::size_t next_reduction_ = 0;
  std::deque<std::shared_ptr<UnitReduction>> reductions_;  ///< not finished, oldest first
  std::size_t num_inside_done_ = 0;  ///< of those, whose sums inside the supernode are complete

  /// What stands in for the gradient of a runtime parameter, so that its use is found out.
  struct Tombstone {
    at::Tensor parameter;
    at::Tensor gradient;
  };
  std::vector<Tombstone> tombstones_;
  std::vector<std::shared_ptr<void>> gradient_hooks_;  // hooks and slots of parameters, kept alive
  std::vector<std::shared_ptr<nn::RecomputeObserver>> segment_observers_;  // by unit
  struct BackwardEvents {
    std::shared_ptr<const std::function<void()>> pre_backward;
    std::shared_ptr<const std::function<void()>> inputs_done;
  };
  std::vector<BackwardEvents> events_;  // by unit
};

}  // namespace hypershard::shard
