// Why: one loop over a signalfd and the ranks' stderr pipes. Ranks are spawned anew, never forked,
// since libtorch has threads.
#include "hypershard/train/launcher.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <memory>
#include <optional>
#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"
#include "hypershard/core/process.h"
#include "hypershard/train/internal/rank_process.h"

namespace hypershard::train {
namespace {

using internal::RankProcess;

constexpr std::array<int, 3> kStopSignals = {SIGINT, SIGTERM, SIGHUP};

// Blocks the signals that the loop reads from a descriptor, and gives the mask back.
class SignalQueue {
 public:
  SignalQueue() {
    sigset_t wanted{};
    sigemptyset(&wanted);
    sigaddset(&wanted, SIGCHLD);
    for (const int signal : kStopSignals) {
      // A blocked signal is queued even if it is ignored, and nohup is there for it to be ignored.
      if (signal != SIGHUP || !hangup_is_ignored()) {
        sigaddset(&wanted, signal);
      }
    }
    pthread_sigmask(SIG_BLOCK, &wanted, &former_);
    fd_ = ::signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK);
    if (fd_ < 0) {
      const int error = errno;
      pthread_sigmask(SIG_SETMASK, &former_, nullptr);
      HS_FAIL(IoError, "train.launcher: signalfd failed: ", errno_text(error));
    }
  }
  ~SignalQueue() {
    ::close(fd_);
    pthread_sigmask(SIG_SETMASK, &former_, nullptr);
  }
  SignalQueue(const SignalQueue&) = delete;
  SignalQueue& operator=(const SignalQueue&) = delete;

  int fd() const { return fd_; }
  /// Returns the next signal that came, if any.
  std::optional<int> next() const {
    signalfd_siginfo info{};
    if (::read(fd_, &info, sizeof info) != static_cast<ssize_t>(sizeof info)) {
      return std::nullopt;
    }
    return static_cast<int>(info.ssi_signo);
  }

 private:
  sigset_t former_{};
  int fd_ = -1;
};

// How much an end explains: a death of its own most, the loss of a peer less, our own signal least.
int weight_of(const RankEnd& end) {
  if (end.by_launcher) {
    return 1;
  }
  if (end.signal != 0) {
    return 4;
  }
  switch (end.exit_code) {
    case kExitOk:
    case kExitInterrupted:
      return 0;
    case kExitCommunication:
      return 2;
    default:
      return 3;
  }
}

// The ranks of one job, from the first spawn to the last wait.
class Job {
 public:
  explicit Job(const LaunchOptions& options) : options_(options), output_(options.log_path) {}

  void start();
  void run();
  LaunchResult result() const;

 private:
  void poll_once();
  void take_signals();
  void stop(int signal);
  void reap();
  void enforce_deadlines();
  void send(int signal);
  int wait_ms() const;
  bool any_alive() const;
  const RankEnd* root_cause() const;

  const LaunchOptions& options_;
  std::optional<SignalQueue> signals_;
  internal::StderrTee output_;
  std::vector<std::unique_ptr<RankProcess>> ranks_;
  std::vector<RankEnd> ends_;
  int num_stops_ = 0;
  bool failed_ = false;
  double terminate_at_s_ = 0;  // 0: no deadline
  double kill_at_s_ = 0;
};

void Job::start() {
  const std::vector<internal::CoreSet> cores = options_.pin_cores
                                                   ? internal::split_cores(options_.num_ranks)
                                                   : std::vector<internal::CoreSet>();
  const internal::JobPlace place = internal::make_job_place();
  for (int rank = 0; rank < options_.num_ranks; ++rank) {
    const auto own = cores.empty() ? internal::CoreSet() : cores[static_cast<std::size_t>(rank)];
    ranks_.push_back(std::make_unique<RankProcess>(options_, place, rank, own, output_));
  }
  // Only now: ranks inherit the mask. A stop signal before this line ends this process, and the
  // ranks with it.
  signals_.emplace();
}

void Job::run() {
  reap();  // those that ended before SIGCHLD was watched
  while (any_alive()) {
    poll_once();
    take_signals();
    reap();
    enforce_deadlines();
  }
  for (const auto& rank : ranks_) {
    rank->forward_stderr();  // what it wrote last
  }
}

void Job::poll_once() {
  std::vector<pollfd> fds = {{.fd = signals_->fd(), .events = POLLIN, .revents = 0}};
  for (const auto& rank : ranks_) {
    // A negative descriptor (stderr closed) is passed over by poll.
    fds.push_back({.fd = rank->stderr_fd(), .events = POLLIN, .revents = 0});
  }
  ::poll(fds.data(), fds.size(), wait_ms());
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (fds[i + 1].revents != 0) {
      ranks_[i]->forward_stderr();
    }
  }
}

void Job::take_signals() {
  while (const std::optional<int> signal = signals_->next()) {
    if (*signal != SIGCHLD) {
      stop(*signal);
    }
  }
}

void Job::stop(int signal) {
  ++num_stops_;
  if (num_stops_ > 1) {
    send(SIGKILL);
    return;
  }
  send(signal);
}

void Job::reap() {
  for (const auto& rank : ranks_) {
    if (!rank->poll()) {
      continue;
    }
    rank->forward_stderr();
    ends_.push_back(rank->end());
    const RankEnd& end = ends_.back();
    const bool well =
        end.signal == 0 && (end.exit_code == kExitOk || end.exit_code == kExitInterrupted);
    if (!well && !failed_) {
      failed_ = true;
      terminate_at_s_ = now_s() + options_.grace_s;
    }
  }
}

void Job::enforce_deadlines() {
  if (terminate_at_s_ > 0 && now_s() >= terminate_at_s_) {
    send(SIGTERM);
    terminate_at_s_ = 0;
    kill_at_s_ = now_s() + options_.terminate_s;
  }
  if (kill_at_s_ > 0 && now_s() >= kill_at_s_) {
    send(SIGKILL);
    kill_at_s_ = 0;
  }
}

void Job::send(int signal) {
  for (const auto& rank : ranks_) {
    rank->send(signal);
  }
}

int Job::wait_ms() const {
  // Another thread of this process may be given a SIGCHLD, and drop it: look without one as well.
  constexpr int kLookMs = 200;
  const double deadline = terminate_at_s_ > 0 ? terminate_at_s_ : kill_at_s_;
  if (deadline <= 0) {
    return kLookMs;
  }
  return std::clamp(static_cast<int>((deadline - now_s()) * 1000) + 1, 0, kLookMs);
}

bool Job::any_alive() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const auto& rank) {
    return rank->is_alive();
  });
}

const RankEnd* Job::root_cause() const {
  const RankEnd* cause = nullptr;
  for (const RankEnd& end : ends_) {
    if (weight_of(end) > (cause == nullptr ? 0 : weight_of(*cause))) {
      cause = &end;
    }
  }
  return cause;
}

std::string report_of(const RankEnd& cause, const std::vector<RankEnd>& ends) {
  std::string report = to_text(cause);
  for (const RankEnd& end : ends) {
    const bool well = end.signal == 0 && end.exit_code == kExitOk;
    if (end.rank != cause.rank && !well) {
      report += "\n  then " + to_text(end);
    }
  }
  if (cause.signal != 0 && !cause.last_lines.empty()) {
    report += "\n  the last that rank " + std::to_string(cause.rank) + " wrote to stderr:";
    for (const std::string& line : cause.last_lines) {
      report += "\n    " + line;
    }
  }
  if (cause.signal == SIGKILL && !cause.by_launcher) {
    report +=
        "\n  hint: nobody but the kernel or another user sends SIGKILL; look for 'Out of memory' "
        "in dmesg";
  }
  return report;
}

LaunchResult Job::result() const {
  LaunchResult result{.exit_code = kExitOk, .ends = ends_, .report = {}};
  const RankEnd* cause = root_cause();
  // Stopped ranks lose each other; that is no fault.
  if (num_stops_ > 0 && (cause == nullptr || weight_of(*cause) <= 2)) {
    const bool finished = std::all_of(ends_.begin(), ends_.end(), [](const RankEnd& end) {
      return end.signal == 0 && end.exit_code == kExitOk;
    });
    result.exit_code = finished ? kExitOk : kExitInterrupted;
    return result;
  }
  if (cause == nullptr) {
    const bool interrupted = std::any_of(ends_.begin(), ends_.end(), [](const RankEnd& end) {
      return end.exit_code == kExitInterrupted;
    });
    result.exit_code = interrupted ? kExitInterrupted : kExitOk;
    return result;
  }
  result.exit_code = cause->signal != 0 ? static_cast<int>(kExitCommunication) : cause->exit_code;
  const bool all_alike = std::all_of(ends_.begin(), ends_.end(), [cause](const RankEnd& end) {
    return end.signal == 0 && end.exit_code == cause->exit_code;
  });
  if (!all_alike) {  // else the ranks have agreed, and said why
    result.report = report_of(*cause, ends_);
  }
  return result;
}

}  // namespace

std::string to_text(const RankEnd& end) {
  std::string text = "rank " + std::to_string(end.rank);
  if (end.signal != 0) {
    text += " was killed by " + to_text(ExitStatus{.signal = end.signal});
    return text + (end.by_launcher ? " because it did not end by itself" : "");
  }
  text += " exited with code " + std::to_string(end.exit_code);
  switch (end.exit_code) {
    case kExitBadInput:
      return text + " (bad input)";
    case kExitCommunication:
      return text + " (communication)";
    case kExitInternal:
      return text + " (internal error)";
    case kExitInterrupted:
      return text + " (interrupted)";
    default:
      return text;
  }
}

LaunchResult launch_ranks(const LaunchOptions& options) {
  HS_CHECK_GE(options.num_ranks, 1, "train.launcher: the number of ranks must be positive");
  HS_CHECK(
      !options.command.empty(), "train.launcher: no command for ", options.num_ranks, " ranks"
  );
  Job job(options);
  job.start();
  job.run();
  return job.result();
}

}  // namespace hypershard::train
