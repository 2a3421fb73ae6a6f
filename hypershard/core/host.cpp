// Why: what a process asks about itself and its host, and the flag that stop signals set; the other
// half of process.h.
#include <arpa/inet.h>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hypershard/core/error.h"
#include "hypershard/core/process.h"

namespace hypershard {
namespace {

std::atomic<int> stop_number{0};
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler stores to it");

void on_stop_signal(int number) {
  if (stop_number.exchange(number, std::memory_order_relaxed) == number) {
    // The second of its kind: whoever sends it no longer wants to wait.
    std::signal(number, SIG_DFL);
    std::raise(number);
  }
}

}  // namespace

void install_stop_signals() {
  struct sigaction action = {};
  action.sa_handler = on_stop_signal;
  action.sa_flags = SA_RESTART;  // reads and writes of libraries that do not expect EINTR go on
  sigemptyset(&action.sa_mask);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    if (number != SIGHUP || !hangup_is_ignored()) {
      sigaction(number, &action, nullptr);
    }
  }
}

bool hangup_is_ignored() {
  struct sigaction current = {};
  return sigaction(SIGHUP, nullptr, &current) == 0 && current.sa_handler == SIG_IGN;
}

bool stop_requested() {
  return stop_signal() != 0;
}
int stop_signal() {
  return stop_number.load(std::memory_order_relaxed);
}
void request_stop(int signal_number) {
  stop_number.store(signal_number, std::memory_order_relaxed);
}

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "";
}

std::uint64_t network_namespace() {
  struct stat status {};
  return stat("/proc/self/ns/net", &status) == 0 ? status.st_ino : 0;
}

std::string program_path() {
  std::string path(4096, '\0');
  const ssize_t size = readlink("/proc/self/exe", path.data(), path.size());
  if (size < 0) {
    HS_FAIL(IoError, "process: cannot read /proc/self/exe: ", errno_text(errno));
  }
  path.resize(static_cast<std::size_t>(size));
  return path;
}

int available_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) {
    return CPU_COUNT(&cores);
  }
  const long num_online = sysconf(_SC_NPROCESSORS_ONLN);  // more cores than cpu_set_t holds
  return num_online > 0 ? static_cast<int>(num_online) : 1;
}

int free_loopback_port() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* const raw = reinterpret_cast<sockaddr*>(&address);
  const bool is_bound = fd >= 0 && bind(fd, raw, size) == 0 && getsockname(fd, raw, &size) == 0;
  const int error = errno;
  if (fd >= 0) {
    close(fd);
  }
  if (!is_bound) {
    HS_FAIL(IoError, "process: no free TCP port on 127.0.0.1: ", errno_text(error));
  }
  return ntohs(address.sin_port);
}

}  // namespace hypershard
