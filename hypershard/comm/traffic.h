// Why: how many bytes a collective puts on a network is arithmetic that every rank can do for
// itself; written once, so that plans, counters and the messages themselves agree.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace hypershard::comm {

/// Up to this many bytes that a rank sends to all others, one round of messages beats two.
inline constexpr std::int64_t kOneRoundBytes = 256 * 1024;

/// Payload that one rank exchanges with the others of its group. Units: bytes, or what the counts
/// are in.
struct Traffic {
  std::int64_t sent = 0;
  std::int64_t received = 0;
};

/// Returns how an all-reduce of two rounds is cut: even slices that start at cache lines.
std::vector<std::int64_t> all_reduce_slices(std::int64_t numel, int num_ranks);

/// Tells whether each rank sends its whole tensor to all others.
bool is_one_round(std::int64_t bytes, int num_ranks);
/// Tells whether a broadcast's slices are forwarded by the ranks that get them first.
bool is_forwarded(std::int64_t bytes, int num_ranks);

/// Returns what `rank` sends and gets when everybody sends its slice to all.
Traffic gather_traffic(std::span<const std::int64_t> counts, int rank);
/// Returns what `rank` sends and gets when everybody sends each his slice.
Traffic scatter_traffic(std::span<const std::int64_t> counts, int rank);
/// Returns what `rank` sends and gets when all get the sum, in bytes.
Traffic all_reduce_traffic(std::int64_t numel, std::int64_t element_bytes, int rank, int num_ranks);
/// Returns what `rank` sends and gets when all get what `root` has, in bytes.
Traffic broadcast_traffic(std::int64_t bytes, int root, int rank, int num_ranks);

}  // namespace hypershard::comm
