// Why: see traffic.h. Follows what message_collectives.cpp sends.
#include "hypershard/comm/traffic.h"

#include <algorithm>
#include <numeric>

namespace hypershard::comm {
namespace {

constexpr std::int64_t kSliceElements = 64;

std::int64_t sum(std::span<const std::int64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

}  // namespace

std::vector<std::int64_t> all_reduce_slices(std::int64_t numel, int num_ranks) {
  const std::int64_t step = num_ranks * kSliceElements;
  const std::int64_t each = (numel + step - 1) / step * kSliceElements;
  std::vector<std::int64_t> slices;
  for (int slice = 0; slice < num_ranks; ++slice) {
    slices.push_back(std::clamp<std::int64_t>(numel - slice * each, 0, each));
  }
  return slices;
}

bool is_one_round(std::int64_t bytes, int num_ranks) {
  return bytes * (num_ranks - 1) <= kOneRoundBytes;
}

bool is_forwarded(std::int64_t bytes, int num_ranks) {
  return num_ranks > 2 && !is_one_round(bytes, num_ranks);
}

Traffic gather_traffic(std::span<const std::int64_t> counts, int rank) {
  const std::int64_t own = counts[static_cast<std::size_t>(rank)];
  return {.sent = own * (std::ssize(counts) - 1), .received = sum(counts) - own};
}

Traffic scatter_traffic(std::span<const std::int64_t> counts, int rank) {
  const Traffic other_way = gather_traffic(counts, rank);
  return {.sent = other_way.received, .received = other_way.sent};
}

Traffic all_reduce_traffic(
    std::int64_t numel, std::int64_t element_bytes, int rank, int num_ranks
) {
  const std::int64_t bytes = numel * element_bytes;
  if (is_one_round(bytes, num_ranks)) {
    return {.sent = bytes * (num_ranks - 1), .received = bytes * (num_ranks - 1)};
  }
  const Traffic round = gather_traffic(all_reduce_slices(numel, num_ranks), rank);
  const std::int64_t both_rounds = (round.sent + round.received) * element_bytes;
  return {.sent = both_rounds, .received = both_rounds};
}

Traffic broadcast_traffic(std::int64_t bytes, int root, int rank, int num_ranks) {
  if (!is_forwarded(bytes, num_ranks)) {
    return rank == root ? Traffic{.sent = bytes * (num_ranks - 1)} : Traffic{.received = bytes};
  }
  if (rank == root) {
    return {.sent = bytes};
  }
  const std::int64_t each = (bytes + num_ranks - 2) / (num_ranks - 1);
  const std::int64_t slice = rank < root ? rank : rank - 1;
  const auto own = std::clamp<std::int64_t>(bytes - slice * each, 0, each);
  return {.sent = own * (num_ranks - 2), .received = bytes};
}

}  // namespace hypershard::comm
