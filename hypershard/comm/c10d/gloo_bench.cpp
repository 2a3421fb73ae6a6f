// Our collectives over Gloo beside Gloo's own, in one run: a line of JSON for each.
//
//   comm_c10d_gloo_bench [--ranks 2] [--mib 64] [--rounds 15]
//
// Results are checked first; then ours and theirs take turns. Times are of the whole collective on
// rank 0. Buckets are reduce-scatters of several segments: fused, and one by one. Across hosts or
// network namespaces start the ranks by hand, with RANK, MASTER_ADDR, MASTER_PORT and
// GLOO_SOCKET_IFNAME.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "hypershard/comm/c10d/gloo_communicator.h"
#include "hypershard/comm/link.h"
#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"
#include "hypershard/core/process.h"

namespace hypershard::comm {
namespace {

struct BenchOptions {
  int num_ranks = 2;
  std::int64_t mib = 64;
  int num_rounds = 15;
};

BenchOptions parse(int argc, char** argv) {
  BenchOptions options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const int value = std::atoi(argv[i + 1]);
    HS_CHECK(value > 0, "bench: ", name, " ", argv[i + 1], " is not a positive number");
    if (name == "--ranks") {
      options.num_ranks = value;
    } else if (name == "--mib") {
      options.mib = value;
    } else if (name == "--rounds") {
      options.num_rounds = value;
    } else {
      HS_FAIL(
          InvalidArgument, "bench: unknown option ", name, " (expected --ranks, --mib, --rounds)"
      );
    }
  }
  return options;
}

int spawn_ranks(int argc, char** argv, int num_ranks) {
  const std::string port = std::to_string(free_loopback_port());
  std::vector<std::unique_ptr<ChildProcess>> children;
  for (int rank = 0; rank < num_ranks; ++rank) {
    SpawnOptions spawn;
    spawn.argv = {program_path()};
    spawn.argv.insert(spawn.argv.end(), argv + 1, argv + argc);
    spawn.env = {
        {"RANK", std::to_string(rank)},
        {"WORLD_SIZE", std::to_string(num_ranks)},
        {"MASTER_PORT", port},
        {"OMP_NUM_THREADS", "1"}
    };
    children.push_back(std::make_unique<ChildProcess>(spawn));
  }
  int failed = 0;
  for (const auto& child : children) {
    failed += child->wait().is_success() ? 0 : 1;
  }
  return failed;
}

// One collective, ours or theirs, with what it should leave in its output.
struct Candidate {
  std::string op;
  std::string who;
  std::function<void()> run;
  std::function<bool()> is_right;
  std::vector<double> times_ms = {};
  CommStats moved = {};
};

class Bench {
 public:
  Bench(const BenchOptions& options, int rank);
  void run();

 private:
  void add(
      std::string op,
      std::string who,
      std::function<void()> body,
      const at::Tensor& output,
      double expected
  );
  void add_bucket(const std::string& name, int num_segments, std::int64_t numel);
  void report() const;

  BenchOptions options_;
  int rank_;
  std::shared_ptr<Communicator> ours_;
  c10::intrusive_ptr<::c10d::ProcessGroupGloo> theirs_;
  at::Tensor whole_;
  at::Tensor slice_;
  std::vector<Candidate> candidates_;
};

Bench::Bench(const BenchOptions& options, int rank) : options_(options), rank_(rank) {
  ::c10d::TCPStoreOptions store_options;
  store_options.port = static_cast<std::uint16_t>(std::atoi(std::getenv("MASTER_PORT")));
  store_options.isServer = rank == 0;
  store_options.waitWorkers = false;
  const char* address = std::getenv("MASTER_ADDR");
  auto store = c10::make_intrusive<::c10d::TCPStore>(
      address != nullptr ? address : "127.0.0.1", store_options
  );
  GroupInfo info;
  info.name = "bench";
  info.rank = rank;
  for (int i = 0; i < options.num_ranks; ++i) {
    info.global_ranks.push_back(i);
  }
  ours_ = make_gloo_communicator(info, store, "ours");
  auto gloo = ::c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(60));
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  gloo->devices.push_back(
      interface != nullptr ? ::c10d::ProcessGroupGloo::createDeviceForInterface(interface)
                           : ::c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")
  );
  theirs_ = c10::make_intrusive<::c10d::ProcessGroupGloo>(store, rank, options.num_ranks, gloo);
  const std::int64_t numel = (options.mib << 20) / 4 / options.num_ranks * options.num_ranks;
  whole_ = at::ones({numel});
  slice_ = at::ones({numel / options.num_ranks});
}

void Bench::add(
    std::string op,
    std::string who,
    std::function<void()> body,
    const at::Tensor& output,
    double expected
) {
  candidates_.push_back({std::move(op), std::move(who), std::move(body), [=] {
                           return output.eq(expected).all().item<bool>();
                         }});
}

// `numel` elements a rank and segment.
void Bench::add_bucket(const std::string& name, int num_segments, std::int64_t numel) {
  const std::int64_t ranks = options_.num_ranks;
  const at::Tensor input = at::ones({num_segments * numel * ranks});
  const at::Tensor output = at::zeros({num_segments * numel});
  std::vector<ReduceSegment> bucket;
  for (int i = 0; i < num_segments; ++i) {
    bucket.push_back(
        {output.narrow(0, i * numel, numel), input.narrow(0, i * numel * ranks, numel * ranks)}
    );
  }
  const auto sum = static_cast<double>(ranks);
  add(name, "ours fused", [this, bucket] { ours_->reduce_scatter(bucket)->wait(); }, output, sum);
  add(
      name,
      "ours one by one",
      [this, bucket] {
        std::vector<WorkPtr> works;
        for (const ReduceSegment& segment : bucket) {
          works.push_back(ours_->reduce_scatter(segment.output, segment.input));
        }
        for (const WorkPtr& work : works) {
          work->wait();
        }
      },
      output,
      sum
  );
  add(
      name,
      "ours fused, bf16 wire",
      [this, bucket] { ours_->reduce_scatter(bucket, {ReduceOp::kSum, 1, at::kBFloat16})->wait(); },
      output,
      sum
  );
}

void Bench::run() {
  const double sum = options_.num_ranks;
  at::Tensor gathered = at::zeros_like(whole_);
  at::Tensor scattered = at::zeros_like(slice_);
  at::Tensor exchanged = at::zeros_like(whole_);
  at::Tensor reduced = at::ones_like(whole_);  // of zeros on the other ranks: stays as it is
  if (rank_ != 0) {
    reduced.zero_();
  }
  at::Tensor in_place = gathered.narrow(0, rank_ * slice_.numel(), slice_.numel());
  in_place.copy_(slice_);
  std::vector<std::int64_t> even;
  add("all_gather", "ours", [&] { ours_->all_gather(gathered, in_place)->wait(); }, gathered, 1);
  add(
      "all_gather", "gloo", [&] { theirs_->_allgather_base(gathered, slice_)->wait(); }, gathered, 1
  );
  add(
      "reduce_scatter",
      "ours",
      [&] { ours_->reduce_scatter(scattered, whole_)->wait(); },
      scattered,
      sum
  );
  add(
      "reduce_scatter",
      "gloo",
      [&] { theirs_->_reduce_scatter_base(scattered, whole_)->wait(); },
      scattered,
      sum
  );
  add("all_to_all", "ours", [&] { ours_->all_to_all(exchanged, whole_)->wait(); }, exchanged, 1);
  add(
      "all_to_all",
      "gloo",
      [&] { theirs_->alltoall_base(exchanged, whole_, even, even)->wait(); },
      exchanged,
      1
  );
  add(
      "all_reduce", "ours", [&] { ours_->all_reduce(reduced, ReduceOp::kMax)->wait(); }, reduced, 1
  );
  add(
      "all_reduce",
      "gloo",
      [&] {
        std::vector<at::Tensor> tensors = {reduced};
        ::c10d::AllreduceOptions max;
        max.reduceOp = ::c10d::ReduceOp::MAX;
        theirs_->allreduce(tensors, max)->wait();
      },
      reduced,
      1
  );
  const std::int64_t bytes = slice_.numel() * 4;
  add_bucket("bucket of 8", 8, bytes / 8 / 4);
  add_bucket("bucket of 64 x 64 KiB", 64, 64 * 1024 / 4);
  add_bucket("bucket of 256 x 4 KiB", 256, 4 * 1024 / 4);
  add_bucket("bucket of 24 x 200 KiB", 24, 200 * 1024 / 4);
  add_bucket("bucket of 24 x 300 KiB", 24, 300 * 1024 / 4);
  for (Candidate& candidate : candidates_) {
    candidate.run();
    HS_ASSERT(candidate.is_right(), "bench: ", candidate.who, " ", candidate.op, " is wrong");
  }
  for (int round = 0; round < options_.num_rounds; ++round) {
    for (Candidate& candidate : candidates_) {
      theirs_->barrier()->wait();
      const CommStats before = ours_->stats();
      const Stopwatch watch;
      candidate.run();
      candidate.times_ms.push_back(watch.elapsed_ms());
      const CommStats after = ours_->stats();
      candidate.moved.busy_ns += after.busy_ns - before.busy_ns;
      candidate.moved.sent_bytes += after.sent_bytes - before.sent_bytes;
    }
  }
  const Stopwatch watch;
  const LinkSpeed link = measure_link(*ours_);
  const double probe_ms = watch.elapsed_ms();
  if (rank_ == 0) {
    std::printf(
        "{\"link_latency_us\": %.1f, \"link_mb_per_s\": %.1f, \"probe_ms\": %.1f}\n",
        link.latency_s * 1e6,
        link.bytes_per_s / 1e6,
        probe_ms
    );
    report();
  }
  ours_->barrier()->wait();
}

void Bench::report() const {
  for (const Candidate& candidate : candidates_) {
    std::vector<double> times = candidate.times_ms;
    std::sort(times.begin(), times.end());
    std::printf(
        "{\"op\": \"%s\", \"who\": \"%s\", \"ranks\": %d, \"mib\": %lld, \"min_ms\": %.2f, "
        "\"median_ms\": %.2f, \"sent_mb_per_s\": %.1f}\n",
        candidate.op.c_str(),
        candidate.who.c_str(),
        options_.num_ranks,
        static_cast<long long>(options_.mib),
        times.front(),
        times[times.size() / 2],
        candidate.moved.busy_ns == 0 ? 0.0
                                     : static_cast<double>(candidate.moved.sent_bytes) * 1e3 /
                                           static_cast<double>(candidate.moved.busy_ns)
    );
  }
}

}  // namespace
}  // namespace hypershard::comm

int main(int argc, char** argv) {
  using namespace hypershard;  // NOLINT(google-build-using-namespace): a program's own main
  try {
    const comm::BenchOptions options = comm::parse(argc, argv);
    const char* rank = std::getenv("RANK");
    if (rank == nullptr) {
      return comm::spawn_ranks(argc, argv, options.num_ranks);
    }
    comm::Bench(options, std::atoi(rank)).run();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
