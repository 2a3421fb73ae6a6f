// Why: the Communicator over a CollectiveEngine; local and shm differ only in their RegionSource.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "hypershard/comm/communicator.h"
#include "hypershard/comm/shm/internal/collective_engine.h"

namespace hypershard::comm::internal {

/// A communicator whose ranks see each other's memory.
///
/// Only groups inside one supernode offer shared buffers: a group that crosses supernodes behaves
/// as over a network, so that emulated supernodes on one host stay apart.
class SharedMemoryCommunicator : public Communicator {
 public:
  /// Collective. Errors: as RegionSource::allocate.
  SharedMemoryCommunicator(
      GroupInfo info, std::shared_ptr<RegionSource> source, const SharedOptions& options
  );
  ~SharedMemoryCommunicator() override;

  std::string backend() const override;
  bool has_shared_memory() const override;
  std::shared_ptr<SharedBuffer> allocate_shared(std::int64_t bytes, std::string_view what) override;
  std::shared_ptr<SharedBuffer> allocate_sparse(std::int64_t bytes, std::string_view what) override;
  std::shared_ptr<SymmetricArena> allocate_symmetric(std::int64_t bytes, std::string_view what)
      override;
  std::shared_ptr<EpochBoard> make_epoch_board(int num_rows, std::string_view what) override;

 protected:
  WorkPtr start(Call call) override;
  CommStats measured() const override;

 private:
  void check_shares(std::string_view what) const;
  std::shared_ptr<SharedBuffer> allocate(std::int64_t bytes, std::string_view what, RegionUse use);

  std::shared_ptr<CollectiveEngine> engine_;
};

}  // namespace hypershard::comm::internal
