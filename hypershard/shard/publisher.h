// Brings updated parameters to where kernels read them, unit by unit, while the forward that needs
// them already runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "hypershard/comm/arena.h"
#include "hypershard/comm/work.h"
#include "hypershard/core/trace.h"
#include "hypershard/shard/counters.h"
#include "hypershard/shard/data_parallel.h"
#include "hypershard/shard/unit.h"

namespace hypershard::shard {

/// Rows of the epoch board of a shared runtime buffer: who has read everything, and for each unit
/// who has published it.
inline constexpr int kReleasedRow = 0;
inline int published_row(int unit) {
  return 1 + unit;
}

/// The publishes of one write window.
///
/// NOTE [publishing]: when the window closes, every rank writes its own part of the runtime
/// parameters, and starts to gather what finer cuts of the update plane leave to others: unit after
/// unit, the first needed first, on all ranks in one order. A unit may be read once its own gather
/// has arrived and, in a buffer that ranks share, once every rank has said the same of its part.
/// Later stages of gathers over several axes start oldest first, when an event of the engine looks
/// at them. Update parameters are what is sent where planes are one memory: nothing may write them
/// before release().
///
/// NOTE [early publishes]: units that an optimizer updates inside backward may be published at
/// once, in gaps that gradients leave on a slow link and the next forward would not. Which units do
/// is fixed when the order of units is, so all ranks issue the same gathers in one order; the next
/// window only publishes the others. By then what was sent early must not have changed.
///
/// Life cycle: begin(), await() for what is needed, release(); and again. Threads: the rank's.
class Publisher {
 public:
  /// `epochs` may be null: then no rank reads what another one writes.
  Publisher(
      const std::vector<std::unique_ptr<Unit>>* units,
      const DataParallel& parallel,
      std::shared_ptr<comm::EpochBoard> epochs,
      Counters* counters
  );

  /// Tells whether publishes cross a slow link in one stage, and gradients are scattered over the
  /// same: then some may start in backward.
  bool may_start_early() const { return may_start_early_; }
  /// Publishes a unit that nobody reads any more in this backward; begin() will leave it out. It
  /// has arrived after release(), and until then nobody may wait for it: a peer may begin it late.
  /// Collective: ranks of the data axes, once the last flights are released. Errors: CommError.
  void begin_early(int unit);
  /// Tells whether a unit, or any, was published early for the next window.
  bool is_early(int unit) const { return early_[static_cast<std::size_t>(unit)]; }
  bool has_early() const { return num_early_ > 0; }
  /// Makes begin() publish all units again.
  void forget_early();
  /// Publishes the units in `order`, or only says that there is nothing new. Parameters that were
  /// published since they are frozen go along if `even_frozen`.
  /// Collective: ranks of the data axes. Errors: CommError.
  void begin(const std::vector<int>& order, bool written, bool even_frozen);
  /// Tells whether this rank's part of a unit is current.
  bool has_arrived(const Unit& unit) const { return arrived_ >= turn(unit); }
  /// Waits until this rank's part of a unit is current. Errors: CommError.
  void await_own_part(const Unit& unit);
  /// Waits until all of a unit that this rank can read is current. Errors: CommError.
  void await(const Unit& unit);
  /// Takes note of what has arrived, without blocking; peers may wait for that. Errors: CommError.
  void advance();
  /// Waits until every unit's own part is current. Errors: CommError.
  void await_all();
  /// Waits until update parameters may be written again. Errors: CommError.
  void release();

 private:
  struct Flight {
    int unit = 0;
    std::uint64_t epoch = 0;
    comm::WorkPtr work;  // null until it is started
    OpenSpan span;
  };
  Unit& unit(int index) const { return *(*units_)[static_cast<std::size_t>(index)]; }
  std::size_t turn(const Unit& unit) const {
    return turns_[static_cast<std::size_t>(unit.index())];
  }
  void start_up_to(std::size_t end);
  void wait_up_to(std::size_t end);
  void take_oldest();
  void announce(int unit, std::uint64_t epoch);

  const std::vector<std::unique_ptr<Unit>>* units_;
  std::shared_ptr<comm::EpochBoard> epochs_;
  Counters* counters_;
  bool gathers_ = false;  // the update plane is cut finer than the runtime plane
  bool crosses_ = false;  // and between supernodes
  bool may_start_early_ = false;
  std::vector<bool> early_;  // by unit: published for the next window
  int num_early_ = 0;
  std::size_t ahead_ = 1;            // how many gathers may be started before the oldest is needed
  std::uint64_t epoch_ = 0;          // of the last begin()
  std::vector<std::uint64_t> seen_;  // by unit: the epoch that all ranks are known to have reached

  std::vector<Flight> flights_;     // in the order of begin(), or of begin_early()
  std::vector<std::size_t> turns_;  // by unit: place in flights_ + 1; 0 if begin() left it out
  std::size_t started_ = 0;
  std::size_t arrived_ = 0;
};

}  // namespace hypershard::shard
