// Why: an error must say which rank failed and in the middle of what, without every call passing it
// on. Both live in thread-local state that errors and log lines read.
#pragma once

#include <string>
#include <string_view>

namespace hypershard {

/// A rank and the number of ranks; `rank` is -1 while unknown.
struct ErrorRank {
  int rank = -1;
  int world_size = 0;
};

/// Sets the rank that prefixes this process's errors and log lines; a negative rank clears it.
/// Threads: any.
void set_error_rank(int rank, int world_size);
/// Returns the calling thread's rank if one is set, else the process's.
ErrorRank error_rank();

/// Gives the calling thread a rank of its own while alive: tests run ranks as threads.
class ThreadErrorRank {
 public:
  ThreadErrorRank(int rank, int world_size);
  ~ThreadErrorRank();
  ThreadErrorRank(const ThreadErrorRank&) = delete;
  ThreadErrorRank& operator=(const ThreadErrorRank&) = delete;

 private:
  ErrorRank previous_;
};

/// Adds a step to the `while:` of errors thrown by this thread while alive: `fully_shard >
/// blocks.3`.
///
/// Lvalue strings and literals are borrowed and must outlive the object; temporaries are kept.
/// Costs two pointer writes, so it may stand in hot code. Objects must end in reverse order, as
/// locals do.
class ErrorContext {
 public:
  explicit ErrorContext(const char* step) : ErrorContext(std::string_view(step)) {}
  explicit ErrorContext(const std::string& step) : ErrorContext(std::string_view(step)) {}
  explicit ErrorContext(std::string&& step);
  explicit ErrorContext(std::string_view step);
  ~ErrorContext();
  ErrorContext(const ErrorContext&) = delete;
  ErrorContext& operator=(const ErrorContext&) = delete;

  std::string_view step() const { return step_; }
  const ErrorContext* outer() const { return outer_; }

 private:
  std::string kept_;
  std::string_view step_;
  const ErrorContext* outer_;
};

/// Returns the calling thread's context, `a > b > c`; hand it to the `ErrorContext` of a worker
/// thread.
std::string error_context();

}  // namespace hypershard
