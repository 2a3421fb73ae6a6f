// Why: planning a model that does not fit here must not allocate it. While this object lives, large
// CPU tensors lie in a window of memory that is folded onto a few pages.
#pragma once

#include <memory>

namespace hypershard::train::internal {

/// Replaces libtorch's CPU allocator while alive. Large tensors may be written and read, but their
/// contents mean nothing, since all of them share the same pages. Tensors made meanwhile must go
/// before it does.
/// Threads: one such object at a time, while no other thread allocates tensors.
class GhostMemory {
 public:
  GhostMemory();
  ~GhostMemory();
  GhostMemory(const GhostMemory&) = delete;
  GhostMemory& operator=(const GhostMemory&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hypershard::train::internal
