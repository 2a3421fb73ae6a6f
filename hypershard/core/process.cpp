// Why: starting and ending child processes; see process.h.
// NOTE [spawn by vfork] posix_spawn cannot ask for a death signal (PR_SET_PDEATHSIG), and a fork
// would copy the page tables of a process full of threads and tensors. So the child is made by
// vfork, as posix_spawn does inside: until exec it borrows our memory, calls only async-signal-safe
// functions, allocates nothing, and all signals are blocked.
#include "hypershard/core/process.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <sched.h>
#include <string_view>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"

// Sanitizers know nothing of the child's borrowed memory and stack.
#define HS_CHILD_CODE __attribute__((noinline, no_sanitize("address", "thread", "undefined")))

namespace hypershard {
namespace {

/// A file descriptor that is closed unless released.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) {
      close(fd_);
    }
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

/// Returns where a child's stream goes: -1 to inherit.
int open_output(ChildOutput output) {
  int fd = -1;
  if (output == ChildOutput::kCapture) {
    // Memory instead of a pipe: nobody has to read while the child runs.
    fd = memfd_create("hypershard-output", MFD_CLOEXEC);
  } else if (output == ChildOutput::kDiscard) {
    fd = open("/dev/null", O_WRONLY | O_CLOEXEC);
  } else {
    return -1;
  }
  if (fd < 0) {
    HS_FAIL(IoError, "process: cannot open a child's output: ", errno_text(errno));
  }
  return fd;
}

std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) {
    return name;
  }
  const char* path = std::getenv("PATH");
  std::string_view folders = path == nullptr ? "/usr/bin:/bin" : path;
  while (!folders.empty()) {
    const std::size_t colon = folders.find(':');
    const std::string candidate = std::string(folders.substr(0, colon)) + "/" + name;
    struct stat status {};
    if (stat(candidate.c_str(), &status) == 0 && S_ISREG(status.st_mode) &&
        access(candidate.c_str(), X_OK) == 0) {
      return candidate;
    }
    folders = colon == std::string_view::npos ? std::string_view() : folders.substr(colon + 1);
  }
  HS_FAIL(IoError, "process: no program '", name, "' in PATH (", path == nullptr ? "" : path, ")");
}

std::vector<std::string> child_environment(const SpawnOptions& options) {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string assignment = *entry;
    const std::size_t equals = assignment.find('=');
    if (equals != std::string::npos) {
      variables[assignment.substr(0, equals)] = assignment.substr(equals + 1);
    }
  }
  for (const std::string& name : options.unset_env) {
    variables.erase(name);
  }
  for (const auto& [name, value] : options.env) {
    variables[name] = value;
  }
  std::vector<std::string> assignments;
  for (const auto& [name, value] : variables) {
    assignments.push_back(name + "=" + value);
  }
  return assignments;
}

std::vector<char*> pointers_to(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& text : strings) {
    pointers.push_back(text.data());
  }
  pointers.push_back(nullptr);
  return pointers;
}

/// All that the child needs, prepared before it exists.
struct ChildPlan {
  const char* program = nullptr;
  char* const* argv = nullptr;
  char* const* env = nullptr;
  const char* folder = nullptr;  // null: stay
  int out_fd = -1;
  int err_fd = -1;
  bool own_group = true;
  bool die_with_parent = true;
  pid_t parent = 0;
  sigset_t signal_mask{};
  // Written by the child, which shares our memory until exec.
  const char* volatile failed_step = nullptr;
  volatile int error = 0;
};

/// Handlers point into our memory and must not run in the child; ignored signals become default
/// too. By raw system call: a sanitizer's sigaction would note the change in the memory we share.
HS_CHILD_CODE void reset_signal_handlers() {
  constexpr std::size_t kKernelSetBytes = 8;
  constexpr long kDefault[8] = {};  // the kernel's struct sigaction: SIG_DFL, no flags, no mask
  for (int number = 1; number < NSIG; ++number) {
    syscall(SYS_rt_sigaction, number, kDefault, nullptr, kKernelSetBytes);
  }
}

/// Runs the plan in the child; returns only if a step failed, and then the step.
HS_CHILD_CODE const char* execute_plan(const ChildPlan& plan) {
  reset_signal_handlers();
  if (plan.own_group && setpgid(0, 0) != 0) {
    return "set a process group";
  }
  if (plan.die_with_parent && prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) {
    return "set the death signal";
  }
  if (plan.die_with_parent && getppid() != plan.parent) {
    _exit(127);  // NOLINT: ends the child, whose parent died before the death signal was set
  }
  if (plan.out_fd >= 0 && dup2(plan.out_fd, STDOUT_FILENO) < 0) {
    return "redirect stdout";
  }
  if (plan.err_fd >= 0 && dup2(plan.err_fd, STDERR_FILENO) < 0) {
    return "redirect stderr";
  }
  if (plan.folder != nullptr && chdir(plan.folder) != 0) {
    return "change to the folder";
  }
  sigprocmask(SIG_SETMASK, &plan.signal_mask, nullptr);
  execve(plan.program, plan.argv, plan.env);
  return "execute";
}

HS_CHILD_CODE int run_child(void* argument) {
  auto& plan = *static_cast<ChildPlan*>(argument);
  const char* const step = execute_plan(plan);
  plan.error = errno;
  plan.failed_step = step;
  _exit(127);  // NOLINT: ends the child
}

/// Memory for the child's stack, which it needs until exec.
class ChildStack {
 public:
  ChildStack() {
    base_ = mmap(
        nullptr, kSizeBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0
    );
    if (base_ == MAP_FAILED) {
      HS_FAIL(IoError, "process: no memory for a child's stack: ", errno_text(errno));
    }
  }
  ~ChildStack() { munmap(base_, kSizeBytes); }
  ChildStack(const ChildStack&) = delete;
  ChildStack& operator=(const ChildStack&) = delete;

  void* top() const { return static_cast<char*>(base_) + kSizeBytes; }  // it grows down

 private:
  static constexpr std::size_t kSizeBytes = std::size_t{256} << 10;
  void* base_;
};

/// Starts the child and returns when it has executed its program or failed; -1 with errno if there
/// is no child.
pid_t start_child(ChildPlan& plan) {
  const ChildStack stack;
  sigset_t all{};
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &plan.signal_mask);
  const pid_t pid = clone(run_child, stack.top(), CLONE_VM | CLONE_VFORK | SIGCHLD, &plan);
  const int error = errno;
  pthread_sigmask(SIG_SETMASK, &plan.signal_mask, nullptr);
  errno = error;
  return pid;
}

std::string read_all(int fd) {
  std::string text;
  char buffer[4096];
  while (fd >= 0) {
    const ssize_t size = pread(fd, buffer, sizeof(buffer), static_cast<off_t>(text.size()));
    if (size <= 0) {
      break;
    }
    text.append(buffer, static_cast<std::size_t>(size));
  }
  return text;
}

}  // namespace

std::string to_text(const ExitStatus& status) {
  if (status.signal != 0) {
    return concat_text("signal ", status.signal, " (", strsignal(status.signal), ")");
  }
  return concat_text("exit code ", status.code);
}

ChildProcess::ChildProcess(const SpawnOptions& options) : own_group_(options.own_group) {
  HS_CHECK(!options.argv.empty(), "process: nothing to run: argv is empty");
  const std::string program = find_program(options.argv.front());
  std::vector<std::string> arguments = options.argv;
  std::vector<std::string> environment = child_environment(options);
  const std::vector<char*> argv = pointers_to(arguments);
  const std::vector<char*> env = pointers_to(environment);
  Descriptor out(open_output(options.out));
  Descriptor err(open_output(options.err));
  ChildPlan plan{
      .program = program.c_str(),
      .argv = argv.data(),
      .env = env.data(),
      .folder = options.folder.empty() ? nullptr : options.folder.c_str(),
      .out_fd = out.get(),
      .err_fd = options.err_fd >= 0 ? options.err_fd : err.get(),
      .own_group = options.own_group,
      .die_with_parent = options.die_with_parent,
      .parent = getpid(),
      .signal_mask = {},
  };
  const pid_t pid = start_child(plan);
  if (pid < 0) {
    HS_FAIL(IoError, "process: cannot start '", program, "': ", errno_text(errno));
  }
  if (plan.failed_step != nullptr) {
    waitpid(pid, nullptr, 0);
    const char* const step = plan.failed_step;
    const int error = plan.error;
    HS_FAIL(
        IoError,
        "process: cannot start '",
        program,
        "': cannot ",
        step,
        options.folder.empty() ? "" : " (in '" + options.folder + "')",
        ": ",
        errno_text(error)
    );
  }
  pid_ = pid;
  out_fd_ = options.out == ChildOutput::kCapture ? out.release() : -1;
  err_fd_ = options.err == ChildOutput::kCapture ? err.release() : -1;
}

ChildProcess::~ChildProcess() {
  end();
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      own_group_(other.own_group_),
      out_fd_(std::exchange(other.out_fd_, -1)),
      err_fd_(std::exchange(other.err_fd_, -1)),
      status_(other.status_) {}

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  if (this != &other) {
    end();
    pid_ = std::exchange(other.pid_, -1);
    own_group_ = other.own_group_;
    out_fd_ = std::exchange(other.out_fd_, -1);
    err_fd_ = std::exchange(other.err_fd_, -1);
    status_ = other.status_;
  }
  return *this;
}

void ChildProcess::end() noexcept {
  if (pid_ >= 0 && !status_.has_value()) {
    kill(own_group_ ? -pid_ : pid_, SIGKILL);
    while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  for (const int fd : {out_fd_, err_fd_}) {
    if (fd >= 0) {
      close(fd);
    }
  }
  pid_ = -1;
}

std::optional<ExitStatus> ChildProcess::poll() {
  if (status_.has_value() || pid_ < 0) {
    return status_;
  }
  // Look without reaping first: while the child is a zombie its group's number cannot be taken by
  // another, so that killing what is left of the group is safe.
  siginfo_t info = {};
  const int result = waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT | WNOHANG);
  if (result != 0 || info.si_pid == 0) {
    return std::nullopt;
  }
  if (own_group_) {
    kill(-pid_, SIGKILL);
  }
  int raw = 0;
  while (waitpid(pid_, &raw, 0) < 0 && errno == EINTR) {
  }
  status_ = WIFSIGNALED(raw) ? ExitStatus{.code = 0, .signal = WTERMSIG(raw)}
                             : ExitStatus{.code = WEXITSTATUS(raw), .signal = 0};
  return status_;
}

std::optional<ExitStatus> ChildProcess::wait_for(std::int64_t timeout_ms) {
  constexpr std::int64_t kLongestNapNs = 5'000'000;
  const Stopwatch watch;
  std::int64_t nap_ns = 50'000;
  while (true) {
    if (const auto status = poll(); status.has_value()) {
      return status;
    }
    const std::int64_t left_ns = timeout_ms * 1'000'000 - watch.elapsed_ns();
    if (left_ns <= 0) {
      return std::nullopt;
    }
    const timespec nap = {.tv_sec = 0, .tv_nsec = std::min(nap_ns, left_ns)};
    nanosleep(&nap, nullptr);
    nap_ns = std::min(2 * nap_ns, kLongestNapNs);
  }
}

ExitStatus ChildProcess::wait() {
  constexpr std::int64_t kHour = 3'600'000;
  while (true) {
    if (const auto status = wait_for(kHour); status.has_value()) {
      return *status;
    }
  }
}

void ChildProcess::signal(int number) {
  if (pid_ >= 0 && !status_.has_value()) {
    kill(pid_, number);
  }
}

void ChildProcess::signal_group(int number) {
  if (pid_ >= 0 && !status_.has_value()) {
    kill(own_group_ ? -pid_ : pid_, number);
  }
}

std::string ChildProcess::captured_out() const {
  return read_all(out_fd_);
}
std::string ChildProcess::captured_err() const {
  return read_all(err_fd_);
}

}  // namespace hypershard
