// The dispatch key on which a program's operators can be watched, and how machinery below the
// program stays out of sight: what an engine or a boundary does is not what the model says.
#pragma once

#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace hypershard::nn {

/// A mode key above autograd that libtorch leaves to others; plan/tracker.h has its fallback.
inline constexpr c10::DispatchKey kWatchKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

/// Keeps the calling thread's operators from whoever watches, while alive; costs two thread-local
/// writes. Nests. Threads: made and destroyed on one thread.
class Unwatched {
 public:
  Unwatched() = default;
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;

 private:
  c10::impl::ExcludeDispatchKeyGuard exclude_{kWatchKey};
};

}  // namespace hypershard::nn
