// Why: the report of a plan: what `hypershard explain` prints.
#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "hypershard/core/text.h"
#include "hypershard/train/progress.h"
#include "hypershard/train/run_plan.h"

namespace hypershard::train {
namespace {

// Lines up columns; the first row is the head.
class Table {
 public:
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }

  std::string text() const {
    std::vector<std::size_t> widths;
    for (const auto& row : rows_) {
      widths.resize(std::max(widths.size(), row.size()), 0);
      for (std::size_t i = 0; i < row.size(); ++i) {
        widths[i] = std::max(widths[i], row[i].size());
      }
    }
    std::string text;
    for (const auto& row : rows_) {
      std::string line = " ";
      for (std::size_t i = 0; i < row.size(); ++i) {
        line += " " + row[i];
        if (i + 1 < row.size()) {
          line += std::string(widths[i] - row[i].size() + 1, ' ');
        }
      }
      line.erase(line.find_last_not_of(' ') + 1);
      text += line + "\n";
    }
    return text;
  }

 private:
  std::vector<std::vector<std::string>> rows_;
};

std::string percent(double share) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f%%", 100 * share);
  return text;
}

std::string two_decimals(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f", value);
  return text;
}

// Writes `13.3 MFLOP`.
std::string flop_text(double flop) {
  std::string text = short_count(flop);
  const bool has_unit = !text.empty() && text.back() >= 'A';
  text.insert(text.size() - (has_unit ? 1 : 0), " ");
  return text + "FLOP";
}

bool same_but_for_name(const GroupPlan& a, const GroupPlan& b) {
  return std::tie(
             a.num_params, a.numel, a.padding, a.storage, a.compute, a.reduce, a.update, a.runtime
         ) ==
             std::tie(
                 b.num_params,
                 b.numel,
                 b.padding,
                 b.storage,
                 b.compute,
                 b.reduce,
                 b.update,
                 b.runtime
             ) &&
         a.memory == b.memory;
}

bool same_but_for_name(const UnitPlan& a, const UnitPlan& b) {
  return a.reshards == b.reshards &&
         std::equal(
             a.groups.begin(),
             a.groups.end(),
             b.groups.begin(),
             b.groups.end(),
             [](const GroupPlan& x, const GroupPlan& y) { return same_but_for_name(x, y); }
         );
}

/// Consecutive units that differ in their names only.
struct AlikeUnits {
  const UnitPlan* first = nullptr;
  std::string name;
};

std::vector<AlikeUnits> alike_units(const RunPlan& plan) {
  std::vector<AlikeUnits> all;
  for (std::size_t i = 0; i < plan.units.size();) {
    std::size_t end = i + 1;
    while (end < plan.units.size() && same_but_for_name(plan.units[i], plan.units[end])) {
      ++end;
    }
    std::string name = plan.units[i].path;
    if (end - i > 1) {
      name += concat_text(" ... ", plan.units[end - 1].path, " (", end - i, " alike)");
    }
    all.push_back({.first = &plan.units[i], .name = std::move(name)});
    i = end;
  }
  return all;
}

std::string units_text(const RunPlan& plan) {
  Table table;
  table.add(
      {"unit",
       "params",
       "elements",
       "padding",
       "max/mean",
       "stored",
       "computed",
       "reduced",
       "updated",
       "runtime"}
  );
  for (auto& [unit, name] : alike_units(plan)) {
    for (const GroupPlan& group : unit->groups) {
      table.add(
          {std::exchange(name, ""),  // further groups of the same unit have none
           std::to_string(group.num_params),
           short_count(static_cast<double>(group.numel)),
           percent(
               group.numel == 0
                   ? 0
                   : static_cast<double>(group.padding) / static_cast<double>(group.numel)
           ),
           two_decimals(group.imbalance),
           group.storage,
           group.compute,
           group.reduce,
           group.update,
           group.runtime}
      );
    }
  }
  return table.text();
}

std::string unit_memory_text(const RunPlan& plan) {
  Table table;
  table.add({"unit", "runtime", "update", "optimizer", "gradients"});
  for (auto& [unit, name] : alike_units(plan)) {
    for (const GroupPlan& group : unit->groups) {
      const GroupMemory& memory = group.memory;
      table.add(
          {std::exchange(name, ""),
           memory.shared_runtime > 0 ? short_bytes(memory.shared_runtime) + " shared"
                                     : short_bytes(memory.runtime),
           short_bytes(memory.update),
           short_bytes(memory.optimizer),
           short_bytes(memory.gradients)}
      );
    }
  }
  return table.text();
}

std::string collectives_text(const std::vector<PlannedCollective>& collectives) {
  if (collectives.empty()) {
    return "  none: the layouts need no communication\n";
  }
  struct Sum {
    std::int64_t count = 0;
    std::int64_t payload = 0;
    std::int64_t sent = 0;
  };
  std::map<std::tuple<Phase, std::string, comm::Op, layout::Tier>, Sum> sums;
  for (const PlannedCollective& each : collectives) {
    Sum& sum = sums[{each.phase, each.axis, each.op, each.tier}];
    ++sum.count;
    sum.payload += each.payload_bytes;
    sum.sent += each.sent_bytes;
  }
  Table table;
  table.add({"when", "what", "communicator", "link", "calls", "payload", "sent a rank"});
  for (const auto& [key, sum] : sums) {
    table.add(
        {to_text(std::get<0>(key)),
         to_text(std::get<2>(key)),
         std::get<1>(key),
         std::get<3>(key) == layout::Tier::kIntra ? "inside a supernode" : "between supernodes",
         std::to_string(sum.count),
         short_bytes(sum.payload),
         short_bytes(sum.sent)}
    );
  }
  return table.text();
}

/// What one unit, or one bucket of them, communicates in a step.
struct Traffic {
  std::string name;
  std::int64_t calls[2] = {};  // by tier
  std::int64_t sent[2] = {};

  bool is_alike(const Traffic& other) const {
    return std::equal(calls, calls + 2, other.calls) && std::equal(sent, sent + 2, other.sent);
  }
};

std::vector<Traffic> traffic_by_unit(const std::vector<PlannedCollective>& collectives) {
  std::vector<Traffic> all;
  for (const PlannedCollective& each : collectives) {
    auto at =
        std::find_if(all.begin(), all.end(), [&](const Traffic& t) { return t.name == each.unit; });
    if (at == all.end()) {
      at = all.insert(all.end(), {.name = each.unit});
    }
    const auto tier = static_cast<std::size_t>(each.tier == layout::Tier::kInter);
    ++at->calls[tier];
    at->sent[tier] += each.sent_bytes;
  }
  return all;
}

std::string traffic_text(const RunPlan& plan) {
  const std::vector<Traffic> all = traffic_by_unit(plan.collectives);
  if (all.empty()) {
    return "";
  }
  const layout::Topology& topology = plan.mesh.topology();
  const int local = topology.world_size() / std::max(1, topology.num_supernodes());
  Table table;
  table.add({"unit or bucket", "calls inside", "sent inside", "calls between", "sent between"});
  const auto add = [&table](const std::string& name, const Traffic& each) {
    table.add(
        {name,
         std::to_string(each.calls[0]),
         short_bytes(each.sent[0]),
         std::to_string(each.calls[1]),
         short_bytes(each.sent[1])}
    );
  };
  Traffic sum{.name = "all, a rank"};
  // Other ranks may send a little more or less where cuts are uneven.
  Traffic supernode{.name = concat_text("a supernode, if its ", local, " ranks are as this one")};
  for (std::size_t i = 0; i < all.size();) {
    std::size_t end = i;
    for (; end < all.size() && all[end].is_alike(all[i]); ++end) {
      for (const std::size_t tier : {std::size_t{0}, std::size_t{1}}) {
        sum.calls[tier] += all[end].calls[tier];
        sum.sent[tier] += all[end].sent[tier];
        supernode.calls[tier] = sum.calls[tier] * local;
        supernode.sent[tier] = sum.sent[tier] * local;
      }
    }
    add(end - i == 1
            ? all[i].name
            : concat_text(all[i].name, " ... ", all[end - 1].name, " (each of ", end - i, ")"),
        all[i]);
    i = end;
  }
  add(sum.name, sum);
  if (topology.num_supernodes() > 1) {
    add(supernode.name, supernode);
  }
  std::string text =
      "\nthe same by unit (inside a supernode, and between supernodes):\n" + table.text();
  if (plan.measures_buckets) {
    text +=
        "  buckets: one unit a bucket here; a run measures the link and may join units "
        "(parallel.bucket_bytes = -1)\n";
  }
  return text;
}

std::string memory_text(const MemoryPlan& memory) {
  Table table;
  const auto row = [&](const char* what, std::int64_t bytes, const char* note) {
    if (bytes > 0) {
      table.add({what, short_bytes(bytes), note});
    }
  };
  row("runtime parameters", memory.runtime, "this rank's part");
  row("unsharded parameters", memory.unsharded, "at most, in reused buffers");
  row("update parameters",
      memory.update,
      "apart from the runtime ones, whose dtype or layout differs");
  row("optimizer state", memory.optimizer, "");
  row("gradients", memory.gradients, "reduced, as the optimizer reads them");
  row("gradient buffers", memory.gradient_buffers, "of the units whose reduction is under way");
  table.add({"sum", short_bytes(memory.own()), "and activations, which depend on the batch"});
  row("shared parameters",
      memory.shared_runtime,
      "once for all ranks of a supernode, not in the sum");
  row("shared unsharded parameters",
      memory.shared_unsharded,
      "at most, in reused buffers, once for all ranks of a supernode, not in the sum");
  return table.text();
}

}  // namespace

std::string describe(const RunPlan& plan) {
  std::string text = concat_text(
      "model: ",
      short_count(static_cast<double>(plan.parameters)),
      " parameters, ",
      flop_text(plan.flops_per_token),
      " a token, ",
      flop_text(plan.flops_per_token * static_cast<double>(plan.tokens_per_step)),
      " a step of ",
      plan.tokens_per_step,
      " tokens\n"
  );
  const layout::Topology& topology = plan.mesh.topology();
  text += concat_text(
      "mesh: ",
      plan.mesh,
      "; ",
      topology.world_size(),
      topology.world_size() == 1 ? " rank in " : " ranks in ",
      topology.num_supernodes(),
      topology.num_supernodes() == 1 ? " supernode\n" : " supernodes\n"
  );
  text += concat_text("strategy: ", plan.strategy, "\n");
  Table layouts;
  layouts.add({"runtime", to_text(plan.layouts.runtime, plan.mesh)});
  layouts.add({"gradient", to_text(plan.layouts.gradient, plan.mesh)});
  layouts.add({"update", to_text(plan.layouts.update, plan.mesh)});
  text += layouts.text();
  text += concat_text("\nunits (", plan.units.size(), "):\n", units_text(plan));
  if (!plan.why_not_shared.empty() && topology.world_size() > 1) {
    text += "  not all parameters are shared between ranks: " + plan.why_not_shared + "\n";
  }
  text += concat_text(
      "\ncollectives of a step, as rank ",
      plan.rank,
      " sees them (beside a few numbers for loss and norm):\n",
      collectives_text(plan.collectives),
      traffic_text(plan)
  );
  if (plan.resolved.has_value()) {
    text += concat_text(
        "\ncollectives of the plan's boundaries, and of a loss over a cut vocabulary, in a step:\n",
        collectives_text(plan.crossings),
        "\nplan, for one micro-batch, with rank ",
        plan.rank,
        "'s bytes: ",
        plan::to_text(*plan.resolved, plan.mesh)
    );
  }
  text += concat_text("\nmemory of rank ", plan.rank, ":\n", memory_text(plan.memory));
  text += concat_text(
      "\nthe same by unit, of what a rank keeps (update parameters where they are apart):\n",
      unit_memory_text(plan)
  );
  return text;
}

}  // namespace hypershard::train
