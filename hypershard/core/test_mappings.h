// What the kernel says of a mapping of this process, for tests.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace hypershard::test {

inline bool kernel_has_huge_pages() {
  return std::filesystem::exists("/sys/kernel/mm/transparent_hugepage");
}

/// Tells whether huge pages were asked for the mapping that holds an address.
inline bool wants_huge_pages(const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  bool is_here = false;
  std::ifstream smaps("/proc/self/smaps");
  for (std::string line; std::getline(smaps, line);) {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    char dash = 0;
    std::istringstream words(line);
    if (words >> std::hex >> begin >> dash >> end && dash == '-') {
      is_here = begin <= at && at < end;
    } else if (is_here && line.starts_with("VmFlags:")) {
      return (line + " ").find(" hg ") != std::string::npos;
    }
  }
  return false;
}

}  // namespace hypershard::test
