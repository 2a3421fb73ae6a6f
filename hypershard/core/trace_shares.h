// Why: a trace is for looking; a report needs sums that add up. Every moment of a rank is given to
// one span, so that the shares of a stretch of time are exactly that stretch.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "hypershard/core/trace.h"

namespace hypershard {

/// What one name had of the time.
struct TraceShare {
  TraceLane lane = TraceLane::kOther;
  std::string name;
  std::int64_t exclusive_ns = 0;  ///< moments in which it was the innermost span
  std::int64_t count = 0;         ///< spans of this name
};

/// Divides the time inside the spans named `outer` on `rank` among the spans recorded there.
///
/// Each moment goes to the span that began last of those that are open (of equal begins the shorter
/// one), which for nested spans is the innermost; `outer` itself gets what is left. Spans of
/// the lanes unshard and reduce are left out: they show what is in flight beside the thread. Counts
/// instants and counters never. The exclusive times add up to the time inside `outer`, to the
/// nanosecond. Returns the largest first; {} if there is no span `outer`. Threads: any.
std::vector<TraceShare> trace_shares(int rank, std::string_view outer);

}  // namespace hypershard
