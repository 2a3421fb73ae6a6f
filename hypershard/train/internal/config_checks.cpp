// Why: each check names both values and says which ones would do.
#include "hypershard/train/internal/config_checks.h"

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "hypershard/core/error.h"
#include "hypershard/core/glob.h"
#include "hypershard/core/suggest.h"
#include "hypershard/layout/sharding.h"
#include "hypershard/layout/strategy.h"

namespace hypershard::train {
namespace internal {
namespace {

// Lists the multiples of `step` next to `value`: `12 or 18`.
std::string multiples_near(std::int64_t value, std::int64_t step) {
  const std::int64_t below = value / step * step;
  const std::string above = std::to_string(below + step);
  return below > 0 ? std::to_string(below) + " or " + above : above;
}

void check_batch(const RunConfig& config, int world_size, ConfigProblems& problems) {
  const BatchSection& batch = config.batch;
  const int num_data_ranks = config.num_data_ranks(world_size);
  const std::int64_t parts = batch.accumulation * num_data_ranks;
  if (batch.global_batch % parts == 0) {
    return;
  }
  const std::string split = concat_text(
      num_data_ranks,
      config.parallel.tp > 1 ? " data" : "",
      num_data_ranks == 1 ? " rank" : " ranks",
      " and ",
      batch.accumulation,
      batch.accumulation == 1 ? " micro-batch" : " micro-batches"
  );
  if (batch.global_batch < parts) {
    problems.add(
        "batch.global_batch",
        concat_text(
            "there are fewer rows than parts: ",
            batch.global_batch,
            " rows for ",
            split,
            " (expected at least ",
            parts,
            "); raise it, or take fewer ranks or less accumulation"
        )
    );
    return;
  }
  problems.add(
      "batch.global_batch",
      concat_text(
          batch.global_batch,
          " rows cannot be dealt evenly to ",
          split,
          " (expected a multiple of ",
          parts,
          ", such as ",
          multiples_near(batch.global_batch, parts),
          ")"
      )
  );
}

}  // namespace

void check_model(const RunConfig& config, ConfigProblems& problems) {
  const ModelSection& model = config.model;
  if (model.dim % model.heads != 0) {
    problems.add(
        "model.heads",
        concat_text(
            model.heads,
            " heads do not divide model.dim = ",
            model.dim,
            " (expected a divisor; ",
            "dim could be ",
            multiples_near(model.dim, model.heads),
            ")"
        )
    );
  } else if (model.dim / model.heads % 2 != 0) {
    problems.add(
        "model.heads",
        concat_text(
            model.heads,
            " heads make each ",
            model.dim / model.heads,
            " wide, but rotary positions "
            "turn pairs (expected an even model.dim / model.heads)"
        )
    );
  }
  if (model.kv_heads > 0 && model.heads % model.kv_heads != 0) {
    problems.add(
        "model.kv_heads",
        concat_text(
            model.kv_heads,
            " heads of keys and values do not divide model.heads = ",
            model.heads,
            " (expected a divisor)"
        )
    );
  }
}

void check_text(const RunConfig& config, ConfigProblems& problems) {
  // What a shell leaves of an unset variable: --set data.path=$DATA.
  if (config.data.path.empty()) {
    problems.add("data.path", "is empty (expected the folder that `hypershard data text` wrote)");
  }
  for (const std::string& pattern : config.parallel.units) {
    try {
      const Glob glob(pattern);
    } catch (const InvalidArgument& error) {
      problems.add("parallel.units", error.what_brief());
    }
  }
}

void check_precision(const RunConfig& config, ConfigProblems& problems) {
  const auto refuse_half = [&](const char* key, const std::string& dtype) {
    if (dtype == "fp16") {
      problems.add(
          key,
          "in fp16 small gradients become 0, since there is no loss scaling (expected \"bf16\", "
          "which has the range of fp32, or \"fp32\")"
      );
    }
  };
  refuse_half("precision.compute", config.precision.compute);
  refuse_half("precision.reduce", config.precision.reduce);
}

void check_schedule(const RunConfig& config, ConfigProblems& problems) {
  const ScheduleSection& schedule = config.schedule;
  if (schedule.warmup_steps > schedule.steps) {
    problems.add(
        "schedule.warmup_steps",
        concat_text(
            schedule.warmup_steps,
            " steps of warm-up do not fit into schedule.steps = ",
            schedule.steps,
            " (expected at most as many)"
        )
    );
  }
  for (const double beta : config.optimizer.betas) {
    if (beta >= 1) {
      problems.add(
          "optimizer.betas",
          concat_text("a beta of ", beta, " never forgets (expected less than 1)")
      );
    }
  }
  if (config.optimizer.kind == OptimizerKind::kSgd && config.optimizer.nesterov &&
      config.optimizer.momentum == 0) {
    problems.add("optimizer.nesterov", "needs optimizer.momentum above 0 (got 0)");
  }
  if (config.optimizer.step_in_backward && config.optimizer.clip_norm != 0) {
    problems.add(
        "optimizer.step_in_backward",
        concat_text(
            "backward uses gradients up before their joint norm is known (expected "
            "optimizer.clip_norm = 0, got ",
            config.optimizer.clip_norm,
            ")"
        )
    );
  }
}

namespace {

void check_heads(
    const char* key, const char* what, std::int64_t heads, int tp, ConfigProblems& problems
) {
  if (heads % tp != 0) {
    problems.add(
        key,
        concat_text(
            heads,
            what,
            " cannot be divided among parallel.tp = ",
            tp,
            " ranks, and a head is never cut (expected a multiple of ",
            tp,
            ", such as ",
            multiples_near(heads, tp),
            ")"
        )
    );
  }
}

void check_plan_words(const ParallelSection& parallel, ConfigProblems& problems) {
  static const std::vector<std::string> kPlans = {"tensor", "sequence", "vocabulary"};
  for (const std::string& word : parallel.plan) {
    if (std::find(kPlans.begin(), kPlans.end(), word) == kPlans.end()) {
      const std::string meant = suggestion(word, kPlans);
      problems.add(
          "parallel.plan",
          concat_text(
              "there is no ready-made plan '",
              word,
              "' (expected tensor, sequence or vocabulary)",
              meant.empty() ? "" : "; ",
              meant
          )
      );
    }
  }
  if (parallel.has_plan("sequence") && !parallel.has_plan("tensor")) {
    problems.add(
        "parallel.plan",
        "\"sequence\" cuts what lies between the parts that \"tensor\" cuts (expected both)"
    );
  }
}

// Tells whether all are data axes.
bool check_axes(const char* key, const std::vector<std::string>& axes, ConfigProblems& problems) {
  bool are_good = true;
  for (const std::string& axis : axes) {
    if (axis != "replicate" && axis != "shard") {
      are_good = false;
      problems.add(
          key,
          axis == "strategy"
              ? "it is not given, but another plane's axes are (expected all three of "
                "split_runtime, split_gradient and split_update, or none)"
              : concat_text(
                    "there is no data axis '", axis, "' (expected \"replicate\", \"shard\" or both)"
                )
      );
    }
  }
  return are_good;
}

// What no layout says by itself: gradients lie inside what a rank has of the parameters.
void check_gradient_in_runtime(const StatedLayouts& stated, ConfigProblems& problems) {
  for (const std::string& axis : stated.runtime) {
    if (std::find(stated.gradient.begin(), stated.gradient.end(), axis) == stated.gradient.end()) {
      problems.add(
          "parallel.split_gradient",
          concat_text(
              "gradients are not split along '",
              axis,
              "', but the runtime parameters are (expected \"",
              axis,
              "\" here too, or not in split_runtime)"
          )
      );
    }
  }
}

// A rank's part of each plane must lie inside its part of the plane before: runtime, gradient,
// update. Sizes of the axes do not matter to that.
void check_nested(const StatedLayouts& stated, ConfigProblems& problems) {
  const layout::DeviceMesh mesh(
      {{"replicate", 1}, {"shard", 1}}, layout::Topology::single_supernode(1)
  );
  const layout::DataAxes data_axes{.replicate = "replicate", .shard = "shard"};
  const auto layout_of = [&mesh](const std::vector<std::string>& axes) {
    layout::Layout layout = layout::replicated_layout(mesh);
    for (const std::string& axis : axes) {
      layout.placements[static_cast<std::size_t>(mesh.axis_index(axis))] =
          layout::Placement::flat();
    }
    return layout;
  };
  const auto check = [&](const char* key, const layout::PlaneLayouts& planes) {
    try {
      layout::check_plane_layouts(planes, mesh, data_axes);
    } catch (const InvalidArgument& error) {
      problems.add(key, error.what_brief());
    }
  };
  const layout::Layout whole = layout::replicated_layout(mesh);
  const layout::Layout update = layout_of(stated.update);
  check(
      "parallel.split_runtime",
      {.runtime = layout_of(stated.runtime), .gradient = whole, .update = update}
  );
  check(
      "parallel.split_gradient",
      {.runtime = whole, .gradient = layout_of(stated.gradient), .update = update}
  );
  check_gradient_in_runtime(stated, problems);
}

}  // namespace

void check_layouts(const StatedLayouts& layouts, ConfigProblems& problems) {
  if (!layouts.are_given()) {
    return;
  }
  bool are_good = check_axes("parallel.split_runtime", layouts.runtime, problems);
  are_good = check_axes("parallel.split_gradient", layouts.gradient, problems) && are_good;
  are_good = check_axes("parallel.split_update", layouts.update, problems) && are_good;
  if (are_good) {
    check_nested(layouts, problems);
  }
}

void check_plan(const RunConfig& config, ConfigProblems& problems) {
  const ParallelSection& parallel = config.parallel;
  check_plan_words(parallel, problems);
  if (parallel.tp > 1 && parallel.has_plan("tensor")) {
    const ModelSection& model = config.model;
    check_heads("model.heads", " heads", model.heads, parallel.tp, problems);
    if (model.kv_heads > 0) {
      check_heads(
          "model.kv_heads", " heads of keys and values", model.kv_heads, parallel.tp, problems
      );
    }
  }
  const plan::PlanConfig& own = config.plan;
  if (parallel.tp > 1 && parallel.plan.empty() && own.parameters.empty() && own.inputs.empty() &&
      own.outputs.empty()) {
    problems.add(
        "parallel.plan",
        concat_text(
            "no plan says what the ",
            parallel.tp,
            " ranks of axis 'tp' divide among them: all would do the same work (expected "
            "\"tensor\", "
            "\"sequence\", \"vocabulary\", or rules in section plan)"
        )
    );
  }
}

MeshSizes fit_mesh(const ParallelSection& parallel, int world_size) {
  MeshSizes sizes{.replicate = parallel.replicate, .shard = parallel.shard};
  const int tp = parallel.tp;
  const auto wrong = [&](const char* key, const std::string& text) {
    sizes.key = key;
    sizes.problem = text;
    return sizes;
  };
  if (sizes.replicate == 0 || sizes.shard == 0) {
    return wrong(
        sizes.shard == 0 ? "parallel.shard" : "parallel.replicate",
        "an axis of size 0 holds no rank (expected a positive size, or -1 for what is left)"
    );
  }
  if (sizes.replicate < 0 && sizes.shard < 0) {
    return wrong(
        "parallel.replicate", "both axes of the mesh are -1 (expected at most one of them to be)"
    );
  }
  if (world_size % tp != 0) {
    return wrong(
        "parallel.tp",
        concat_text(
            "groups of ",
            tp,
            " ranks do not divide ",
            world_size,
            world_size == 1 ? " rank" : " ranks",
            " (expected a divisor of ",
            world_size,
            ")"
        )
    );
  }
  int& open = sizes.replicate < 0 ? sizes.replicate : sizes.shard;
  const int fixed = sizes.replicate < 0 ? sizes.shard : sizes.replicate;
  if (open < 0) {
    open = world_size / tp / fixed;
  }
  if (std::int64_t{sizes.replicate} * sizes.shard * tp != world_size) {
    return wrong(
        parallel.shard < 0 ? "parallel.replicate" : "parallel.shard",
        concat_text(
            "a mesh of replicate = ",
            parallel.replicate,
            " by shard = ",
            parallel.shard,
            tp > 1 ? concat_text(" by tp = ", tp) : std::string(),
            " does not hold ",
            world_size,
            world_size == 1 ? " rank" : " ranks",
            " (expected a product of ",
            world_size,
            ")"
        )
    );
  }
  return sizes;
}

void check_world(const RunConfig& config, int world_size, ConfigProblems& problems) {
  if (world_size <= 0) {
    return;
  }
  const MeshSizes sizes = fit_mesh(config.parallel, world_size);
  if (!sizes.problem.empty()) {
    problems.add(sizes.key, sizes.problem);
    return;
  }
  const int supernodes = config.parallel.supernodes;
  if (supernodes > 0 && world_size % supernodes != 0) {
    problems.add(
        "parallel.supernodes",
        concat_text(
            world_size,
            world_size == 1 ? " rank cannot" : " ranks cannot",
            " form ",
            supernodes,
            " supernodes of equal size (expected a divisor of ",
            world_size,
            ")"
        )
    );
  }
  if (config.batch.sync == Sync::kInner && sizes.replicate == 1) {
    problems.add(
        "batch.sync",
        "inner reduces inside `shard` first and over `replicate` last, but parallel.replicate is 1 "
        "(expected sync = \"every\" or \"last\", or a larger replicate)"
    );
  }
  check_batch(config, world_size, problems);
}

}  // namespace internal

bool ParallelSection::has_plan(std::string_view word) const {
  return std::find(plan.begin(), plan.end(), word) != plan.end();
}

bool StatedLayouts::are_given() const {
  const std::vector<std::string> by_strategy = {"strategy"};
  return runtime != by_strategy || gradient != by_strategy || update != by_strategy;
}

bool RunConfig::has_plan() const {
  return parallel.tp > 1 || !plan.parameters.empty() || !plan.inputs.empty() ||
         !plan.outputs.empty();
}

std::string RunConfig::trace_path() const {
  namespace fs = std::filesystem;
  if (log.trace.empty()) {
    return log.profile ? (fs::path(run.dir) / "trace.json").string() : std::string();
  }
  const auto normal = [](const fs::path& path) {
    return fs::absolute(path / "").lexically_normal();
  };
  const bool is_folder = fs::is_directory(log.trace) || normal(log.trace) == normal(run.dir);
  return is_folder ? (fs::path(log.trace) / "trace.json").string() : log.trace;
}

std::string RunConfig::metrics_path() const {
  return log.metrics.empty() ? (std::filesystem::path(run.dir) / "metrics.jsonl").string()
                             : log.metrics;
}

std::vector<int> RunConfig::mesh_sizes(int world_size) const {
  const internal::MeshSizes sizes = internal::fit_mesh(parallel, world_size);
  HS_CHECK(sizes.problem.empty(), "train.config: ", sizes.key, ": ", sizes.problem);
  return {sizes.replicate, sizes.shard, parallel.tp};
}

}  // namespace hypershard::train
