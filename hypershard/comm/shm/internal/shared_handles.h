// Why: what users hold of a group's shared memory: buffers, arenas, epoch boards. Each takes itself
// off the engine's table when it goes.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <string_view>

#include "hypershard/comm/arena.h"
#include "hypershard/comm/shm/internal/collective_engine.h"

namespace hypershard::comm::internal {

/// One buffer for all ranks, known to the engine as a region to read in place.
class RegisteredBuffer : public SharedBuffer {
 public:
  RegisteredBuffer(std::weak_ptr<CollectiveEngine> engine, Region region, std::int64_t bytes);
  ~RegisteredBuffer() override;
  RegisteredBuffer(const RegisteredBuffer&) = delete;
  RegisteredBuffer& operator=(const RegisteredBuffer&) = delete;

  const std::byte* read() const override { return region_.buffer->read(); }
  std::byte* write() const override { return region_.buffer->write(); }
  std::int64_t bytes() const override { return bytes_; }

 private:
  std::weak_ptr<CollectiveEngine> engine_;
  Region region_;
  std::int64_t bytes_;
};

/// A page-aligned stretch of one region for each rank.
class RegisteredArena : public SymmetricArena {
 public:
  /// Collective. Errors: as CollectiveEngine::allocate_region.
  RegisteredArena(
      const std::shared_ptr<CollectiveEngine>& engine, std::int64_t bytes, std::string_view what
  );

  std::byte* local() const override;
  const std::byte* peer(int rank) const override;
  std::int64_t bytes() const override { return bytes_; }

 private:
  std::int64_t bytes_;
  std::int64_t stride_;
  int rank_;
  int size_;
  std::unique_ptr<RegisteredBuffer> buffer_;
};

/// Epoch counters, a row of cache lines a rank; waiters sleep as in the collectives.
class SharedEpochBoard : public EpochBoard {
 public:
  /// Collective. Errors: as CollectiveEngine::allocate_control.
  SharedEpochBoard(std::shared_ptr<CollectiveEngine> engine, int num_rows, std::string_view what);

  int num_rows() const override { return num_rows_; }
  void publish(int row, std::uint64_t epoch) override;
  bool reached(int row, std::uint64_t epoch) const override;
  void wait_all(int row, std::uint64_t epoch, std::string_view what, std::string_view unit)
      override;

 private:
  std::atomic<std::uint64_t>& counter(int rank, int row) const;
  void check_row(int row) const;

  std::shared_ptr<CollectiveEngine> engine_;
  std::string what_;
  int num_rows_;
  std::int64_t stride_;
  std::shared_ptr<SharedBuffer> memory_;
};

}  // namespace hypershard::comm::internal
