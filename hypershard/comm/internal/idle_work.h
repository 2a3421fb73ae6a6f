// Why: a rank that waits on one communicator must go on with its part on the others. Where memory
// is shared, a peer's progress may be that very part, and the peer be what is waited for.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace hypershard::comm::internal {

/// Something whose calls move only while its thread works on them.
///
/// Threads: belongs to the thread that last called adopt(); no other one works it.
class IdleWorker {
 public:
  enum class State : std::uint8_t {
    kNothing,  ///< no call is open
    kStuck,    ///< calls are open, and wait for peers
    kMoved,    ///< some got on
  };
  virtual ~IdleWorker() = default;
  /// Does what can be done now. Errors: CommError if the group has failed.
  virtual State work() = 0;

 private:
  friend class IdleWork;
  std::atomic<const void*> owner_ = nullptr;
};

/// The workers of the calling thread.
class IdleWork {
 public:
  /// Makes a worker this thread's; costs nothing if it is.
  static void adopt(const std::shared_ptr<IdleWorker>& worker);
  /// Works all but `except`; what got on took time that is not the wait's, which is added to
  /// `moved_ns`. Errors: as IdleWorker::work.
  static IdleWorker::State work(const IdleWorker* except, std::int64_t& moved_ns);
};

/// How long a wait may sleep while other calls of its thread are open: what they need does not wake
/// it.
inline constexpr std::int64_t kIdleSliceNs = 500'000;

}  // namespace hypershard::comm::internal
