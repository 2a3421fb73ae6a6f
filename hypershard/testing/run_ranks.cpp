// Why: see run_ranks.h. The thread that calls run_ranks is the watch: it holds the deadline and
// turns the ranks' failures into one.
#include "hypershard/testing/run_ranks.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "hypershard/comm/delayed/delayed_world.h"
#include "hypershard/comm/local/local_world.h"
#include "hypershard/core/error.h"
#include "hypershard/core/hash.h"
#include "hypershard/testing/internal/rank_job.h"
#include "hypershard/testing/internal/rank_run.h"

namespace hypershard::testing {
namespace {

using internal::RankJob;

constexpr double kGraceSeconds = 10;

/// What one rank's thread leaves behind.
struct Outcome {
  std::exception_ptr error;
  std::string text;  ///< of the error
  std::string last;  ///< its last collectives, one line a communicator
  bool done = false;
};

/// The ranks of one run: their threads' shared state.
class Run {
 public:
  explicit Run(int num_ranks) : outcomes_(static_cast<std::size_t>(num_ranks)) {}

  void finish(int rank, std::exception_ptr error, std::string text, std::string last) {
    const std::lock_guard lock(mutex_);
    Outcome& outcome = outcomes_[static_cast<std::size_t>(rank)];
    outcome = {std::move(error), std::move(text), std::move(last), true};
    if (outcome.error != nullptr && first_ < 0) {
      first_ = rank;
    }
    ++num_done_;
    changed_.notify_all();
  }
  bool wait_for(double seconds) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] {
      return num_done_ == static_cast<int>(outcomes_.size());
    });
  }
  /// For the calling thread once all are done, except while it gives up.
  const std::vector<Outcome>& outcomes() const { return outcomes_; }
  int first() const { return first_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Outcome> outcomes_;
  int num_done_ = 0;
  int first_ = -1;
};

std::string error_text(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    return known.what_brief();
  } catch (const std::exception& other) {
    return other.what();
  } catch (...) {  // raw-throw: the original is rethrown by run_ranks
    return "something that is not a std::exception";
  }
}

std::string others_text(const Run& run, int but) {
  std::string text;
  for (std::size_t rank = 0; rank < run.outcomes().size(); ++rank) {
    const Outcome& outcome = run.outcomes()[rank];
    if (static_cast<int>(rank) != but && outcome.error != nullptr) {
      text += concat_text("\n  also failed, rank ", rank, ": ", outcome.text);
    }
  }
  return text;
}

/// Throws the first failure as its own type; ours also tell the other ranks' failures.
[[noreturn]] void rethrow(const Run& run) {
  const Outcome& outcome = run.outcomes()[static_cast<std::size_t>(run.first())];
  const std::string others = others_text(run, run.first());
  if (others.empty()) {
    std::rethrow_exception(outcome.error);
  }
  try {
    std::rethrow_exception(outcome.error);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(error.what() + others);  // raw-throw: same type, more text
  } catch (const Unsupported& error) {
    throw Unsupported(error.what() + others);  // raw-throw: same type, more text
  } catch (const CommError& error) {
    throw CommError(error.what() + others);  // raw-throw: same type, more text
  } catch (const IoError& error) {
    throw IoError(error.what() + others);  // raw-throw: same type, more text
  } catch (const std::exception& error) {
    std::fprintf(
        stderr, "run_ranks: rank %d failed first: %s%s\n", run.first(), error.what(), others.c_str()
    );
    throw;  // raw-throw: a foreign type cannot be rebuilt
  }
}

layout::Topology topology_of(int num_ranks, const RunRanksOptions& options) {
  return options.supernodes.empty() ? layout::Topology::single_supernode(num_ranks)
                                    : layout::Topology::from_labels(options.supernodes);
}

/// Makes seeds of neighbouring ranks and runs differ in more than a bit.
std::uint64_t seed_of(std::uint64_t seed, int rank) {
  return hash_combine(hash_combine(kHashSeed, seed), static_cast<std::uint64_t>(rank));
}

RankJob make_job(int num_ranks, const RunRanksOptions& options) {
  layout::Topology topology = topology_of(num_ranks, options);
  if (options.backend == RankBackend::kGloo) {
    return internal::make_gloo_rank_job(std::move(topology), options.timeout_s);
  }
  auto job = std::make_shared<comm::LocalJob>(
      std::move(topology), comm::LocalOptions{.timeout_s = options.timeout_s}
  );
  const bool delayed = options.backend == RankBackend::kDelayed;
  return {
      [job, delayed, seed = options.seed](int rank) {
        auto world = job->world(rank);
        return delayed ? comm::make_delayed_world(world, seed_of(seed, rank)) : world;
      },
      [job](const std::string& why) { job->abort(why); },
  };
}

void run_one(
    int rank,
    int num_ranks,
    const RankJob& job,
    const std::function<void(std::shared_ptr<comm::World>)>& body,
    Run& run
) {
  const ThreadErrorRank error_rank(rank, num_ranks);
  std::exception_ptr error;
  // Lives until a failure is noted: its end is seen by the others, whose errors are consequences.
  std::shared_ptr<comm::World> world;
  try {
    world = job.world(rank);
    body(world);
  } catch (...) {  // raw-throw: rethrown by run_ranks
    error = std::current_exception();
  }
  const std::string text = error == nullptr ? "" : error_text(error);
  run.finish(rank, error, text, world == nullptr ? "" : world->last_collectives());
  if (error != nullptr) {
    job.abort(concat_text("rank ", rank, " has failed: ", text));  // nobody waits for it in vain
  }
}

std::string state_text(const Run& run) {
  std::string text;
  for (std::size_t rank = 0; rank < run.outcomes().size(); ++rank) {
    const Outcome& outcome = run.outcomes()[rank];
    text += concat_text("\n  rank ", rank, ": ");
    text += outcome.done ? outcome.last : "still running (not in a collective)";
    text += outcome.error == nullptr ? "" : "\n    " + outcome.text;
  }
  return text;
}

}  // namespace

std::string to_text(RankBackend backend) {
  switch (backend) {
    case RankBackend::kLocal:
      return "local";
    case RankBackend::kGloo:
      return "gloo";
    case RankBackend::kDelayed:
      return "delayed";
    case RankBackend::kShm:
      return "shm";
  }
  return "unknown";
}

void run_ranks(
    int num_ranks,
    const std::function<void(std::shared_ptr<comm::World>)>& body,
    const RunRanksOptions& options
) {
  HS_CHECK_GE(num_ranks, 1, "run_ranks: number of ranks");
  HS_CHECK(
      options.supernodes.empty() || static_cast<int>(options.supernodes.size()) == num_ranks,
      "run_ranks: `supernodes` needs one label a rank: ",
      options.supernodes.size(),
      " labels for ",
      num_ranks,
      " ranks"
  );
  if (options.backend == RankBackend::kShm) {
    internal::run_rank_processes(num_ranks, body, options);
    return;
  }
  const RankJob job = make_job(num_ranks, options);
  Run run(num_ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] { run_one(rank, num_ranks, job, body, run); });
  }
  const bool in_time = run.wait_for(options.deadline_s);
  if (!in_time) {
    job.abort(concat_text("the deadline of ", options.deadline_s, " s for this run has passed"));
    if (!run.wait_for(kGraceSeconds)) {
      // Threads cannot be ended from outside, and they use the caller's stack.
      std::fprintf(
          stderr,
          "run_ranks: ranks do not end after the deadline of %g s:%s\n",
          options.deadline_s,
          state_text(run).c_str()
      );
      std::abort();
    }
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  if (!in_time) {
    HS_FAIL(CommError, "run_ranks: not done within ", options.deadline_s, " s:", state_text(run));
  }
  if (run.first() >= 0) {
    rethrow(run);
  }
}

}  // namespace hypershard::testing
