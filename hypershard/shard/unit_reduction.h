// A unit's reduction on its way: inside the supernode, between supernodes, over plan axes, to rest.
// What each step does to a group is the group's business (group_gradient.cpp); in what order the
// units take them is the engine's.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "hypershard/comm/work.h"
#include "hypershard/core/trace.h"

namespace hypershard::shard {

class ParamGroup;
class Unit;

/// How a gradient buffer is reduced.
struct ReduceOptions {
  double divisor = 1;
  bool cross = true;  ///< false stops before the `replicate` axis and keeps the partial sum
  /// Leaves the result where it was reduced, if dtypes allow: it must be used up before the buffer
  /// is given to another unit.
  bool rest_in_buffer = false;
};

/// Where a group's sum is brought by the last step, and what that step does with it.
enum class Rest : std::uint8_t {
  kArrived,    ///< in the gradient plane already
  kElsewhere,  ///< to be copied or added there
  kInBuffer,   ///< to be used where it is
  kPartial,    ///< kept beside the gradient plane: it was not summed over all axes
};

/// A group's share of a reduction. The tensors are views of buffers that others own.
struct GroupReduction {
  ParamGroup* group = nullptr;
  at::Tensor sum;    ///< 1-D, reduce dtype: what is summed so far, at first the gradient buffer
  at::Tensor whole;  ///< the gradient buffer, if the sum is to be joined there
  at::Tensor slice;  ///< where the sum inside the supernode is to go; undefined: in place
  comm::WorkPtr work;
  double divisor = 1;
  Rest rest = Rest::kElsewhere;
  bool fresh = false;  ///< nothing is at rest yet, so that the sum may go straight there
};

/// One unit's reduction. Made when the unit posts, shared by the engine (until it is finished) and
/// the gradient buffer it reads (until peers have read it). Threads: the rank's.
///
/// NOTE [steps of a reduction]: every collective starts in the order of the units, on all ranks
/// alike: those inside the supernode when the unit posts; those between supernodes once the sums
/// inside are complete for this unit, all before it and all of its bucket; sums over plan axes,
/// then gathers of what all ranks of the supernode are to have whole, and what follows, once those
/// between supernodes are. So a unit that is on the slow link holds back nothing but what needs its
/// result.
class UnitReduction {
 public:
  enum class Step : std::uint8_t { kInside, kWaiting, kBetween, kPlan, kJoin, kFinished };

  explicit UnitReduction(Unit* unit) : unit_(unit) { span_.begin(); }

  Unit& unit() const { return *unit_; }
  Step step() const { return step_; }
  c10::SmallVector<GroupReduction, 2>& groups() { return groups_; }

  /// Starts the collectives inside the supernode.
  void start_inside();
  /// The sums inside are complete; those of others in its bucket may not be.
  void inside_done();
  /// The collectives between supernodes, if any, have been started.
  void crosses() { step_ = Step::kBetween; }
  /// Starts the sums over plan axes.
  void start_plan();
  /// Starts to join what is cut among the ranks of the supernode only to cross.
  void start_join();
  /// Brings the sums to rest as gradients of the update tensors.
  void finish();

  /// Advances the collectives of the current step; true once they are complete.
  bool test();
  void wait();
  /// Tells whether the gradient buffer is free once wait_released() returns.
  bool has_left_buffer() const;
  /// Tells whether that is so before the sums have crossed between supernodes.
  bool leaves_early() const;
  /// A unit of its bucket has not posted: waiting for the end would last for ever.
  bool held_up() const { return held_up_; }
  void set_held_up(bool held_up) { held_up_ = held_up; }
  /// Waits until peers have read this rank's gradients; for one that has left its buffer.
  void wait_released();
  /// The same as far as its gradient buffer goes.
  void wait_left();

  /// Shows in the trace that the sums inside the supernode are complete, and what follows as done.
  void trace_inside();
  void trace_end();

 private:
  void keep_works();

  bool sums_between() const;

  Unit* unit_;
  OpenSpan span_;  // of what is under way: inside the supernode, then beyond
  std::uint64_t flow_ = 0;
  c10::SmallVector<GroupReduction, 2> groups_;
  // Complete, but peers may still read what they summed: the buffer, or memory beyond it.
  c10::SmallVector<comm::WorkPtr, 2> read_inside_;
  c10::SmallVector<comm::WorkPtr, 2> read_;
  Step step_ = Step::kInside;
  bool held_up_ = false;
};

}  // namespace hypershard::shard
