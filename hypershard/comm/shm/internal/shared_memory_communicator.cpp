// Why: see shared_memory_communicator.h. Handles of calls, buffers and boards hold the engine, so
// that they stay valid when the communicator goes first.
#include "hypershard/comm/shm/internal/shared_memory_communicator.h"

#include <utility>

#include "hypershard/comm/shm/internal/shared_handles.h"
#include "hypershard/core/error.h"

namespace hypershard::comm::internal {
namespace {

class SharedWork : public Work {
 public:
  SharedWork(std::shared_ptr<CollectiveEngine> engine, std::shared_ptr<PendingCall> pending)
      : engine_(std::move(engine)), pending_(std::move(pending)) {}

  bool test() override { return engine_->test(*pending_); }
  void wait() override { engine_->wait(*pending_); }
  void wait_released() override { engine_->wait_released(*pending_); }

 private:
  std::shared_ptr<CollectiveEngine> engine_;
  std::shared_ptr<PendingCall> pending_;
};

}  // namespace

SharedMemoryCommunicator::SharedMemoryCommunicator(
    GroupInfo info, std::shared_ptr<RegionSource> source, const SharedOptions& options
)
    : Communicator(info),
      engine_(std::make_shared<CollectiveEngine>(std::move(info), std::move(source), options)) {}

SharedMemoryCommunicator::~SharedMemoryCommunicator() {
  engine_->leave();
}

std::string SharedMemoryCommunicator::backend() const {
  return engine_->sync().source().name();
}

bool SharedMemoryCommunicator::has_shared_memory() const {
  return info().tier == layout::Tier::kIntra;
}

void SharedMemoryCommunicator::check_shares(std::string_view what) const {
  HS_SUPPORTED(
      has_shared_memory(),
      "comm.",
      backend(),
      ": '",
      info().name,
      "' crosses supernodes, so its ranks share no memory for ",
      what,
      HS_HINT("ask has_shared_memory() first")
  );
}

std::shared_ptr<SharedBuffer> SharedMemoryCommunicator::allocate(
    std::int64_t bytes, std::string_view what, RegionUse use
) {
  check_shares(what);
  HS_CHECK_GE(bytes, 0, "comm.", backend(), ": size of the shared buffer for ", what);
  return std::make_shared<RegisteredBuffer>(
      engine_, engine_->allocate_region(bytes, what, use), bytes
  );
}

std::shared_ptr<SharedBuffer> SharedMemoryCommunicator::allocate_shared(
    std::int64_t bytes, std::string_view what
) {
  return allocate(bytes, what, RegionUse::kData);
}

std::shared_ptr<SharedBuffer> SharedMemoryCommunicator::allocate_sparse(
    std::int64_t bytes, std::string_view what
) {
  return allocate(bytes, what, RegionUse::kSparse);
}

std::shared_ptr<SymmetricArena> SharedMemoryCommunicator::allocate_symmetric(
    std::int64_t bytes, std::string_view what
) {
  check_shares(what);
  HS_CHECK_GE(bytes, 0, "comm.", backend(), ": size of the symmetric arena for ", what);
  return std::make_shared<RegisteredArena>(engine_, bytes, what);
}

std::shared_ptr<EpochBoard> SharedMemoryCommunicator::make_epoch_board(
    int num_rows, std::string_view what
) {
  check_shares(what);
  HS_CHECK_GE(num_rows, 0, "comm.", backend(), ": rows of the epoch board for ", what);
  return std::make_shared<SharedEpochBoard>(engine_, num_rows, what);
}

CommStats SharedMemoryCommunicator::measured() const {
  CommStats stats = engine_->sync().stats();
  stats.busy_ns = engine_->busy_ns();
  return stats;
}

WorkPtr SharedMemoryCommunicator::start(Call call) {
  if (call.segments.size() > 1) {
    return start_each(call);  // they lie where peers read them: one call would move no fewer bytes
  }
  SharedCall shared;
  shared.op = call.op;
  shared.output = std::move(call.output);
  shared.input = std::move(call.input);
  shared.output_counts = std::move(call.output_counts);
  shared.input_counts = std::move(call.input_counts);
  shared.reduce = call.reduce;
  shared.root = call.root;
  shared.unit = std::move(call.unit);
  return std::make_shared<SharedWork>(engine_, engine_->post(std::move(shared)));
}

}  // namespace hypershard::comm::internal
