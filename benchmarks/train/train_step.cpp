// One rank of a measured training run: the model, data and optimizer of benchmarks/peers/
// fsdp2_train.py, sharded by this library. Prints one JSON line a step and a summary, on rank 0.
//
// Ranks come from the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); benchmarks/compare
// starts them. `--mode floor` is the floor: one process without communication, with one rank's
// share of the batch and of the optimizer's work.
#include <algorithm>
#include <cstdio>
#include <string>
#include <sys/resource.h>
#include <vector>

#include "benchmarks/train/formula_data.h"
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "hypershard/comm/world.h"
#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"
#include "hypershard/model/gpt.h"
#include "hypershard/optim/adamw.h"
#include "hypershard/shard/engine.h"
#include "hypershard/shard/fully_shard.h"
#include "hypershard/train/comm_meter.h"
#include "hypershard/train/process_memory.h"

namespace hypershard::bench {
namespace {

using Json = nlohmann::ordered_json;

struct Settings {
  std::string mode = "sharded";
  std::string strategy = "zero3";
  std::string share = "auto";
  std::string dtype = "fp32";
  std::string wire = "fp32";  ///< of gradients between supernodes
  std::int64_t bucket_bytes = -1;
  std::int64_t layers = 8;
  std::int64_t dim = 512;
  std::int64_t heads = 8;
  std::int64_t vocab = 8192;
  std::int64_t seq = 64;
  std::int64_t batch = 4;
  std::int64_t floor_parts = 2;
  int replicate = 0;  ///< supernodes; 0: the mesh has no such axis
  int steps = 15;
  int warmup = 3;
  std::uint64_t seed = 1;
  bool reshard = true;
  bool step_in_backward = false;
};

Settings parse(int argc, char** argv) {
  Settings settings;
  CLI::App app("One rank of a measured training run.");
  app.add_option("--mode", settings.mode)->check(CLI::IsMember({"sharded", "floor"}));
  app.add_option("--strategy", settings.strategy);
  app.add_option("--share", settings.share)->check(CLI::IsMember({"auto", "on", "off"}));
  app.add_option("--dtype", settings.dtype)->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--wire", settings.wire)->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--bucket-bytes", settings.bucket_bytes, "-1: from the measured link");
  app.add_option("--layers", settings.layers);
  app.add_option("--dim", settings.dim);
  app.add_option("--heads", settings.heads);
  app.add_option("--vocab", settings.vocab);
  app.add_option("--seq", settings.seq);
  app.add_option("--batch", settings.batch, "rows of the global batch");
  app.add_option("--floor-parts", settings.floor_parts, "ranks that the floor is one of");
  app.add_option("--replicate", settings.replicate, "size of the axis between supernodes");
  app.add_option("--steps", settings.steps);
  app.add_option("--warmup", settings.warmup);
  app.add_option("--seed", settings.seed);
  app.add_flag("!--no-reshard", settings.reshard);
  app.add_flag("--step-in-backward", settings.step_in_backward);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  return settings;
}

std::string peer_name(const std::string& name) {
  return name.starts_with("embed.") ? "tok_emb." + name.substr(6) : name;
}

// No rank ever holds more than its own weights.
void fill(const shard::ShardedModel& model, std::uint64_t seed) {
  const at::NoGradGuard no_grad;
  for (const shard::UpdateTensor& update : model.update_parameters()) {
    for (const shard::UpdatePiece& piece : update.pieces) {
      at::Tensor values = update.tensor.narrow(0, piece.offset, piece.range.numel());
      if (piece.shape.size() == 1) {
        values.fill_(1.0);
      } else {
        const std::int64_t numel = c10::multiply_integers(piece.shape);
        values.copy_(formula_weights(peer_name(piece.name), seed, numel)
                         .narrow(0, piece.range.begin, piece.range.numel()));
      }
    }
  }
  model.engine().mark_initialised();
  model.sync_runtime();
}

layout::DeviceMesh device_mesh(const Settings& settings, const comm::World& world) {
  if (settings.replicate == 0) {
    return {{{"shard", world.size()}}, world.topology()};
  }
  return {
      {{"replicate", settings.replicate}, {"shard", world.size() / settings.replicate}},
      world.topology()
  };
}

shard::FullyShardOptions shard_options(const Settings& settings) {
  shard::FullyShardOptions options;
  options.strategy = layout::parse_strategy(settings.strategy);
  options.units = {"blocks.*"};
  if (settings.replicate > 0) {
    // What is reduced at the very end, and needed at once, should be no more than it must.
    options.units.insert(options.units.end(), {"embed", "head"});
  }
  options.reshard_after_forward = settings.reshard;
  options.share = settings.share == "auto" ? shard::Share::kAuto
                  : settings.share == "on" ? shard::Share::kOn
                                           : shard::Share::kOff;
  if (settings.dtype == "bf16") {
    options.precision.compute = at::kBFloat16;
    options.precision.reduce = at::kFloat;
  }
  if (settings.wire == "bf16") {
    options.precision.wire = at::kBFloat16;
  }
  if (settings.bucket_bytes >= 0) {
    options.bucket_bytes = settings.bucket_bytes;
  }
  return options;
}

/// AdamW over one rank's share of an unsharded model: what the optimizer costs without sharding's
/// help or hindrance.
class PartialAdamW {
 public:
  PartialAdamW(const shard::ShardedModel& model, std::int64_t parts) {
    for (const at::Tensor& tensor : model.update_tensors()) {
      const std::int64_t numel = tensor.numel() / parts;
      whole_.push_back(tensor);
      numel_.push_back(numel);
      first_.push_back(at::zeros({numel}));
      second_.push_back(at::zeros({numel}));
      steps_.push_back(at::zeros({}, at::kFloat));
    }
  }
  void step() {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> params;
    std::vector<at::Tensor> grads;
    for (std::size_t i = 0; i < whole_.size(); ++i) {
      params.push_back(whole_[i].narrow(0, 0, numel_[i]));
      grads.push_back(whole_[i].grad().narrow(0, 0, numel_[i]));
      steps_[i].add_(1);
    }
    at::_fused_adamw_(
        params, grads, first_, second_, {}, steps_, 1e-3, 0.9, 0.95, 0.1, 1e-8, false, false
    );
  }

 private:
  std::vector<at::Tensor> whole_;
  std::vector<std::int64_t> numel_;
  std::vector<at::Tensor> first_;
  std::vector<at::Tensor> second_;
  std::vector<at::Tensor> steps_;
};

/// What a rank sends to other supernodes in a step for one unit: the gradients that others own, and
/// the parameters that it owns to all of them.
std::int64_t bytes_between(const shard::Unit& unit, int supernodes) {
  std::int64_t bytes = 0;
  for (const auto& group : unit.groups()) {
    const std::int64_t slice = group->runtime_range().numel();
    const std::int64_t own = group->update_range().numel();
    const shard::GroupDtypes& dtypes = group->dtypes();
    const c10::ScalarType wire = dtypes.wire.value_or(dtypes.reduce);
    bytes += (slice - own) * static_cast<std::int64_t>(c10::elementSize(wire)) +
             own * (supernodes - 1) * static_cast<std::int64_t>(c10::elementSize(dtypes.storage));
  }
  return bytes;
}

Json summary(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const std::size_t n = samples.size();
  const double median = (samples[(n - 1) / 2] + samples[n / 2]) / 2;
  return {{"min", samples.front()}, {"median", median}, {"n", n}};
}

/// Nanoseconds in which the rank had nothing to do: what the engine waits for, it waits for in its
/// communicators and their boards. Without the arithmetic and copies of collectives.
std::int64_t wait_ns(const train::CommMeter& meter) {
  return meter.stats(layout::Tier::kIntra).wait_ns + meter.stats(layout::Tier::kInter).wait_ns;
}

double milliseconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_usec) * 1e-3;
}

/// One measured run.
class Run {
 public:
  Run(const Settings& settings, std::shared_ptr<comm::World> world)
      : settings_(settings),
        world_(std::move(world)),
        mesh_(world_, device_mesh(settings, *world_)),
        model_(
            model::GptConfig{
                .vocab_size = settings.vocab,
                .num_layers = settings.layers,
                .dim = settings.dim,
                .num_heads = settings.heads,
                .max_sequence = settings.seq
            },
            model::GptOptions{.device = at::kMeta, .seed = std::nullopt}
        ) {
    sharded_.emplace(shard::fully_shard(*model_, mesh_, shard_options(settings)));
    fill(*sharded_, settings.seed);
    if (is_floor()) {
      partial_.emplace(*sharded_, settings.floor_parts);
    } else {
      optimizer_.emplace(*sharded_, adamw());
      optimizer_->step_in_backward(settings.step_in_backward);
    }
    everyone_ = world_->world_communicator();
    meter_.emplace(*sharded_, mesh_, *everyone_);
  }

  void run();

 private:
  static optim::AdamWOptions adamw() {
    return {
        .lr = 1e-3, .beta2 = 0.95, .weight_decay = 0.1, .decay_families = {"decay", "no_decay"}
    };
  }
  bool is_floor() const { return settings_.mode == "floor"; }
  std::pair<at::Tensor, at::Tensor> batch(std::int64_t step) const;
  double one_step(std::int64_t step);
  comm::CommStats link_stats() const;
  std::int64_t sum_over_ranks(std::int64_t own) const;
  std::vector<double> least_over_ranks(const std::vector<double>& own) const;
  double plain_bytes_per_s() const;
  Json between() const;
  Json finish() const;

  const Settings settings_;
  std::shared_ptr<comm::World> world_;
  comm::ProcessMesh mesh_;
  model::Gpt model_;
  std::optional<shard::ShardedModel> sharded_;
  std::optional<optim::AdamW> optimizer_;
  std::optional<PartialAdamW> partial_;
  std::shared_ptr<comm::Communicator> everyone_;
  std::optional<train::CommMeter> meter_;

  Stopwatch since_step_;  ///< since the end of the last step, the barrier between them included
  std::vector<double> interval_ms_;
  std::vector<double> step_ms_, forward_ms_, backward_ms_, optimizer_ms_, exposed_ms_, wait_ms_;
  std::vector<double> exposed_between_ms_;
  std::vector<double> late_between_ms_;
  std::vector<double> least_exposed_between_ms_;  ///< of the rank that waited least, by step
  std::int64_t sent_between_ = 0;  ///< by all ranks, over the model's own axis, in measured steps
  double plain_bytes_per_s_ = 0;   ///< of the link, a rank
  std::vector<double> losses_;
};

std::pair<at::Tensor, at::Tensor> Run::batch(std::int64_t step) const {
  const std::int64_t parts = is_floor() ? settings_.floor_parts : world_->size();
  const std::int64_t rows = settings_.batch / parts;
  const std::int64_t first = is_floor() ? 0 : world_->rank() * rows;
  const at::Tensor tokens =
      formula_tokens(settings_.seed, step, first, rows, settings_.seq, settings_.vocab);
  return {
      tokens.narrow(1, 0, settings_.seq).contiguous(),
      tokens.narrow(1, 1, settings_.seq).contiguous()
  };
}

double Run::one_step(std::int64_t step) {
  const auto [x, y] = batch(step);
  everyone_->barrier("step")->wait();
  const std::int64_t exposed = meter_->exposed_ns();
  const std::int64_t waited = wait_ns(*meter_);
  const std::int64_t exposed_between = meter_->exposed_ns(layout::Tier::kInter);
  const std::int64_t late_between = meter_->stats(layout::Tier::kInter).late_ns;
  const Stopwatch watch;
  at::Tensor loss = model_->loss(x, y);
  const double forward_ms = watch.elapsed_ms();
  loss.backward();
  const double backward_ms = watch.elapsed_ms();
  if (partial_) {
    partial_->step();
  } else {
    optimizer_->step();
  }
  const double optimizer_ms = watch.elapsed_ms();
  sharded_->zero_grad();
  const double step_ms = watch.elapsed_ms();
  const double interval_ms = since_step_.elapsed_ms();
  since_step_ = Stopwatch();
  if (step >= settings_.warmup) {
    interval_ms_.push_back(interval_ms);
    step_ms_.push_back(step_ms);
    forward_ms_.push_back(forward_ms);
    backward_ms_.push_back(backward_ms - forward_ms);
    optimizer_ms_.push_back(optimizer_ms - backward_ms);
    exposed_ms_.push_back(static_cast<double>(meter_->exposed_ns() - exposed) * 1e-6);
    wait_ms_.push_back(static_cast<double>(wait_ns(*meter_) - waited) * 1e-6);
    exposed_between_ms_.push_back(
        static_cast<double>(meter_->exposed_ns(layout::Tier::kInter) - exposed_between) * 1e-6
    );
    late_between_ms_.push_back(
        static_cast<double>(meter_->stats(layout::Tier::kInter).late_ns - late_between) * 1e-6
    );
  }
  at::Tensor mean = loss.detach().to(at::kDouble).view({1}).clone();
  everyone_->all_reduce(mean)->wait_released();
  return mean.item<double>() / world_->size();
}

comm::CommStats Run::link_stats() const {
  comm::CommStats sum;
  const shard::DataParallel& parallel = sharded_->engine().parallel();
  for (const auto* axes : {&parallel.cuts, &parallel.summed}) {
    for (const shard::DataAxis& axis : *axes) {
      for (const auto& ranks : {axis.gather, axis.reduce}) {
        if (axis.name == parallel.replicate_axis) {
          sum.sent_bytes += ranks->stats().sent_bytes;
        }
      }
    }
  }
  return sum;
}

std::int64_t Run::sum_over_ranks(std::int64_t own) const {
  const at::Tensor sum = at::full({1}, own, at::TensorOptions().dtype(at::kLong));
  const at::Tensor all = at::empty({world_->size()}, at::TensorOptions().dtype(at::kLong));
  everyone_->all_gather(all, sum)->wait();
  return all.sum().item<std::int64_t>();
}

std::vector<double> Run::least_over_ranks(const std::vector<double>& own) const {
  const auto numel = static_cast<std::int64_t>(own.size());
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const at::Tensor mine = at::empty({numel}, options);
  std::copy(own.begin(), own.end(), mine.data_ptr<double>());
  const at::Tensor all = at::empty({world_->size() * numel}, options);
  everyone_->all_gather(all, mine)->wait();
  const at::Tensor least = all.view({world_->size(), numel}).amin(0).contiguous();
  return {least.data_ptr<double>(), least.data_ptr<double>() + numel};
}

// What a rank gets across with nothing else to do, while all ranks of its supernode do the same.
double Run::plain_bytes_per_s() const {
  constexpr std::int64_t kNumel = 4 << 20;
  for (const shard::DataAxis& axis : sharded_->engine().parallel().cuts) {
    if (axis.name != "replicate" || axis.size == 1) {
      continue;
    }
    const at::Tensor own = at::zeros({kNumel});
    const at::Tensor all = at::empty({kNumel * axis.size});
    axis.gather->all_gather(all, own)->wait();
    everyone_->barrier("plain")->wait();
    const std::int64_t before = axis.gather->stats().sent_bytes;
    const Stopwatch watch;
    for (int i = 0; i < 3; ++i) {
      axis.gather->all_gather(all, own)->wait();
    }
    return static_cast<double>(axis.gather->stats().sent_bytes - before) / watch.elapsed_s();
  }
  return 0;
}

void Run::run() {
  rusage before{};
  comm::CommStats link_before;
  for (int step = 0; step < settings_.warmup + settings_.steps; ++step) {
    if (step == settings_.warmup) {
      sharded_->reset_counters();
      link_before = link_stats();
      ::getrusage(RUSAGE_SELF, &before);
    }
    losses_.push_back(one_step(step));
  }
  rusage after{};
  ::getrusage(RUSAGE_SELF, &after);
  sent_between_ = sum_over_ranks(link_stats().sent_bytes - link_before.sent_bytes);
  least_exposed_between_ms_ = least_over_ranks(exposed_between_ms_);
  plain_bytes_per_s_ = plain_bytes_per_s();
  if (world_->rank() == 0) {
    Json result = finish();
    const int steps = std::max(1, settings_.steps);
    result["rank0_per_step"] = {
        {"user_ms", (milliseconds(after.ru_utime) - milliseconds(before.ru_utime)) / steps},
        {"system_ms", (milliseconds(after.ru_stime) - milliseconds(before.ru_stime)) / steps},
        {"minor_faults", (after.ru_minflt - before.ru_minflt) / steps},
    };
    std::printf("%s\n", result.dump().c_str());
    std::fflush(stdout);
  }
}

/// Multiplications of a unit for a token, in the same measure for all: of its matrices, and of
/// attention in blocks. Looking up an embedding takes none.
std::int64_t multiplications(const shard::Unit& unit, const Settings& settings) {
  const std::string& path = unit.path();
  if (unit.is_root() || path == "embed") {
    return 0;
  }
  std::int64_t sum = path.starts_with("blocks.") ? 2 * settings.seq * settings.dim : 0;
  for (const auto& group : unit.groups()) {
    sum += group->packing().numel;
  }
  return sum;
}

// `units` in the order of the forward: what the floor of exposed time is computed from.
Json Run::between() const {
  double all = 0;
  std::int64_t update_numel = 0;
  const double others = 1.0 - 1.0 / std::max(1, settings_.replicate);
  for (const auto& unit : sharded_->engine().units()) {
    for (const auto& group : unit->groups()) {
      const shard::GroupDtypes& dtypes = group->dtypes();
      const c10::ScalarType wire = dtypes.wire.value_or(dtypes.reduce);
      all += others * static_cast<double>(group->packing().numel) *
             static_cast<double>(c10::elementSize(wire) + c10::elementSize(dtypes.storage));
      update_numel += group->update_range().numel();
    }
  }
  Json units = Json::array();
  for (const int index : sharded_->engine().recorded_order()) {
    const shard::Unit& unit = *sharded_->engine().units()[static_cast<std::size_t>(index)];
    units.push_back(
        {{"path", unit.path()},
         {"bytes", bytes_between(unit, settings_.replicate)},
         {"multiplications", multiplications(unit, settings_)}}
    );
  }
  return {
      {"predicted_bytes", all},
      {"units", units},
      {"sent_bytes", sent_between_},
      {"plain_bytes_per_s", plain_bytes_per_s_},
      {"update_numel", update_numel},
  };
}

Json Run::finish() const {
  const shard::Counters& counters = sharded_->counters();
  return {
      {"kind", "summary"},
      {"mode", settings_.mode},
      {"ranks", world_->size()},
      {"step_ms", summary(step_ms_)},
      {"interval_ms", summary(interval_ms_)},
      {"forward_ms", summary(forward_ms_)},
      {"backward_ms", summary(backward_ms_)},
      {"optimizer_ms", summary(optimizer_ms_)},
      {"exposed_ms", summary(exposed_ms_)},
      {"wait_ms", summary(wait_ms_)},
      {"exposed_between_ms", summary(exposed_between_ms_)},
      {"late_between_ms", summary(late_between_ms_)},
      {"least_exposed_between_ms", summary(least_exposed_between_ms_)},
      {"between", settings_.replicate > 0 ? between() : Json()},
      {"losses", losses_},
      {"copied_bytes", counters.copied_bytes},
      {"accumulated_bytes", counters.accumulated_bytes},
      {"gathered_bytes", counters.gathered_bytes},
      {"peak_rss_bytes", train::peak_resident_bytes()},
  };
}

int main_of(int argc, char** argv) {
  train::keep_freed_memory();
  const Settings settings = parse(argc, argv);
  at::set_num_threads(1);
  const auto world = comm::World::join();
  {
    Run run(settings, world);
    run.run();
  }
  world->shutdown();
  return 0;
}

}  // namespace
}  // namespace hypershard::bench

int main(int argc, char** argv) {
  try {
    return hypershard::bench::main_of(argc, argv);
  } catch (const hypershard::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
