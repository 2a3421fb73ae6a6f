// Why: see ghost_memory.h. A memfd of some MiB is mapped over and over, end to end.
#include "hypershard/train/internal/ghost_memory.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include "hypershard/core/error.h"

namespace hypershard::train::internal {
namespace {

constexpr std::size_t kFoldBytes = std::size_t{16} << 20;  // what all large tensors share
constexpr std::size_t kSmallBytes = std::size_t{1} << 20;  // below this memory is real

// A range of addresses, known to the deleter.
struct Window {
  void* begin;
  std::size_t bytes;
};

void unmap(void* context) {
  auto* window = static_cast<Window*>(context);
  ::munmap(window->begin, window->bytes);
  delete window;
}

class FoldedAllocator final : public c10::Allocator {
 public:
  explicit FoldedAllocator(c10::Allocator* real) : real_(real) {
    fd_ = ::memfd_create("hypershard-plan", MFD_CLOEXEC);
    if (fd_ < 0 || ::ftruncate(fd_, static_cast<off_t>(kFoldBytes)) != 0) {
      HS_FAIL(IoError, "train.plan: no memory of ", kFoldBytes, " bytes: ", errno_text(errno));
    }
  }
  ~FoldedAllocator() override { ::close(fd_); }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes < kSmallBytes) {
      return real_->allocate(bytes);
    }
    const std::size_t whole = (bytes + kFoldBytes - 1) / kFoldBytes * kFoldBytes;
    void* begin =
        ::mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    bool is_mapped = begin != MAP_FAILED;
    for (std::size_t at = 0; is_mapped && at < whole; at += kFoldBytes) {
      void* here = static_cast<std::byte*>(begin) + at;
      is_mapped =
          ::mmap(here, kFoldBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_, 0) !=
          MAP_FAILED;
    }
    if (!is_mapped) {
      HS_FAIL(
          IoError, "train.plan: cannot reserve ", bytes, " bytes of addresses: ", errno_text(errno)
      );
    }
    return {begin, new Window{begin, whole}, &unmap, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    std::memmove(destination, source, bytes);
  }

 private:
  c10::Allocator* real_;
  int fd_ = -1;
};

}  // namespace

struct GhostMemory::Impl {
  Impl() : real(c10::GetCPUAllocator()), folded(real) {}

  c10::Allocator* real;
  FoldedAllocator folded;
};

GhostMemory::GhostMemory() : impl_(std::make_unique<Impl>()) {
  c10::SetCPUAllocator(&impl_->folded);
}

GhostMemory::~GhostMemory() {
  c10::SetCPUAllocator(impl_->real);
}

}  // namespace hypershard::train::internal
