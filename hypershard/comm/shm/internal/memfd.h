// Why: memory of the kernel's that has no name in any file system, so that nothing is left behind
// however a rank ends.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "hypershard/comm/arena.h"
#include "hypershard/comm/shm/internal/region_source.h"

namespace hypershard::comm::internal {

/// Owns a file descriptor.
class OwnedFd {
 public:
  OwnedFd() = default;
  explicit OwnedFd(int fd) : fd_(fd) {}
  OwnedFd(OwnedFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept;
  ~OwnedFd();

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

/// Creates `bytes` of zeroed anonymous memory behind a descriptor; its size is sealed.
///
/// For kData the pages are reserved at once, so that a full memory is an error here and not a
/// signal later.
/// Errors: CommError with the system's text.
OwnedFd create_memory(std::int64_t bytes, std::string_view what, RegionUse use);

/// Maps the memory: kData and kSparse twice (read-only and writable), kData populated, kControl
/// once. Errors: CommError with the system's text.
std::shared_ptr<SharedBuffer> map_memory(
    int fd, std::int64_t bytes, std::string_view what, RegionUse use
);

}  // namespace hypershard::comm::internal
