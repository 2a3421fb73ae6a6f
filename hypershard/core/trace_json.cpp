// Why: traces as files. The format is Chrome's trace event format, which Perfetto reads too: see
// "Trace Event Format", Google, 2016.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <map>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"
#include "hypershard/core/internal/trace_event.h"
#include "hypershard/core/log.h"
#include "hypershard/core/process.h"
#include "hypershard/core/trace.h"

namespace hypershard {
namespace {

using internal::TraceEvent;
using internal::TraceKind;
using internal::TraceRecord;
using Json = nlohmann::json;

constexpr int kRowsPerLane = 100;

int lane_tid(TraceLane lane) {
  return (static_cast<int>(lane) + 1) * kRowsPerLane;
}

/// Microseconds, the unit of the format, with the clock's nanoseconds.
Json micros(std::int64_t time_ns) {
  return static_cast<double>(time_ns) * 1e-3;
}

/// Places spans on rows so that on one row any two nest or are apart, as the format demands.
class Rows {
 public:
  /// Returns the row of a span; spans must come by begin, then longest first.
  int place(const TraceEvent& span) {
    for (std::size_t row = 0;; ++row) {
      if (row == open_ends_.size()) {
        open_ends_.emplace_back();
      }
      std::vector<std::int64_t>& ends = open_ends_[row];
      while (!ends.empty() && ends.back() <= span.begin_ns) {
        ends.pop_back();
      }
      const bool is_last = row + 1 == kRowsPerLane;
      if (ends.empty() || ends.back() >= span.end_ns || is_last) {
        ends.push_back(span.end_ns);
        return static_cast<int>(row);
      }
    }
  }

 private:
  std::vector<std::vector<std::int64_t>> open_ends_;  // per row, outermost first
};

class Writer {
 public:
  explicit Writer(const TraceRecord& record) : record_(record) {}

  Json events() {
    std::vector<TraceEvent> sorted = record_.events;
    std::stable_sort(sorted.begin(), sorted.end(), [](const TraceEvent& a, const TraceEvent& b) {
      return std::pair(a.begin_ns, -a.end_ns) < std::pair(b.begin_ns, -b.end_ns);
    });
    for (const TraceEvent& event : sorted) {
      add(event);
    }
    for (const auto& [rank, tid] : rows_used_) {
      add_row_name(rank, tid);
    }
    return std::move(events_);
  }

 private:
  Json base(const TraceEvent& event, const char* phase) const {
    return {
        {"name", record_.names.at(event.name)},
        {"ph", phase},
        {"ts", micros(event.begin_ns)},
        {"pid", event.rank},
    };
  }

  void add(const TraceEvent& event) {
    if (event.kind == TraceKind::kCounter) {
      Json json = base(event, "C");
      json["args"] = {{"value", event.value}};
      events_.push_back(std::move(json));
      return;
    }
    int tid = lane_tid(event.lane);
    if (event.kind == TraceKind::kSpan) {
      tid += rows_[{event.rank, event.lane}].place(event);
    }
    rows_used_.insert({event.rank, tid});
    Json json = base(event, event.kind == TraceKind::kSpan ? "X" : "i");
    json["tid"] = tid;
    json["cat"] = to_text(event.lane);
    if (event.kind == TraceKind::kInstant) {
      json["s"] = "t";
      events_.push_back(std::move(json));
      return;
    }
    json["dur"] = micros(event.end_ns - event.begin_ns);
    if (event.bytes >= 0) {
      json["args"] = {{"bytes", event.bytes}};
    }
    events_.push_back(std::move(json));
    add_arrows(event, tid);
  }

  void add_arrows(const TraceEvent& event, int tid) {
    const auto add = [&](std::uint64_t flow, const char* phase, std::int64_t time_ns) {
      if (flow != 0) {
        events_.push_back({
            {"name", "flow"},
            {"cat", "flow"},
            {"ph", phase},
            {"id", flow},
            {"ts", micros(time_ns)},
            {"pid", event.rank},
            {"tid", tid},
            {"bp", "e"},
        });
      }
    };
    // An arrow's end must lie inside its span, whose own end is excluded.
    add(event.flow_from, "f", event.begin_ns);
    add(event.flow_to, "s", std::max(event.begin_ns, event.end_ns - 1));
  }

  void add_row_name(int rank, int tid) {
    const auto lane = static_cast<TraceLane>(tid / kRowsPerLane - 1);
    const int row = tid % kRowsPerLane;
    const std::string name =
        row == 0 ? std::string(to_text(lane)) : concat_text(to_text(lane), " ", row + 1);
    const auto add = [&](const char* kind, Json args, bool is_process) {
      Json json = {{"name", kind}, {"ph", "M"}, {"pid", rank}, {"args", std::move(args)}};
      if (!is_process) {
        json["tid"] = tid;
      }
      events_.push_back(std::move(json));
    };
    if (ranks_named_.insert(rank).second) {
      add("process_name", {{"name", concat_text("rank ", rank)}}, true);
      add("process_sort_index", {{"sort_index", rank}}, true);
    }
    add("thread_name", {{"name", name}}, false);
    add("thread_sort_index", {{"sort_index", tid}}, false);
  }

  const TraceRecord& record_;
  Json events_ = Json::array();
  std::map<std::pair<int, TraceLane>, Rows> rows_;
  std::set<std::pair<int, int>> rows_used_;
  std::set<int> ranks_named_;
};

Json to_json(const TraceRecord& record) {
  return {
      {"traceEvents", Writer(record).events()},
      {"displayTimeUnit", "ms"},
      {"otherData",
       {{"boot_id", boot_id()},
        {"host", host_name()},
        {"wall_minus_monotonic_ns", wall_minus_monotonic_ns()},
        {"dropped_events", record.num_dropped}}},
  };
}

std::string dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

/// Writes beside the file and renames, so that a reader never sees half of it.
void write_file(const std::string& path, const std::string& text) {
  const std::string beside = path + ".partial";
  std::ofstream stream(beside, std::ios::binary);
  stream << text;
  stream.close();
  if (!stream || std::rename(beside.c_str(), path.c_str()) != 0) {
    const std::string reason = errno_text(errno);
    std::remove(beside.c_str());
    HS_FAIL(IoError, "trace: cannot write '", path, "': ", reason);
  }
}

Json read_trace(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) {
    HS_FAIL(IoError, "trace: cannot read '", path, "': ", errno_text(errno));
  }
  Json trace = Json::parse(stream, nullptr, /*allow_exceptions=*/false);
  const bool is_trace =
      trace.is_object() && trace.contains("traceEvents") && trace["traceEvents"].is_array();
  if (!is_trace) {
    HS_FAIL(IoError, "trace: '", path, "' is not a trace: expected an object with traceEvents");
  }
  return trace;
}

/// How much later this trace's clock must be read to agree with the first's.
double shift_us(const Json& first, const Json& trace) {
  const Json none = Json::object();
  const Json& a = first.contains("otherData") ? first["otherData"] : none;
  const Json& b = trace.contains("otherData") ? trace["otherData"] : none;
  if (a.value("boot_id", "") == b.value("boot_id", "")) {
    return 0;  // one host, one clock
  }
  const char* const kOffset = "wall_minus_monotonic_ns";
  const std::int64_t offset_ns =
      b.value(kOffset, std::int64_t{0}) - a.value(kOffset, std::int64_t{0});
  return static_cast<double>(offset_ns) * 1e-3;
}

}  // namespace

std::string trace_json() {
  return dump(to_json(internal::copy_trace()));
}

void write_trace(const std::string& path) {
  const TraceRecord record = internal::copy_trace();
  if (record.num_dropped > 0) {
    HS_LOG_WARN(
        "trace: '", path, "' lacks the last ", record.num_dropped, " events: raise max_events"
    );
  }
  write_file(path, dump(to_json(record)));
}

void merge_traces(std::span<const std::string> paths, const std::string& merged_path) {
  HS_CHECK(!paths.empty(), "trace: nothing to merge into '", merged_path, "'");
  Json merged = read_trace(paths.front());
  for (const std::string& path : paths.subspan(1)) {
    Json trace = read_trace(path);
    const double shift = shift_us(merged, trace);
    for (Json& event : trace["traceEvents"]) {
      if (event.contains("ts") && event["ts"].is_number()) {
        event["ts"] = event["ts"].get<double>() + shift;
      }
      merged["traceEvents"].push_back(std::move(event));
    }
  }
  write_file(merged_path, dump(merged));
}

}  // namespace hypershard
