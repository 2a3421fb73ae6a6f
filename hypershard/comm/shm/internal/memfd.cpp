// Why: see memfd.h. A descriptor may be closed once its memory is mapped.
#include "hypershard/comm/shm/internal/memfd.h"

#include <algorithm>
#include <errno.h>
#include <fcntl.h>
#include <fstream>
#include <limits>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

#include "hypershard/core/error.h"
#include "hypershard/core/huge_pages.h"

namespace hypershard::comm::internal {
namespace {

/// Two mappings of the same pages, or one twice.
class MappedMemory : public SharedBuffer {
 public:
  MappedMemory(std::byte* read, std::byte* write, std::int64_t bytes)
      : read_(read), write_(write), bytes_(bytes) {}
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;
  ~MappedMemory() override {
    munmap(write_, static_cast<std::size_t>(bytes_));
    if (read_ != write_) {
      munmap(read_, static_cast<std::size_t>(bytes_));
    }
  }

  const std::byte* read() const override { return read_; }
  std::byte* write() const override { return write_; }
  std::int64_t bytes() const override { return bytes_; }

 private:
  std::byte* read_;
  std::byte* write_;
  std::int64_t bytes_;
};

/// Returns what the host says it could give, or -1 if it does not say.
std::int64_t available_bytes() {
  std::ifstream file("/proc/meminfo");
  std::int64_t kib = -1;
  for (std::string name; file >> name;) {
    std::int64_t value = 0;
    file >> value;
    if (name == "MemAvailable:") {
      kib = value;
    } else if (name == "SwapFree:" && kib >= 0) {
      return (kib + value) * 1024;
    }
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return kib < 0 ? -1 : kib * 1024;
}

/// Refuses what cannot fit: the kernel itself would fill all memory before it found out.
void check_fits(std::int64_t bytes, std::string_view what) {
  const std::int64_t available = available_bytes();
  if (available >= 0 && bytes > available) {
    HS_FAIL(
        CommError,
        "comm.shm: cannot reserve ",
        bytes,
        " bytes of shared memory for ",
        what,
        ": the host has ",
        available,
        " bytes available",
        HS_HINT("use fewer ranks on this host, smaller units or a smaller model")
    );
  }
}

/// The kernel maps at least a byte.
std::int64_t at_least_one(std::int64_t bytes) {
  return std::max<std::int64_t>(1, bytes);
}

std::byte* map(int fd, std::int64_t bytes, int protection, int flags, std::string_view what) {
  void* address =
      mmap(nullptr, static_cast<std::size_t>(bytes), protection, MAP_SHARED | flags, fd, 0);
  if (address == MAP_FAILED) {
    HS_FAIL(
        CommError,
        "comm.shm: cannot map ",
        bytes,
        " bytes of shared memory for ",
        what,
        ": ",
        errno_text(errno)
    );
  }
  return static_cast<std::byte*>(address);
}

}  // namespace

OwnedFd& OwnedFd::operator=(OwnedFd&& other) noexcept {
  reset();
  fd_ = std::exchange(other.fd_, -1);
  return *this;
}

OwnedFd::~OwnedFd() {
  reset();
}

void OwnedFd::reset() {
  if (fd_ >= 0) {
    close(std::exchange(fd_, -1));
  }
}

OwnedFd create_memory(std::int64_t bytes, std::string_view what, RegionUse use) {
  const std::int64_t size = at_least_one(bytes);
  if (use == RegionUse::kData) {
    check_fits(size, what);
  }
  OwnedFd fd(memfd_create("hypershard", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const char* step = "create";
  int error = 0;
  if (!fd.valid()) {
    error = errno;
  } else if (ftruncate(fd.get(), size) != 0) {
    step = "size";
    error = errno;
  } else if (use == RegionUse::kData && fallocate(fd.get(), 0, 0, size) != 0) {
    step = "reserve";
    error = errno;
  } else if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    step = "seal";
    error = errno;
  }
  if (error != 0) {
    HS_FAIL(
        CommError,
        "comm.shm: cannot ",
        step,
        " ",
        size,
        " bytes of shared memory for ",
        what,
        ": ",
        errno_text(error),
        HS_HINT("shared memory counts as memory in use: look at free memory and memory limits")
    );
  }
  return fd;
}

std::shared_ptr<SharedBuffer> map_memory(
    int fd, std::int64_t bytes, std::string_view what, RegionUse use
) {
  const std::int64_t size = at_least_one(bytes);
  const int populate = use == RegionUse::kData ? MAP_POPULATE : 0;
  std::byte* write = map(fd, size, PROT_READ | PROT_WRITE, populate, what);
  if (use == RegionUse::kControl) {
    return std::make_shared<MappedMemory>(write, write, size);
  }
  try {
    std::byte* read = map(fd, size, PROT_READ, populate, what);
    // Where the host offers huge pages for shared memory (shmem_enabled = advise): pages that come
    // on first touch are huge then; those that were reserved are there, and the kernel joins them
    // later.
    advise_huge_pages(write, size);
    advise_huge_pages(read, size);
    return std::make_shared<MappedMemory>(read, write, size);
  } catch (...) {
    munmap(write, static_cast<std::size_t>(size));
    throw;  // raw-throw: passes on the error after unmapping the first half
  }
}

}  // namespace hypershard::comm::internal
