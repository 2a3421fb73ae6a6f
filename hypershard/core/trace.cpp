// Why: recording of trace events. Each thread appends to a buffer of its own under a lock that only
// the reader contends for; buffers outlive their threads, so nothing is lost when a thread ends.
#include "hypershard/core/trace.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "hypershard/core/clock.h"
#include "hypershard/core/error_context.h"
#include "hypershard/core/internal/trace_event.h"

namespace hypershard {
namespace {

using internal::TraceEvent;
using internal::TraceKind;

struct Buffer {
  std::mutex mutex;
  std::vector<TraceEvent> events;  // guarded by mutex
};

struct Recorder {
  std::atomic<std::int64_t> start_ns{0};
  std::atomic<std::size_t> num_events{0};
  std::atomic<std::size_t> max_events{0};
  std::atomic<std::uint64_t> next_flow{1};

  std::mutex mutex;                                    // taken before any Buffer::mutex
  std::vector<std::shared_ptr<Buffer>> buffers;        // guarded by mutex
  std::unordered_map<std::string, std::uint32_t> ids;  // guarded by mutex
  std::vector<std::string> names;                      // guarded by mutex
};

// Leaked: threads may still end spans while the process exits.
Recorder& recorder() {
  static auto* const instance = new Recorder;
  return *instance;
}

Buffer& own_buffer() {
  thread_local const std::shared_ptr<Buffer> buffer = [] {
    auto created = std::make_shared<Buffer>();
    const std::lock_guard lock(recorder().mutex);
    recorder().buffers.push_back(created);
    return created;
  }();
  return *buffer;
}

std::uint32_t intern(std::string_view name, std::string_view path) {
  std::string whole(name);
  whole += path;
  const std::lock_guard lock(recorder().mutex);
  const auto next = static_cast<std::uint32_t>(recorder().names.size());
  const auto [entry, is_new] = recorder().ids.try_emplace(whole, next);
  if (is_new) {
    recorder().names.push_back(std::move(whole));
  }
  return entry->second;
}

void append(TraceEvent event) {
  Recorder& all = recorder();
  // A span that began before this recording belongs to the one before, which was forgotten.
  if (event.begin_ns < all.start_ns.load(std::memory_order_acquire)) {
    return;
  }
  const std::size_t number = all.num_events.fetch_add(1, std::memory_order_relaxed);
  if (number >= all.max_events.load(std::memory_order_relaxed)) {
    return;
  }
  event.rank = std::max(error_rank().rank, 0);
  Buffer& buffer = own_buffer();
  const std::lock_guard lock(buffer.mutex);
  buffer.events.push_back(event);
}

}  // namespace

namespace internal {

std::atomic<bool> trace_on{false};

TraceRecord copy_trace() {
  Recorder& all = recorder();
  TraceRecord record;
  const std::lock_guard lock(all.mutex);
  record.names = all.names;
  for (const auto& buffer : all.buffers) {
    const std::lock_guard buffer_lock(buffer->mutex);
    record.events.insert(record.events.end(), buffer->events.begin(), buffer->events.end());
  }
  const std::size_t num_events = all.num_events.load();
  const std::size_t max_events = all.max_events.load();
  record.num_dropped = num_events > max_events ? num_events - max_events : 0;
  return record;
}

}  // namespace internal

std::string_view to_text(TraceLane lane) {
  switch (lane) {
    case TraceLane::kCompute:
      return "compute";
    case TraceLane::kUnshard:
      return "unshard";
    case TraceLane::kReduce:
      return "reduce";
    case TraceLane::kBetween:
      return "between supernodes";
    case TraceLane::kWait:
      return "wait";
    case TraceLane::kPublish:
      return "publish";
    case TraceLane::kOptimizer:
      return "optimizer";
    case TraceLane::kData:
      return "data";
    case TraceLane::kCheckpoint:
      return "checkpoint";
    case TraceLane::kOther:
      return "other";
  }
  return "unknown";
}

void start_trace(TraceOptions options) {
  Recorder& all = recorder();
  const std::lock_guard lock(all.mutex);
  // Names stay: spans that are open now keep their ids.
  std::erase_if(all.buffers, [](const auto& buffer) { return buffer.use_count() == 1; });
  for (const auto& buffer : all.buffers) {
    const std::lock_guard buffer_lock(buffer->mutex);
    buffer->events.clear();
  }
  all.num_events.store(0);
  all.max_events.store(options.max_events);
  all.start_ns.store(now_ns(), std::memory_order_release);
  internal::trace_on.store(true, std::memory_order_relaxed);
}

void stop_trace() {
  internal::trace_on.store(false, std::memory_order_relaxed);
}

std::uint64_t next_trace_flow() {
  constexpr int kRankShift = 40;
  const auto rank = static_cast<std::uint64_t>(std::max(error_rank().rank, 0));
  return (rank << kRankShift) | recorder().next_flow.fetch_add(1, std::memory_order_relaxed);
}

void TraceSpan::begin(std::string_view name, std::string_view path) {
  name_ = intern(name, path);
  begin_ns_ = now_ns();
}

void TraceSpan::end() noexcept {
  append({
      .begin_ns = begin_ns_,
      .end_ns = now_ns(),
      .bytes = bytes_,
      .flow_to = flow_to_,
      .flow_from = flow_from_,
      .name = name_,
      .lane = lane_,
      .kind = TraceKind::kSpan,
  });
}

void OpenSpan::begin_at_now() {
  begin_ns_ = now_ns();
}

void OpenSpan::record(
    TraceLane lane, std::string_view name, std::string_view path, TraceFlows flows
) {
  trace_span(
      {.lane = lane,
       .name = name,
       .path = path,
       .begin_ns = begin_ns_,
       .end_ns = now_ns(),
       .flow_to = flows.to,
       .flow_from = flows.from}
  );
  begin_ns_ = -1;
}

void trace_span(const TimedSpan& span) {
  if (trace_enabled()) {
    append({
        .begin_ns = span.begin_ns,
        .end_ns = span.end_ns,
        .bytes = span.bytes,
        .flow_to = span.flow_to,
        .flow_from = span.flow_from,
        .name = intern(span.name, span.path),
        .lane = span.lane,
        .kind = TraceKind::kSpan,
    });
  }
}

void trace_instant(TraceLane lane, std::string_view name, std::string_view path) {
  if (trace_enabled()) {
    const std::int64_t now = now_ns();
    append({
        .begin_ns = now,
        .end_ns = now,
        .name = intern(name, path),
        .lane = lane,
        .kind = TraceKind::kInstant,
    });
  }
}

void trace_counter(std::string_view name, double value) {
  if (trace_enabled()) {
    const std::int64_t now = now_ns();
    append({
        .begin_ns = now,
        .end_ns = now,
        .value = value,
        .name = intern(name, ""),
        .kind = TraceKind::kCounter,
    });
  }
}

}  // namespace hypershard
