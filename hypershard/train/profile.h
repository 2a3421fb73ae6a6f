// Why: where a step's time and memory went, as a person reads it: by part, by module, with sums
// that agree with the clock and with what the kernel counts.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "hypershard/core/trace_shares.h"
#include "hypershard/train/run_plan.h"

namespace hypershard::train {

/// Name of the span around a step, which the shares divide.
inline constexpr std::string_view kStepSpan = "training step";

/// Time of one part of a step, or of one kind of module. Units: milliseconds a step.
struct PartTime {
  std::string name;
  double ms = 0;
};

/// Time of modules that differ in an index only (`blocks.*.attn`), without that of modules inside.
struct ModuleTime {
  std::string path;
  std::int64_t num_modules = 0;
  double forward_ms = 0;
  double backward_ms = 0;
  double wait_ms = 0;  ///< for its parameters and for its gradients' reduction
};

/// Memory of one rank by what it is for. Units: bytes.
struct MemoryUse {
  std::int64_t process = 0;  ///< resident before the model was made: program and libraries
  std::int64_t peak = 0;     ///< resident at its highest
  std::int64_t job = 0;      ///< of all ranks, shared pages counted once; 0: unknown
  MemoryPlan plan;
};

/// What a profile of some steps found on one rank.
struct Profile {
  std::int64_t num_steps = 0;
  double step_ms = 0;
  std::vector<PartTime> parts;      ///< add up to step_ms
  std::vector<ModuleTime> modules;  ///< largest first
  MemoryUse memory;
};

/// Builds a profile from the shares of the spans kStepSpan.
Profile make_profile(const std::vector<TraceShare>& shares, const MemoryUse& memory);

/// Writes it as a report for a terminal.
std::string describe(const Profile& profile);

}  // namespace hypershard::train
