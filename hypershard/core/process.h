// Why: launching and stopping ranks must leave nothing behind: no orphan, no zombie, no stray
// group. A few POSIX pieces with owners, used by the launcher and by tests with real processes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace hypershard {

/// Where a child's output stream goes.
enum class ChildOutput { kInherit, kCapture, kDiscard };

/// What to run and in which surroundings.
struct SpawnOptions {
  std::vector<std::string> argv;  ///< argv[0]: a path, or a name that PATH knows
  std::vector<std::pair<std::string, std::string>> env = {};  ///< on top of this process's
  std::vector<std::string> unset_env = {};                    ///< taken away before `env` is added
  std::string folder = {};                                    ///< empty: this process's
  ChildOutput out = ChildOutput::kInherit;
  ChildOutput err = ChildOutput::kInherit;
  int err_fd = -1;  ///< if not negative, where stderr goes instead, e.g. a pipe; stays the caller's
  /// A process group of its own: Ctrl-C reaches only this process, which passes it on as it likes,
  /// and what the child leaves running in its group is killed when the child ends.
  bool own_group = true;
  /// Kill the child when this process dies. The kernel watches the spawning *thread*: spawn from
  /// one that lives as long as the child.
  bool die_with_parent = true;
};

/// How a process ended: by `exit(code)` or by a signal.
struct ExitStatus {
  int code = 0;
  int signal = 0;

  bool is_success() const { return code == 0 && signal == 0; }
};

/// Writes `exit code 3` or `signal 9 (Killed)`.
std::string to_text(const ExitStatus& status);

/// A running child, owned: the destructor kills its group and reaps it.
///
/// Threads: one at a time.
class ChildProcess {
 public:
  /// Starts a program.
  ///
  /// The child gets default signal handlers, only the standard streams (other descriptors of this
  /// process must be close-on-exec) and no memory of ours: no fork of a process with threads.
  /// Errors: InvalidArgument if argv is empty; IoError naming program and cause, e.g. if there is
  /// none.
  explicit ChildProcess(const SpawnOptions& options);
  ~ChildProcess();
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;

  int pid() const { return pid_; }
  /// Returns the status if the child has ended.
  std::optional<ExitStatus> poll();
  /// Waits; returns nothing if the child still runs after `timeout_ms`.
  std::optional<ExitStatus> wait_for(std::int64_t timeout_ms);
  ExitStatus wait();
  /// Sends a signal to the child, or to its whole group; does nothing once it has ended.
  void signal(int number);
  void signal_group(int number);

  /// Returns what was written so far to a stream that is captured.
  std::string captured_out() const;
  std::string captured_err() const;

 private:
  void end() noexcept;

  int pid_ = -1;
  bool own_group_ = false;
  int out_fd_ = -1;  // memfd of a captured stream, or -1
  int err_fd_ = -1;
  std::optional<ExitStatus> status_;
};

/// Makes SIGINT, SIGTERM and SIGHUP set a flag; a second one of the same kind ends the process at
/// once. SIGHUP stays ignored if it is: whoever says nohup means it.
/// Threads: call once, from main, before other threads start.
void install_stop_signals();
/// Tells whether this process ignores SIGHUP, as under nohup.
bool hangup_is_ignored();
/// Tells whether a stop signal has come, or `request_stop` was called.
bool stop_requested();
/// Returns the signal's number, 0 if none came.
int stop_signal();
/// Sets the flag by hand; 0 clears it. Safe in a signal handler.
void request_stop(int signal_number);

/// Names this boot of the host; equal for all processes of the host, empty if the kernel hides it.
std::string boot_id();
std::string host_name();
/// Identifies the network namespace; 0 if the kernel hides it. With `boot_id` this tells whether
/// two processes are on the same host.
std::uint64_t network_namespace();
/// Path of the running program.
/// Errors: IoError if the kernel hides it.
std::string program_path();
/// Number of cores that this process may run on.
int available_cores();
/// Finds a TCP port on 127.0.0.1 that is free now. Another process may take it before it is used:
/// bind at once and try again on failure.
/// Errors: IoError.
int free_loopback_port();

}  // namespace hypershard
