// Why: what a rank needs from its launcher: a place in the job, cores, and someone who reads what
// it writes.
#include "hypershard/train/internal/rank_process.h"

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <fcntl.h>
#include <sched.h>
#include <string_view>
#include <sys/random.h>
#include <unistd.h>
#include <utility>

#include "hypershard/core/error.h"

namespace hypershard::train::internal {
namespace {

constexpr std::size_t kKeptLines = 5;

std::string random_name() {
  std::array<unsigned char, 8> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    HS_FAIL(IoError, "train.launcher: getrandom failed: ", errno_text(errno));
  }
  std::string text;
  for (const unsigned char byte : bytes) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

// Runs this thread, and so what it spawns, on some cores while alive.
class AffinityGuard {
 public:
  explicit AffinityGuard(const CoreSet& cores) {
    active_ = !cores.empty() && ::sched_getaffinity(0, sizeof former_, &former_) == 0;
    if (active_) {
      cpu_set_t wanted;
      CPU_ZERO(&wanted);
      for (const int core : cores) {
        CPU_SET(static_cast<std::size_t>(core), &wanted);
      }
      active_ = ::sched_setaffinity(0, sizeof wanted, &wanted) == 0;
    }
  }
  ~AffinityGuard() {
    if (active_) {
      ::sched_setaffinity(0, sizeof former_, &former_);
    }
  }
  AffinityGuard(const AffinityGuard&) = delete;
  AffinityGuard& operator=(const AffinityGuard&) = delete;

 private:
  cpu_set_t former_{};
  bool active_ = false;
};

SpawnOptions spawn_options(const LaunchOptions& options, const JobPlace& job, int rank) {
  SpawnOptions spawn;
  spawn.argv = options.command;
  spawn.env = options.environment;
  const std::string size = std::to_string(options.num_ranks);
  spawn.env.emplace_back("RANK", std::to_string(rank));
  spawn.env.emplace_back("WORLD_SIZE", size);
  spawn.env.emplace_back("LOCAL_RANK", std::to_string(rank));
  spawn.env.emplace_back("LOCAL_WORLD_SIZE", size);
  spawn.env.emplace_back("MASTER_ADDR", "127.0.0.1");
  spawn.env.emplace_back("MASTER_PORT", std::to_string(job.master_port));
  spawn.env.emplace_back("HS_JOB_NONCE", job.nonce);
  return spawn;
}

// Returns whether all was written.
bool write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written <= 0) {
      return false;
    }
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

}  // namespace

std::vector<CoreSet> split_cores(int num_ranks) {
  cpu_set_t available;
  if (::sched_getaffinity(0, sizeof available, &available) != 0 ||
      CPU_COUNT(&available) < num_ranks) {
    return {};
  }
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(static_cast<std::size_t>(core), &available)) {
      cores.push_back(core);
    }
  }
  const std::size_t each = cores.size() / static_cast<std::size_t>(num_ranks);
  std::vector<CoreSet> sets;
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(num_ranks); ++rank) {
    const auto begin = cores.begin() + static_cast<std::ptrdiff_t>(rank * each);
    sets.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(each));
  }
  return sets;
}

StderrTee::~StderrTee() {
  if (log_fd_ >= 0) {
    ::close(log_fd_);
  }
}

void StderrTee::write(std::string_view lines) {
  // A progress line that stands open on the terminal makes room first.
  static const bool shares_terminal = ::isatty(STDOUT_FILENO) == 1 && ::isatty(STDERR_FILENO) == 1;
  if (shares_terminal) {
    write_all(STDERR_FILENO, "\r\x1b[K");
  }
  write_all(STDERR_FILENO, lines);
  if (!log_path_.empty()) {
    write_log(lines);
  }
}

void StderrTee::write_log(std::string_view lines) {
  constexpr std::size_t kMaxBacklog = 1 << 20;
  if (log_fd_ < 0) {
    log_fd_ = ::open(log_path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (log_fd_ < 0) {
      backlog_ += backlog_.size() < kMaxBacklog ? lines : std::string_view();
      return;  // the folder is not there yet
    }
    write_all(log_fd_, std::exchange(backlog_, {}));
  }
  write_all(log_fd_, lines);
}

JobPlace make_job_place() {
  return {.nonce = random_name(), .master_port = free_loopback_port()};
}

RankProcess::RankProcess(
    const LaunchOptions& options,
    const JobPlace& job,
    int rank,
    const CoreSet& cores,
    StderrTee& output
)
    : output_(output) {
  end_.rank = rank;
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    HS_FAIL(IoError, "train.launcher: no pipe for rank ", rank, ": ", errno_text(errno));
  }
  stderr_fd_ = ends[0];
  ::fcntl(stderr_fd_, F_SETFL, O_NONBLOCK);
  SpawnOptions spawn = spawn_options(options, job, rank);
  spawn.err_fd = ends[1];
  if (!cores.empty() && std::getenv("HS_THREADS") == nullptr) {
    spawn.env.emplace_back("HS_THREADS", std::to_string(cores.size()));
  }
  try {
    const AffinityGuard pinned(cores);
    child_.emplace(spawn);
  } catch (...) {
    ::close(ends[1]);
    close_stderr();
    throw;
  }
  ::close(ends[1]);
}

RankProcess::~RankProcess() {
  close_stderr();
}

void RankProcess::forward_stderr() {
  std::array<char, 4096> piece{};
  while (stderr_fd_ >= 0) {
    const ssize_t got = ::read(stderr_fd_, piece.data(), piece.size());
    if (got > 0) {
      unfinished_line_.append(piece.data(), static_cast<std::size_t>(got));
    } else if (got < 0 && errno == EINTR) {
      continue;
    } else if (got < 0 && errno == EAGAIN && is_alive()) {
      break;
    } else {
      close_stderr();
    }
  }
  forward_lines();
}

void RankProcess::forward_lines() {
  if (stderr_fd_ < 0 && !unfinished_line_.empty() && unfinished_line_.back() != '\n') {
    unfinished_line_ += '\n';  // the last line there will be
  }
  const std::size_t end_of_lines = unfinished_line_.rfind('\n');
  if (end_of_lines == std::string::npos) {
    return;
  }
  const std::string whole = unfinished_line_.substr(0, end_of_lines + 1);
  unfinished_line_.erase(0, end_of_lines + 1);
  for (std::size_t begin = 0; begin < whole.size();) {
    const std::size_t end = whole.find('\n', begin);
    take_line(whole.substr(begin, end - begin));
    begin = end + 1;
  }
  output_.write(whole);
}

void RankProcess::take_line(std::string line) {
  end_.last_lines.push_back(std::move(line));
  if (end_.last_lines.size() > kKeptLines) {
    end_.last_lines.erase(end_.last_lines.begin());
  }
}

void RankProcess::send(int signal) {
  if (child_.has_value()) {
    child_->signal_group(signal);
    sent_signals_ |= std::uint64_t{1} << signal;
  }
}

bool RankProcess::poll() {
  if (!child_.has_value()) {
    return false;
  }
  const std::optional<ExitStatus> status = child_->poll();
  if (!status.has_value()) {
    return false;
  }
  end_.exit_code = status->code;
  end_.signal = status->signal;
  end_.by_launcher = end_.signal != 0 && (sent_signals_ >> end_.signal & 1) != 0;
  child_.reset();
  return true;
}

void RankProcess::close_stderr() {
  if (stderr_fd_ >= 0) {
    ::close(stderr_fd_);
    stderr_fd_ = -1;
  }
}

}  // namespace hypershard::train::internal
