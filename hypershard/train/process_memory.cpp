// Why: /proc and malloc's settings; see process_memory.h.
#include "hypershard/train/process_memory.h"

#include <fstream>
#include <malloc.h>
#include <sstream>
#include <string>

namespace hypershard::train {
namespace {

constexpr int kNeverTrim = -1;
constexpr int kTopPadBytes = 64 << 20;

// Finds `name:   123 kB` in a file of /proc.
std::int64_t field_bytes(const char* path, const std::string& name) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (line.compare(0, name.size(), name) == 0) {
      std::istringstream rest(line.substr(name.size()));
      std::int64_t kib = 0;
      rest >> kib;
      return kib * 1024;
    }
  }
  return 0;
}

}  // namespace

std::int64_t peak_resident_bytes() {
  return field_bytes("/proc/self/status", "VmHWM:");
}

std::int64_t resident_bytes() {
  return field_bytes("/proc/self/status", "VmRSS:");
}

std::int64_t proportional_bytes() {
  return field_bytes("/proc/self/smaps_rollup", "Pss:");
}

std::int64_t total_memory_bytes() {
  return field_bytes("/proc/meminfo", "MemTotal:");
}

void keep_freed_memory() {
  ::mallopt(M_MMAP_MAX, 0);
  ::mallopt(M_TRIM_THRESHOLD, kNeverTrim);
  ::mallopt(M_TOP_PAD, kTopPadBytes);
}

}  // namespace hypershard::train
