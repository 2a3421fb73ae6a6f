// libtorch has one threshold for the process, so objects of all threads are counted.
#include "hypershard/comm/c10d/internal/quiet_store.h"

#include <cstdlib>
#include <mutex>

#include <c10/util/Logging.h>

namespace hypershard::comm::internal {
namespace {

constexpr int kErrorLevel = 2;

struct Threshold {
  std::mutex mutex;
  int num_quiet = 0;
  int before = 0;
  const bool is_users = std::getenv("TORCH_CPP_LOG_LEVEL") != nullptr;
};

Threshold& threshold() {
  static Threshold shared;
  return shared;
}

}  // namespace

QuietStore::QuietStore() {
  Threshold& shared = threshold();
  const std::lock_guard lock(shared.mutex);
  if (!shared.is_users && shared.num_quiet++ == 0) {
    shared.before = FLAGS_caffe2_log_level;
    FLAGS_caffe2_log_level = kErrorLevel;
  }
}

QuietStore::~QuietStore() {
  Threshold& shared = threshold();
  const std::lock_guard lock(shared.mutex);
  if (!shared.is_users && --shared.num_quiet == 0) {
    FLAGS_caffe2_log_level = shared.before;
  }
}

}  // namespace hypershard::comm::internal
