// Why: what a collective must do does not depend on the back end, so the cases are written once
// and run over every one of them, by threads and by processes. Test support; not installed.
#pragma once

#include <cstdint>

#include "hypershard/comm/communicator.h"

namespace hypershard::comm::testing_cases {

/// Runs every operation over `dtype` with even, uneven and zero counts and checks every element
/// against its closed form.
/// Collective: yes. Errors: InternalError at the first difference, as in all cases.
void check_all_operations(Communicator& communicator, at::ScalarType dtype);

/// Runs tensors of a megabyte and more, beyond a small staging area.
void check_large(Communicator& communicator);

/// Checks that sums have the bits of a sum in rank order, whatever the timing.
void check_rank_order(Communicator& communicator);

/// Reduces several segments at once: even, uneven, empty, small beside large, in place and apart.
void check_segments(Communicator& communicator);

/// Checks that values are rounded to the wire dtype once, the result has the bits that follow from
/// that whichever rank owns it, and the log and the counters call the bytes that travel.
void check_wire_dtype(Communicator& communicator);

/// Checks sent and received bytes of every operation.
void check_traffic(Communicator& communicator);

/// Runs `rounds` random collectives, several in flight, chosen by `seed` alike on all ranks.
void check_random(Communicator& communicator, std::uint64_t seed, int rounds);

/// Checks that a rank which waits on `first` goes on with its part of what it has begun on
/// `second`, by a wait that would never end otherwise. Both join the same ranks in the same order.
void check_waits_work_elsewhere(Communicator& first, Communicator& second);

/// Checks shared buffers, symmetric arenas and epoch boards. Needs has_shared_memory().
void check_shared_memory(Communicator& communicator);

}  // namespace hypershard::comm::testing_cases
