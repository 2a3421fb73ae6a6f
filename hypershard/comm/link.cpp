// Why: see link.h. Every decision is taken from times on which all ranks have agreed.
#include "hypershard/comm/link.h"

#include <algorithm>
#include <limits>
#include <vector>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include "hypershard/core/clock.h"

namespace hypershard::comm {
namespace {

constexpr int kNumPings = 10;
constexpr std::int64_t kSmallBytes = 64 << 10;
// Shapers and sockets take the first megabyte at any speed: a train of exchanges with no pause
// between them shows the link's own speed in those that come later.
constexpr std::int64_t kChunkBytes = 256 << 10;
constexpr std::size_t kNumChunks = 16;
constexpr std::size_t kNumLate = 5;  // twice that many are timed
constexpr int kMaxTrains = 3;
constexpr double kEnoughS = 20e-3;

/// Returns the longest of all ranks' times.
double agree(Communicator& communicator, double seconds) {
  const at::Tensor time = at::full({1}, seconds, at::TensorOptions(at::kDouble));
  communicator.all_reduce(time, ReduceOp::kMax, "link probe")->wait();
  return *time.const_data_ptr<double>();
}

double ping(Communicator& communicator) {
  const at::Tensor tokens = at::zeros({communicator.size()}, at::TensorOptions(at::kByte));
  const at::Tensor own = tokens.narrow(0, communicator.rank(), 1);
  double shortest = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kNumPings; ++i) {
    const Stopwatch watch;
    communicator.all_gather(tokens, own, {}, "link probe")->wait();
    shortest = std::min(shortest, watch.elapsed_s());
  }
  return agree(communicator, shortest);
}

/// Returns how long it takes that every rank sends `bytes` and gets as many.
double exchange(Communicator& communicator, std::int64_t bytes) {
  const std::int64_t numel = bytes / (communicator.size() - 1) * communicator.size();
  const at::Tensor input = at::zeros({numel}, at::TensorOptions(at::kByte));
  const at::Tensor output = at::zeros({numel}, at::TensorOptions(at::kByte));
  double shortest = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 3; ++i) {
    communicator.barrier("link probe")->wait();
    const Stopwatch watch;
    communicator.all_to_all(output, input, {}, {}, "link probe")->wait();
    shortest = std::min(shortest, watch.elapsed_s());
  }
  return agree(communicator, shortest);
}

/// Returns how long a chunk takes when many follow each other, all of them late by `latency_s`.
double chunk_time(
    Communicator& communicator, const at::Tensor& output, const at::Tensor& input, double latency_s
) {
  const std::int64_t numel = kChunkBytes / (communicator.size() - 1) * communicator.size();
  const at::Tensor from = input.narrow(0, 0, numel);
  communicator.barrier("link probe")->wait();
  const Stopwatch watch;
  std::vector<WorkPtr> works;
  for (std::size_t i = 0; i < kNumChunks; ++i) {
    const at::Tensor to = output.narrow(0, static_cast<std::int64_t>(i) * numel, numel);
    works.push_back(communicator.all_to_all(to, from, {}, {}, "link probe"));
  }
  // Means of several ends, since a thread may wake late: of the last ones and of those before.
  double late_s = 0;
  double early_s = 0;
  for (std::size_t i = 0; i < kNumChunks; ++i) {
    works[i]->wait();
    if (i + kNumLate >= kNumChunks) {
      late_s += watch.elapsed_s() / kNumLate;
    } else if (i + 2 * kNumLate >= kNumChunks) {
      early_s += watch.elapsed_s() / kNumLate;
    }
  }
  // Ends that a fast link brings while this thread wakes say nothing of their distance.
  const double mean_s = std::max(0.0, watch.elapsed_s() - latency_s) / kNumChunks;
  return agree(communicator, std::max(mean_s, (late_s - early_s) / kNumLate));
}

}  // namespace

LinkSpeed measure_link(Communicator& communicator) {
  if (communicator.size() == 1) {
    return {.latency_s = 0, .bytes_per_s = std::numeric_limits<double>::infinity()};
  }
  LinkSpeed speed{.latency_s = ping(communicator)};
  const std::int64_t others = communicator.size() - 1;
  double total_s = exchange(communicator, kSmallBytes);
  const double carried_s = total_s - speed.latency_s;
  if (carried_s > kEnoughS) {  // a slow link, on which a train would take seconds
    speed.bytes_per_s = static_cast<double>(kSmallBytes / others * others) / carried_s;
    return speed;
  }
  const at::TensorOptions bytes_options(at::kByte);
  const at::Tensor input = at::zeros({2 * kChunkBytes}, bytes_options);
  const at::Tensor output =
      at::zeros({2 * kChunkBytes * static_cast<std::int64_t>(kNumChunks)}, bytes_options);
  double shortest_s = std::numeric_limits<double>::infinity();
  for (int train = 0; train < kMaxTrains && (train == 0 || total_s < kEnoughS); ++train) {
    const double time_s = chunk_time(communicator, output, input, speed.latency_s);
    total_s += time_s * static_cast<double>(kNumChunks);
    shortest_s = std::min(shortest_s, time_s);
  }
  speed.bytes_per_s = static_cast<double>(kChunkBytes / others * others) / shortest_s;
  return speed;
}

}  // namespace hypershard::comm
