// See profile.h.
#include "hypershard/train/profile.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <map>
#include <set>
#include <utility>

#include "hypershard/core/text.h"
#include "hypershard/train/progress.h"

namespace hypershard::train {
namespace {

constexpr double kMs = 1e-6;
constexpr std::size_t kMaxModules = 20;

/// A row of the report and the spans that belong to it: a lane and a start of their names.
struct Part {
  const char* name;
  TraceLane lane;
  const char* starts_with;
};

// In the order of a step; the first that fits counts.
constexpr Part kParts[] = {
    {"batch", TraceLane::kData, ""},
    {"wait for the write window", TraceLane::kWait, "write window"},
    {"publish", TraceLane::kPublish, ""},
    {"wait for published parameters", TraceLane::kWait, "publish"},
    {"wait for parameters", TraceLane::kWait, "unshard"},
    {"forward", TraceLane::kCompute, "forward"},
    {"backward", TraceLane::kCompute, "backward"},
    {"reduce gradients, and wait for peers", TraceLane::kWait, "reduce"},
    {"exchange the loss, and wait for peers", TraceLane::kWait, ""},
    {"clip", TraceLane::kOptimizer, "clip"},
    {"optimizer", TraceLane::kOptimizer, ""},
};

std::string part_of(const TraceShare& share) {
  for (const Part& part : kParts) {
    if (share.lane == part.lane && share.name.starts_with(part.starts_with)) {
      return part.name;
    }
  }
  return "rest";
}

std::vector<PartTime> part_times(const std::vector<TraceShare>& shares, double num_steps) {
  std::map<std::string, double> ms;
  for (const TraceShare& share : shares) {
    ms[part_of(share)] += static_cast<double>(share.exclusive_ns) * kMs / num_steps;
  }
  std::vector<PartTime> parts;
  for (const Part& part : kParts) {
    if (ms.contains(part.name)) {
      parts.push_back({part.name, ms[part.name]});
    }
  }
  parts.push_back({"rest", ms["rest"]});
  return parts;
}

// `blocks.3.attn` becomes `blocks.*.attn`.
std::string without_index(const std::string& path) {
  std::string kind;
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find('.', begin), path.size());
    const std::string piece = path.substr(begin, end - begin);
    const bool is_index = !piece.empty() && std::all_of(piece.begin(), piece.end(), [](char c) {
      return std::isdigit(static_cast<unsigned char>(c)) != 0;
    });
    kind += (begin == 0 ? "" : ".") + (is_index ? std::string("*") : piece);
    begin = end + 1;
  }
  return kind;
}

double* column_of(ModuleTime& module, TraceLane lane, std::string_view what) {
  if (lane == TraceLane::kWait && (what == "unshard" || what == "publish" || what == "reduce")) {
    return &module.wait_ms;
  }
  if (lane == TraceLane::kCompute) {
    return what == "forward" ? &module.forward_ms : &module.backward_ms;
  }
  return nullptr;
}

double total_ms(const ModuleTime& module) {
  return module.forward_ms + module.backward_ms + module.wait_ms;
}

std::vector<ModuleTime> module_times(const std::vector<TraceShare>& shares, double num_steps) {
  std::map<std::string, ModuleTime> by_kind;
  std::map<std::string, std::set<std::string>> members;
  for (const TraceShare& share : shares) {
    const std::size_t space = share.name.find(' ');
    ModuleTime other;
    if (space == std::string::npos ||
        column_of(other, share.lane, share.name.substr(0, space)) == nullptr) {
      continue;  // around all modules, or none's
    }
    const std::string path = share.name.substr(space + 1);
    const std::string kind = without_index(path);
    double* column = column_of(by_kind[kind], share.lane, share.name.substr(0, space));
    *column += static_cast<double>(share.exclusive_ns) * kMs / num_steps;
    members[kind].insert(path);
  }
  std::vector<ModuleTime> modules;
  for (auto& [kind, module] : by_kind) {
    module.path = kind;
    module.num_modules = static_cast<std::int64_t>(members[kind].size());
    modules.push_back(module);
  }
  std::stable_sort(modules.begin(), modules.end(), [](const ModuleTime& a, const ModuleTime& b) {
    return total_ms(a) > total_ms(b);
  });
  return modules;
}

template <class... Values>
std::string formatted(const char* format, Values... values) {
  std::array<char, 256> text{};
  std::snprintf(text.data(), text.size(), format, values...);
  return text.data();
}

std::string describe_parts(const Profile& profile) {
  std::string text = formatted("  %-40s %10s %7s\n", "part", "ms a step", "share");
  double sum = 0;
  for (const PartTime& part : profile.parts) {
    text += formatted(
        "  %-40s %10.3f %6.1f%%\n", part.name.c_str(), part.ms, 100 * part.ms / profile.step_ms
    );
    sum += part.ms;
  }
  return text + formatted("  %-40s %10.3f %6.1f%%\n", "sum", sum, 100 * sum / profile.step_ms);
}

std::string describe_modules(const Profile& profile) {
  std::string text = formatted(
      "  %-28s %6s %10s %10s %8s %7s\n",
      "module, without those inside",
      "number",
      "forward",
      "backward",
      "wait",
      "share"
  );
  const std::size_t shown = std::min(profile.modules.size(), kMaxModules);
  for (std::size_t i = 0; i < shown; ++i) {
    const ModuleTime& module = profile.modules[i];
    text += formatted(
        "  %-28s %6lld %10.3f %10.3f %8.3f %6.1f%%\n",
        module.path.c_str(),
        static_cast<long long>(module.num_modules),
        module.forward_ms,
        module.backward_ms,
        module.wait_ms,
        100 * total_ms(module) / profile.step_ms
    );
  }
  if (shown < profile.modules.size()) {
    text += concat_text("  and ", profile.modules.size() - shown, " more in the trace\n");
  }
  return text;
}

std::string describe_memory(const MemoryUse& memory) {
  const MemoryPlan& plan = memory.plan;
  const std::int64_t known =
      memory.process + plan.own() + plan.shared_runtime + plan.shared_unsharded;
  const std::pair<const char*, std::int64_t> rows[] = {
      {"program and libraries", memory.process},
      {"parameters, one copy for all ranks of a supernode", plan.shared_runtime},
      {"parameters, this rank's own", plan.runtime},
      {"parameters of unsharded units", plan.unsharded + plan.shared_unsharded},
      {"update parameters apart from those", plan.update},
      {"gradient buffers", plan.gradient_buffers},
      {"reduced gradients", plan.gradients},
      {"optimizer state", plan.optimizer},
      {"activations, workspace and the rest", memory.peak - known},
      {"sum: resident at its highest", memory.peak},
  };
  std::string text = formatted("  %-50s %10s\n", "memory", "");
  for (const auto& [name, bytes] : rows) {
    if (bytes != 0) {
      text += formatted("  %-50s %10s\n", name, short_bytes(bytes).c_str());
    }
  }
  if (memory.job > 0) {
    text += formatted(
        "  %-50s %10s\n",
        "all ranks now, shared pages counted once",
        short_bytes(memory.job).c_str()
    );
  }
  return text;
}

}  // namespace

Profile make_profile(const std::vector<TraceShare>& shares, const MemoryUse& memory) {
  Profile profile;
  profile.memory = memory;
  std::int64_t total_ns = 0;
  for (const TraceShare& share : shares) {
    total_ns += share.exclusive_ns;
    profile.num_steps += share.name == kStepSpan ? share.count : 0;
  }
  if (profile.num_steps == 0) {
    return profile;
  }
  const auto num_steps = static_cast<double>(profile.num_steps);
  profile.step_ms = static_cast<double>(total_ns) * kMs / num_steps;
  profile.parts = part_times(shares, num_steps);
  profile.modules = module_times(shares, num_steps);
  return profile;
}

std::string describe(const Profile& profile) {
  if (profile.num_steps == 0) {
    return "profile: no step was traced; the run ended before log.trace_first_step\n";
  }
  return formatted(
             "profile of rank 0: %lld steps of %.3f ms\n",
             static_cast<long long>(profile.num_steps),
             profile.step_ms
         ) +
         describe_parts(profile) + describe_modules(profile) + describe_memory(profile.memory);
}

}  // namespace hypershard::train
