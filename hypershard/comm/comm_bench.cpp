// Why: the floor of communication inside a host: how close the collectives over shared memory come
// to plain memory speed, and what a meeting of the ranks costs.
// Run: comm_bench [--ranks N] [--mib M] [--rounds R] [--json FILE]. Verifies before it measures.
// The line `plain add` is the reference: the same arithmetic on the same bytes, all ranks at once,
// without any communication.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <unistd.h>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "hypershard/comm/internal/ordered_reduce.h"
#include "hypershard/comm/shm/shm_communicator.h"
#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"
#include "hypershard/core/process.h"

namespace hypershard::comm {
namespace {

struct Settings {
  int ranks = 2;
  std::int64_t mib = 64;
  int rounds = 40;
  std::string json;
};

struct Row {
  std::string name;
  std::int64_t bytes = 0;  ///< of the whole tensor; 0: latency only
  std::vector<double> us;
};

double quantile(std::vector<double> sorted, double q) {
  std::sort(sorted.begin(), sorted.end());
  return sorted[static_cast<std::size_t>(q * static_cast<double>(sorted.size() - 1))];
}

at::Tensor floats(std::byte* address, std::int64_t numel) {
  return at::from_blob(address, {numel}, at::TensorOptions(at::kFloat));
}

/// One rank's benches.
class Bench {
 public:
  Bench(std::shared_ptr<Communicator> communicator, const Settings& settings)
      : c_(std::move(communicator)),
        settings_(settings),
        numel_(settings.mib * (1 << 20) / 4 / c_->size() * c_->size()),
        arena_(c_->allocate_symmetric(numel_ * 4, "bench")),
        shared_(floats(arena_->local(), numel_)),
        private_(at::ones({numel_})) {}

  void run_all() {
    const std::int64_t count = numel_ / c_->size();
    at::Tensor own_shared = shared_.narrow(0, count * c_->rank(), count);
    at::Tensor own_private = private_.narrow(0, count * c_->rank(), count);
    verify(own_shared);
    plain_add(count);
    measure("reduce_scatter fp32, in arena", numel_ * 4, [&] {
      finish(c_->reduce_scatter(own_shared, shared_));
    });
    measure("reduce_scatter fp32, staged", numel_ * 4, [&] {
      finish(c_->reduce_scatter(own_private, private_));
    });
    const at::Tensor half = private_.to(at::kBFloat16);
    measure("reduce_scatter bf16 to fp32, staged", numel_ * 2, [&] {
      finish(c_->reduce_scatter(own_private, half));
    });
    measure("all_gather fp32, in arena", numel_ * 4, [&] {
      finish(c_->all_gather(shared_, own_shared));
    });
    measure("all_reduce fp32, in arena", numel_ * 4, [&] { finish(c_->all_reduce(shared_)); });
    at::Tensor scalar = at::ones({1});
    measure_many("all_reduce of one float", [&] { c_->all_reduce(scalar.zero_())->wait(); });
    measure_many("barrier", [&] { c_->barrier()->wait(); });
    const auto board = c_->make_epoch_board(1, "bench");
    std::uint64_t epoch = 0;
    measure_many("epoch: publish and wait", [&] {
      board->publish(0, ++epoch);
      board->wait_all(0, epoch, "bench", "");
    });
  }
  const std::vector<Row>& rows() const { return rows_; }

 private:
  static void finish(const WorkPtr& work) { work->wait_released(); }

  void verify(at::Tensor& own) {
    shared_.fill_(1.0 + c_->rank());
    finish(c_->reduce_scatter(own, shared_));
    const double expected = c_->size() * (c_->size() + 1) / 2.0;
    HS_ASSERT(own.eq(expected).all().item<bool>(), "bench: wrong sum");
    shared_.zero_();
    private_.zero_();
  }
  void plain_add(std::int64_t count) {
    const at::Tensor other = at::zeros({numel_});
    std::vector<const std::byte*> inputs;
    for (int rank = 0; rank < c_->size(); ++rank) {
      const at::Tensor& row = rank == c_->rank() ? private_ : other;
      const at::Tensor slice = row.narrow(0, count * c_->rank(), count);
      inputs.push_back(static_cast<const std::byte*>(slice.const_data_ptr()));
    }
    auto* output = static_cast<std::byte*>(private_.mutable_data_ptr()) + 4 * count * c_->rank();
    measure("plain add", numel_ * 4, [&] {
      internal::ordered_reduce(output, at::kFloat, inputs, at::kFloat, count, ReduceOp::kSum);
    });
  }
  void measure(const std::string& name, std::int64_t bytes, const std::function<void()>& body) {
    Row row{name, bytes, {}};
    for (int round = -3; round < settings_.rounds; ++round) {
      c_->barrier()->wait();
      const Stopwatch watch;
      body();
      if (round >= 0) {
        row.us.push_back(watch.elapsed_ms() * 1e3);
      }
    }
    rows_.push_back(std::move(row));
  }
  /// Latencies are means over a batch: one alone is near the clock's own cost.
  void measure_many(const std::string& name, const std::function<void()>& body) {
    constexpr int kBatch = 50;
    measure(name, 0, [&] {
      for (int i = 0; i < kBatch; ++i) {
        body();
      }
    });
    for (double& us : rows_.back().us) {
      us /= kBatch;
    }
  }

  std::shared_ptr<Communicator> c_;
  Settings settings_;
  std::int64_t numel_;
  std::shared_ptr<SymmetricArena> arena_;
  at::Tensor shared_;
  at::Tensor private_;
  std::vector<Row> rows_;
};

void print(const std::vector<Row>& rows, const Settings& settings) {
  std::printf("%d ranks, %lld MiB\n", settings.ranks, static_cast<long long>(settings.mib));
  std::printf("%-38s %10s %10s %10s %10s\n", "", "min us", "p50 us", "p99 us", "GB/s p50");
  std::string json;
  for (const Row& row : rows) {
    const double p50 = quantile(row.us, 0.5);
    const double speed = static_cast<double>(row.bytes) / p50 * 1e-3;
    std::printf(
        "%-38s %10.1f %10.1f %10.1f %10.2f\n",
        row.name.c_str(),
        quantile(row.us, 0),
        p50,
        quantile(row.us, 0.99),
        speed
    );
    json += concat_text(
        json.empty() ? "" : ",\n",
        "  {\"name\": \"",
        row.name,
        "\", \"bytes\": ",
        row.bytes,
        ", \"min_us\": ",
        quantile(row.us, 0),
        ", \"p50_us\": ",
        p50,
        ", \"p99_us\": ",
        quantile(row.us, 0.99),
        "}"
    );
  }
  if (!settings.json.empty()) {
    std::ofstream(settings.json) << "{\"ranks\": " << settings.ranks
                                 << ", \"cores\": " << available_cores() << ", \"rows\": [\n"
                                 << json << "\n]}\n";
  }
}

int run_rank(int rank, const std::string& nonce, const Settings& settings) {
  at::set_num_threads(1);
  GroupInfo info;
  info.name = "bench";
  info.rank = rank;
  info.timeout_s = 60;
  for (int i = 0; i < settings.ranks; ++i) {
    info.global_ranks.push_back(i);
  }
  Bench bench(make_shm_communicator(info, {.nonce = nonce}), settings);
  bench.run_all();
  if (rank == 0) {
    print(bench.rows(), settings);
  }
  return 0;
}

int run(const std::vector<std::string>& arguments) {
  Settings settings;
  int rank = -1;
  std::string nonce;
  for (std::size_t i = 0; i + 1 < arguments.size(); i += 2) {
    const std::string& key = arguments[i];
    const std::string& value = arguments[i + 1];
    if (key == "--ranks") {
      settings.ranks = std::stoi(value);
    } else if (key == "--mib") {
      settings.mib = std::stoll(value);
    } else if (key == "--rounds") {
      settings.rounds = std::stoi(value);
    } else if (key == "--json") {
      settings.json = value;
    } else if (key == "--rank") {
      rank = std::stoi(value);
    } else if (key == "--nonce") {
      nonce = value;
    }
  }
  if (rank >= 0) {
    return run_rank(rank, nonce, settings);
  }
  std::vector<ChildProcess> children;
  for (int child = 0; child < settings.ranks; ++child) {
    SpawnOptions spawn;
    spawn.argv = {program_path()};
    spawn.argv.insert(spawn.argv.end(), arguments.begin(), arguments.end());
    const std::string name = concat_text("bench-", getpid(), "-", now_ns());
    nonce = nonce.empty() ? name : nonce;
    for (const std::string& word :
         {std::string("--rank"), std::to_string(child), std::string("--nonce"), nonce}) {
      spawn.argv.push_back(word);
    }
    spawn.env = {{"OMP_NUM_THREADS", "1"}};
    children.emplace_back(spawn);
  }
  int worst = 0;
  for (ChildProcess& child : children) {
    worst = std::max(worst, child.wait().is_success() ? 0 : 1);
  }
  return worst;
}

}  // namespace
}  // namespace hypershard::comm

int main(int argc, char** argv) {
  try {
    return hypershard::comm::run(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
