// Exact counts of what the engine moved and did on this rank: the numbers that tests and reports
// rely on.
#pragma once

#include <cstdint>

namespace hypershard::shard {

/// Counts since birth or reset. Units: bytes, calls, nanoseconds.
/// Threads: written by the rank's thread only.
struct Counters {
  std::int64_t copied_bytes = 0;       ///< moved outside a collective, a kernel or a publish (plain
                                       ///< layers' gradients into their buffer)
  std::int64_t accumulated_bytes = 0;  ///< added onto gradients that were there already
  std::int64_t zeroed_bytes = 0;       ///< gradient segments nobody wrote, and padding
  std::int64_t gathered_bytes = 0;     ///< received from other ranks by unshards
  std::int64_t reduced_bytes = 0;      ///< gradient bytes handed to reductions
  std::int64_t plan_reduced_bytes = 0;  ///< of reduced slices, handed to sums over plan axes
  std::int64_t published_bytes = 0;     ///< runtime bytes written from update parameters
  std::int64_t unshards =
      0;  ///< units that were made whole (also when shared memory made that free)
  std::int64_t reshards = 0;
  std::int64_t reductions = 0;       ///< units reduced
  std::int64_t unshard_wait_ns = 0;  ///< the compute thread stood waiting for an unshard
  std::int64_t reduce_wait_ns = 0;   ///< … for reductions, gradient buffers included
  std::int64_t window_wait_ns = 0;   ///< … for peers to finish reading
  std::int64_t publish_wait_ns = 0;  ///< … for published parameters, its own part's and its peers'
  std::int64_t inter_publish_wait_ns = 0;  ///< of that, where its own part crosses supernodes
  std::int64_t publish_ns = 0;  ///< wrote runtime parameters and started gathers as a forward began
  std::int64_t live_unsharded_bytes = 0;  ///< in pool buffers now
  std::int64_t peak_unsharded_bytes = 0;
  std::int64_t gradient_buffer_bytes = 0;  ///< unsharded gradient buffers allocated
};

}  // namespace hypershard::shard
