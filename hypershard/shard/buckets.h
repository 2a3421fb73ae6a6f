// Buckets: consecutive units whose sums cross between supernodes in one collective.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "hypershard/layout/bucket.h"
#include "hypershard/shard/unit.h"
#include "hypershard/shard/unit_reduction.h"

namespace hypershard::shard {

/// Gathers the reductions of a bucket's units and sends them over the slow link together.
///
/// NOTE [buckets]: which units share a bucket is fixed when the model is sharded, the same on all
/// ranks, and never depends on timing. A bucket crosses once the sums inside the supernode of all
/// its units with trainable parameters are complete; where groups differ in dtype or divisor, in a
/// collective for each kind. Threads: the rank's.
class Buckets {
 public:
  Buckets(
      const std::vector<std::unique_ptr<Unit>>& units, const std::vector<layout::Bucket>& buckets
  );

  /// Returns the largest number of units in a bucket.
  int most_units() const;
  /// Returns the name of a unit's bucket: the units in it.
  const std::string& name_of(int unit) const {
    return buckets_[bucket_of_[static_cast<std::size_t>(unit)]].name;
  }
  /// Begins a backward: counts the units that each bucket must wait for.
  void begin(const std::vector<std::unique_ptr<Unit>>& units);
  /// Takes a reduction that was started; until all of its bucket are, it is held up.
  void post(UnitReduction& reduction);
  /// Takes one whose sums inside the supernode are complete, and starts the collectives of its
  /// bucket if it was the last.
  void cross(UnitReduction& reduction);

 private:
  struct State {
    std::string name;  ///< for messages and the log: of its units
    int expected = 0;
    std::vector<UnitReduction*> posted;
    int complete = 0;
  };
  static void start(State& bucket);
  State& of(const UnitReduction& reduction);

  std::vector<State> buckets_;
  std::vector<std::size_t> bucket_of_;  // by unit
};

}  // namespace hypershard::shard
