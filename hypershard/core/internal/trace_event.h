// Why: the record that the trace recorder keeps and the JSON writer reads.
// Plain data with interned names, so that recording allocates nothing but the buffer's growth.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hypershard/core/trace.h"

namespace hypershard::internal {

enum class TraceKind : std::uint8_t { kSpan, kInstant, kCounter };

struct TraceEvent {
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  std::int64_t bytes = -1;
  std::uint64_t flow_to = 0;
  std::uint64_t flow_from = 0;
  double value = 0;
  std::uint32_t name = 0;
  std::int32_t rank = 0;
  TraceLane lane = TraceLane::kOther;
  TraceKind kind = TraceKind::kSpan;
};

struct TraceRecord {
  std::vector<TraceEvent> events;
  std::vector<std::string> names;  // by TraceEvent::name
  std::uint64_t num_dropped = 0;
};

/// Copies everything recorded so far.
TraceRecord copy_trace();

}  // namespace hypershard::internal
