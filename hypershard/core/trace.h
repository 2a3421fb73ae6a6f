// Why: where a step's time goes is seen, not guessed: spans of all ranks and threads on lanes by
// purpose, in the format that Perfetto and Chrome open. Off, a span costs one relaxed load and a
// branch.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace hypershard {

/// Rows of the picture. Spans that overlap without nesting get further rows of the same lane.
enum class TraceLane : std::uint8_t {
  kCompute,
  kUnshard,
  kReduce,
  kBetween,  ///< collectives between supernodes
  kWait,
  kPublish,
  kOptimizer,
  kData,
  kCheckpoint,
  kOther,
};

std::string_view to_text(TraceLane lane);

namespace internal {
extern std::atomic<bool> trace_on;
}

/// Tells whether spans are recorded.
inline bool trace_enabled() {
  return internal::trace_on.load(std::memory_order_relaxed);
}

/// Options of one recording.
struct TraceOptions {
  /// Memory bound: later events are counted and dropped, and writing the trace warns of them.
  std::size_t max_events = std::size_t{1} << 20;
};

/// Forgets what was recorded and records from now on. Threads: any, as for all functions here.
void start_trace(TraceOptions options = {});
/// Stops recording; spans open now are still recorded when they end.
void stop_trace();

/// Returns a new name for an arrow between two spans, unique over the ranks of a job.
std::uint64_t next_trace_flow();

/// Records the time from construction to destruction as `name` + `path` on a lane.
///
/// The rank is the constructing thread's (`error_rank`). Both texts are read by the constructor
/// only, and only while tracing.
class TraceSpan {
 public:
  TraceSpan(TraceLane lane, std::string_view name, std::string_view path = {}) : lane_(lane) {
    if (trace_enabled()) [[unlikely]] {
      begin(name, path);
    }
  }
  ~TraceSpan() {
    if (begin_ns_ >= 0) [[unlikely]] {
      end();
    }
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

  /// Shows a number of bytes with the span.
  void set_bytes(std::int64_t num_bytes) { bytes_ = num_bytes; }
  /// Draws an arrow from this span to the one that calls `flow_from` with the same name.
  void flow_to(std::uint64_t flow) { flow_to_ = flow; }
  void flow_from(std::uint64_t flow) { flow_from_ = flow; }

 private:
  void begin(std::string_view name, std::string_view path);
  void end() noexcept;

  std::int64_t begin_ns_ = -1;
  std::int64_t bytes_ = -1;
  std::uint64_t flow_to_ = 0;
  std::uint64_t flow_from_ = 0;
  std::uint32_t name_ = 0;
  TraceLane lane_;
};

/// Arrows of a span: names from next_trace_flow(), 0 for none.
struct TraceFlows {
  std::uint64_t to = 0;    ///< to the span that has the same name in `from`
  std::uint64_t from = 0;  ///< the other way round
};

/// A span that one event begins and another ends, e.g. the start of a transfer and the wait that
/// saw its end. Without a begin while tracing, its end records nothing.
class OpenSpan {
 public:
  void begin() {
    if (trace_enabled()) [[unlikely]] {
      begin_at_now();
    }
  }
  void end(TraceLane lane, std::string_view name, std::string_view path, TraceFlows flows = {}) {
    if (begin_ns_ >= 0) [[unlikely]] {
      record(lane, name, path, flows);
    }
  }

 private:
  void begin_at_now();
  void record(TraceLane lane, std::string_view name, std::string_view path, TraceFlows flows);

  std::int64_t begin_ns_ = -1;
};

/// A span that was timed elsewhere, e.g. by the thread that ran a collective; times are `now_ns()`.
struct TimedSpan {
  TraceLane lane = TraceLane::kOther;
  std::string_view name;
  std::string_view path = {};
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  std::int64_t bytes = -1;
  std::uint64_t flow_to = 0;
  std::uint64_t flow_from = 0;
};

/// Records a finished span for the calling thread's rank.
void trace_span(const TimedSpan& span);
/// Records a moment.
void trace_instant(TraceLane lane, std::string_view name, std::string_view path = {});
/// Records the value that a named curve has from now on.
void trace_counter(std::string_view name, double value);

/// Returns all recorded events as a JSON document: pid = rank, tid = lane.
std::string trace_json();
/// Writes `trace_json()` to a file, beside it first and then renamed.
/// Errors: IoError.
void write_trace(const std::string& path);
/// Joins the files of several ranks into one; clocks of different hosts are aligned by wall time.
/// Errors: IoError if a file cannot be read or written or is not a trace.
void merge_traces(std::span<const std::string> paths, const std::string& merged_path);

}  // namespace hypershard
