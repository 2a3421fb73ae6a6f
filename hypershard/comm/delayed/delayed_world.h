// Why: on a device or a slow link a result is late, and only then does a missing wait show. This
// wrapper makes results late on CPU, in a random order that a seed repeats. For tests.
#pragma once

#include <cstdint>
#include <memory>

#include "hypershard/comm/world.h"

namespace hypershard::comm {

/// Wraps a rank's world so that its collectives complete late.
///
/// A thread of the rank runs the collectives of `inner`, in order, on copies. Results stay there
/// until the caller waits: then works complete one by one, of communicators picked at random, until
/// the awaited one has; only its own communicator's order is kept. test() answers false a random
/// number of times first. Until a work is complete its output is NaN (if floating; the part that is
/// also the input keeps its value).
/// A picked work that peers have not started is passed over if the awaited one could be complete.
/// The same seed and the same calls give the same order, but for that and for test(), which never
/// blocks.
/// No shared memory. Errors: InvalidArgument from wait() if an input was written to before its work
/// was complete; else as `inner`.
/// Threads: one calling thread, as every world; `inner` must not be used by anybody else.
std::shared_ptr<World> make_delayed_world(std::shared_ptr<World> inner, std::uint64_t seed);

}  // namespace hypershard::comm
