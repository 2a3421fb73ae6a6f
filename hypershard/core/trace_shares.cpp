// See trace_shares.h: a sweep over the begins and ends of spans.
#include "hypershard/core/trace_shares.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "hypershard/core/internal/trace_event.h"

namespace hypershard {
namespace {

using internal::TraceEvent;
using internal::TraceKind;

bool is_beside_the_thread(TraceLane lane) {
  return lane == TraceLane::kUnshard || lane == TraceLane::kReduce || lane == TraceLane::kBetween;
}

/// A begin or an end, in the order of time; at one time ends come first.
struct Edge {
  std::int64_t at_ns;
  bool is_begin;
  std::size_t span;  ///< index into the spans, which are sorted by begin
};

std::vector<Edge> edges_of(const std::vector<TraceEvent>& spans) {
  std::vector<Edge> edges;
  for (std::size_t i = 0; i < spans.size(); ++i) {
    edges.push_back({spans[i].begin_ns, true, i});
    edges.push_back({spans[i].end_ns, false, i});
  }
  std::stable_sort(edges.begin(), edges.end(), [](const Edge& a, const Edge& b) {
    return std::pair(a.at_ns, a.is_begin) < std::pair(b.at_ns, b.is_begin);
  });
  return edges;
}

std::vector<TraceEvent> spans_of(const std::vector<TraceEvent>& events, int rank) {
  std::vector<TraceEvent> spans;
  for (const TraceEvent& event : events) {
    // A span without length holds no moment, and its end would come before its begin.
    if (event.kind == TraceKind::kSpan && event.rank == rank && !is_beside_the_thread(event.lane) &&
        event.end_ns > event.begin_ns) {
      spans.push_back(event);
    }
  }
  // Of spans that begin together the longer one is the outer.
  std::stable_sort(spans.begin(), spans.end(), [](const TraceEvent& a, const TraceEvent& b) {
    return std::pair(a.begin_ns, -a.end_ns) < std::pair(b.begin_ns, -b.end_ns);
  });
  return spans;
}

}  // namespace

std::vector<TraceShare> trace_shares(int rank, std::string_view outer) {
  const internal::TraceRecord record = internal::copy_trace();
  const std::vector<TraceEvent> spans = spans_of(record.events, rank);
  std::map<std::pair<TraceLane, std::uint32_t>, TraceShare> shares;
  std::set<std::size_t> open;
  int num_outer = 0;
  std::int64_t last_ns = 0;
  for (const Edge& edge : edges_of(spans)) {
    const TraceEvent& span = spans[edge.span];
    if (num_outer > 0 && !open.empty()) {
      const TraceEvent& innermost = spans[*open.rbegin()];
      shares[{innermost.lane, innermost.name}].exclusive_ns += edge.at_ns - last_ns;
    }
    last_ns = edge.at_ns;
    const bool is_outer = record.names[span.name] == outer;
    num_outer += is_outer ? (edge.is_begin ? 1 : -1) : 0;
    if (edge.is_begin) {
      open.insert(edge.span);
      shares[{span.lane, span.name}].count += num_outer > 0 ? 1 : 0;
    } else {
      open.erase(edge.span);
    }
  }
  std::vector<TraceShare> result;
  for (auto& [key, share] : shares) {
    if (share.count > 0 || share.exclusive_ns > 0) {
      share.lane = key.first;
      share.name = record.names[key.second];
      result.push_back(std::move(share));
    }
  }
  std::stable_sort(result.begin(), result.end(), [](const TraceShare& a, const TraceShare& b) {
    return a.exclusive_ns > b.exclusive_ns;
  });
  return result;
}

}  // namespace hypershard
