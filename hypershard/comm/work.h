// The handle of a collective in flight.
// Two ends matter: when the result may be read, and when the input may be written again.
#pragma once

#include <memory>

namespace hypershard::comm {

/// A collective that has been started.
///
/// Life cycle: started by a Communicator method; `wait()` once or more; then destroyed. Destroying
/// an unfinished Work neither cancels nor waits: the tensors it holds stay alive until the back end
/// is done with them. A back end may do its part of the work inside test() and wait() (shared
/// memory does), so that a rank which never waits holds back its peers; whoever waits for one works
/// on all that its thread has open, oldest first. Threads: one at a time, the communicator's own.
class Work {
 public:
  virtual ~Work() = default;

  /// Advances without blocking; returns true once the result may be read.
  /// Errors: CommError as for wait().
  virtual bool test() = 0;

  /// Blocks until the result may be read by the current thread (on devices: by the current stream).
  /// Errors: CommError naming operation, communicator, unit, sequence number and the peers that lag
  /// or died.
  virtual void wait() = 0;

  /// Blocks until this rank's input may be written again; implies wait(). Differs from wait() only
  /// where peers read it in place, and never for all-reduce and broadcast, whose tensor is input
  /// and output: their result may be written once it may be read.
  virtual void wait_released() { wait(); }
};
using WorkPtr = std::shared_ptr<Work>;

}  // namespace hypershard::comm
