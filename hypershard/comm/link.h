// How fast the link under a communicator is: what the size of a fused reduction is chosen from.
#pragma once

#include "hypershard/comm/communicator.h"

namespace hypershard::comm {

/// A link as the slowest rank of a group sees it.
struct LinkSpeed {
  double latency_s = 0;    ///< of a collective that moves next to nothing
  double bytes_per_s = 0;  ///< that each rank sends while it receives as many
};

/// Measures latency and bandwidth by collectives of growing size.
///
/// Takes ten to twenty milliseconds, and as long as the link needs for 4 MiB. Groups
/// that share a link measure their part of it if all do so at once. A group of one rank has no
/// link: latency 0, infinite bandwidth.
/// Collective: yes, and with nothing else in flight; all ranks get the same numbers.
/// Memory: 9 MiB on the CPU while it lasts.
/// Errors: CommError as for Work::wait().
LinkSpeed measure_link(Communicator& communicator);

}  // namespace hypershard::comm
