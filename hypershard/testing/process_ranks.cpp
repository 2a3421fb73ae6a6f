// Why: see process_ranks.h. The processes are watched by polling, since output, ends and the
// deadline are all waited for at once.
#include "hypershard/testing/process_ranks.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <thread>
#include <unistd.h>

#include "hypershard/core/clock.h"
#include "hypershard/core/text.h"

namespace hypershard::testing {
namespace {

constexpr std::chrono::milliseconds kPollEvery{5};
constexpr double kLeftoverPatienceSeconds = 3;

/// Tells this program's runs from those of other tests on the host.
std::string nonce_prefix() {
  return concat_text("test-", getpid(), "-");
}

std::string fresh_nonce() {
  static std::atomic<int> count{0};
  return concat_text(nonce_prefix(), ++count, "-", now_ns());
}

/// The processes of one run.
class Processes {
 public:
  Processes(int num_ranks, const std::string& name, const ProcessOptions& options);
  /// Looks at every process once; false when all have ended.
  bool poll();
  void kill_all();
  double elapsed_s() const { return watch_.elapsed_s(); }
  std::vector<RankResult> results();

 private:
  void send_signals();
  bool only_signalled_run() const;
  void kill_running();

  const ProcessOptions& options_;
  Stopwatch watch_;
  std::vector<std::unique_ptr<ChildProcess>> children_;
  std::vector<std::optional<ExitStatus>> ended_;
  std::vector<RankResult> results_;
  std::vector<bool> sent_;
  double last_signal_s_ = -1;
};

Processes::Processes(int num_ranks, const std::string& name, const ProcessOptions& options)
    : options_(options),
      ended_(static_cast<std::size_t>(num_ranks)),
      results_(static_cast<std::size_t>(num_ranks)),
      sent_(options.signals.size(), false) {
  const std::string size = std::to_string(num_ranks);
  const std::string port = std::to_string(free_loopback_port());
  const std::string nonce = fresh_nonce();
  for (int rank = 0; rank < num_ranks; ++rank) {
    SpawnOptions spawn;
    spawn.argv = {program_path(), "--worker", name};
    spawn.argv.insert(spawn.argv.end(), options.arguments.begin(), options.arguments.end());
    spawn.env = {
        {"RANK", std::to_string(rank)},
        {"WORLD_SIZE", size},
        {"LOCAL_RANK", std::to_string(rank)},
        {"LOCAL_WORLD_SIZE", size},
        {"MASTER_ADDR", "127.0.0.1"},
        {"MASTER_PORT", port},
        {"HS_JOB_NONCE", nonce},
        {"OMP_NUM_THREADS", "1"},
    };
    if (!options.supernodes.empty()) {
      spawn.env.emplace_back(
          "HS_SUPERNODE", std::to_string(options.supernodes.at(static_cast<std::size_t>(rank)))
      );
    }
    spawn.env.insert(spawn.env.end(), options.env.begin(), options.env.end());
    spawn.out = ChildOutput::kCapture;
    spawn.err = ChildOutput::kCapture;
    children_.push_back(std::make_unique<ChildProcess>(spawn));
  }
}

bool Processes::poll() {
  bool running = false;
  for (std::size_t rank = 0; rank < children_.size(); ++rank) {
    if (ended_[rank].has_value()) {
      continue;
    }
    ended_[rank] = children_[rank]->poll();
    if (ended_[rank].has_value()) {
      RankResult& result = results_[rank];
      result.seconds = watch_.elapsed_s();
      result.after_signals = last_signal_s_ < 0 ? 0 : result.seconds - last_signal_s_;
    } else {
      running = true;
    }
  }
  if (running) {
    send_signals();
    if (only_signalled_run()) {
      kill_running();
    }
  }
  return running;
}

bool Processes::only_signalled_run() const {
  for (std::size_t rank = 0; rank < children_.size(); ++rank) {
    bool signalled = false;
    for (std::size_t i = 0; i < sent_.size(); ++i) {
      signalled = signalled || (sent_[i] && options_.signals[i].rank == static_cast<int>(rank));
    }
    if (!signalled && !ended_[rank].has_value()) {
      return false;
    }
  }
  return true;
}

void Processes::kill_running() {
  for (std::size_t rank = 0; rank < children_.size(); ++rank) {
    if (!ended_[rank].has_value()) {
      children_[rank]->signal_group(SIGKILL);
    }
  }
}

void Processes::send_signals() {
  for (std::size_t i = 0; i < options_.signals.size(); ++i) {
    const PlannedSignal& planned = options_.signals[i];
    ChildProcess& child = *children_[static_cast<std::size_t>(planned.rank)];
    if (!sent_[i] && (planned.after_output.empty() ||
                      child.captured_out().find(planned.after_output) != std::string::npos)) {
      child.signal(planned.signal);
      sent_[i] = true;
      last_signal_s_ = watch_.elapsed_s();
    }
  }
}

void Processes::kill_all() {
  for (std::size_t rank = 0; rank < children_.size(); ++rank) {
    if (!ended_[rank].has_value()) {
      results_[rank].killed_at_deadline = true;
    }
  }
  kill_running();
  while (poll()) {
    std::this_thread::sleep_for(kPollEvery);
  }
}

std::vector<RankResult> Processes::results() {
  for (std::size_t rank = 0; rank < children_.size(); ++rank) {
    results_[rank].status = *ended_[rank];
    results_[rank].out = children_[rank]->captured_out();
    results_[rank].err = children_[rank]->captured_err();
  }
  return results_;
}

/// Returns the abstract sockets of this program's runs, as /proc lists them.
std::vector<std::string> our_sockets() {
  std::vector<std::string> names;
  const std::string start = "@hypershard-" + nonce_prefix();
  std::ifstream file("/proc/net/unix");
  for (std::string line; std::getline(file, line);) {
    const std::size_t at = line.find(start);
    if (at != std::string::npos) {
      names.push_back(line.substr(at));
    }
  }
  return names;
}

std::vector<std::string> our_children() {
  std::vector<std::string> pids;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(task.path() / "children");
    for (std::string pid; file >> pid;) {
      pids.push_back(pid);
    }
  }
  return pids;
}

std::vector<std::string> dev_shm_names() {
  std::vector<std::string> names;
  std::error_code unreadable;  // a host without /dev/shm has nothing in it
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", unreadable)) {
    names.push_back(entry.path().filename());
  }
  return names;
}

std::string only_in(
    std::string_view what,
    const std::vector<std::string>& now,
    const std::vector<std::string>& before
) {
  std::string text;
  for (const std::string& name : now) {
    if (std::find(before.begin(), before.end(), name) == before.end()) {
      text += concat_text(text.empty() ? what : std::string_view(), " ", name);
    }
  }
  return text.empty() ? "" : text + "; ";
}

}  // namespace

std::string to_text(const RankResult& result) {
  std::string text = to_text(result.status);
  text += result.killed_at_deadline ? ", killed at the deadline" : "";
  text += "\n--- stdout\n" + result.out + "\n--- stderr\n" + result.err + "\n---";
  return text;
}

std::vector<RankResult> run_processes(
    int num_ranks, const std::string& name, const ProcessOptions& options
) {
  Processes processes(num_ranks, name, options);
  bool in_time = true;
  while (processes.poll()) {
    if (processes.elapsed_s() > options.deadline_s) {
      in_time = false;
      processes.kill_all();
      break;
    }
    std::this_thread::sleep_for(kPollEvery);
  }
  std::vector<RankResult> results = processes.results();
  if (!in_time) {
    for (std::size_t rank = 0; rank < results.size(); ++rank) {
      const std::string text = to_text(results[rank]);
      std::fprintf(
          stderr,
          "run_processes: '%s' not done within %g s, rank %zu: %s\n",
          name.c_str(),
          options.deadline_s,
          rank,
          text.c_str()
      );
    }
  }
  return results;
}

Leftovers find_leftovers() {
  return {dev_shm_names(), our_sockets(), our_children()};
}

std::string new_leftovers(const Leftovers& before) {
  const Stopwatch watch;
  while (true) {
    const Leftovers now = find_leftovers();
    const std::string text = only_in("in /dev/shm:", now.dev_shm, before.dev_shm) +
                             only_in("abstract sockets:", now.sockets, before.sockets) +
                             only_in("child processes:", now.children, before.children);
    if (text.empty() || watch.elapsed_s() > kLeftoverPatienceSeconds) {
      return text;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

}  // namespace hypershard::testing
