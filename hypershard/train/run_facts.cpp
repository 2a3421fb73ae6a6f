// Why: see run_facts.h.
#include "hypershard/train/run_facts.h"

#include <cstdio>
#include <fstream>

#include <nlohmann/json.hpp>

#include <ATen/Parallel.h>
#include <torch/version.h>

#include "hypershard/core/process.h"
#include "hypershard/core/text.h"
#include "hypershard/train/progress.h"
#include "hypershard/train/session.h"
#include "hypershard/train/version.h"

namespace hypershard::train {

std::string to_json(const RunFacts& facts) {
  return nlohmann::ordered_json{
      {"hypershard", facts.version},
      {"torch", facts.torch_version},
      {"host", facts.host},
      {"cpu", facts.cpu},
      {"threads_a_rank", facts.threads_a_rank},
      {"world_size", facts.world_size},
      {"world", facts.world},
      {"mesh", facts.mesh},
      {"strategy", facts.strategy},
      {"parameters", facts.parameters},
      {"flops_per_token", facts.flops_per_token},
      {"tokens_per_step", facts.tokens_per_step},
      {"train_tokens", facts.train_tokens},
      {"heldout_tokens", facts.heldout_tokens},
      {"gemm_peak_flops_per_s", facts.gemm_peak_flops_per_s},
      {"gemm_dtype", facts.gemm_dtype},
      {"gemm_shape", facts.gemm_shape},
  }
      .dump(2);
}

RunFacts read_facts_if_any(const std::string& path) {
  RunFacts facts;
  std::ifstream file(path);
  const nlohmann::json json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) {
    return facts;
  }
  facts.world_size = json.value("world_size", 0);
  facts.gemm_peak_flops_per_s = json.value("gemm_peak_flops_per_s", 0.0);
  facts.gemm_dtype = json.value("gemm_dtype", std::string());
  facts.gemm_shape = json.value("gemm_shape", std::vector<std::int64_t>());
  return facts;
}

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t colon = line.find(": ");
    if (line.compare(0, 10, "model name") == 0 && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "unknown";
}

void fill_facts(RunFacts& facts, const Session& session) {
  facts.version = version();
  facts.torch_version = TORCH_VERSION;
  facts.host = host_name();
  facts.cpu = cpu_name();
  facts.threads_a_rank = at::get_num_threads();
  facts.world_size = session.world().size();
  facts.world = session.world().description();
  facts.mesh = to_text(session.mesh().mesh());
  facts.strategy = to_text(session.config().parallel.strategy);
  facts.parameters = model::num_parameters(session.shape());
  facts.flops_per_token = model::flops_per_token(session.shape(), session.config().model.sequence);
  facts.tokens_per_step = session.tokens_per_step();
  facts.train_tokens = session.data().prepared.train.num_tokens;
  facts.heldout_tokens = session.data().prepared.val.num_tokens;
}

std::vector<std::string> describe_facts(const RunFacts& facts, const Session& session) {
  const RunConfig& config = session.config();
  const double epochs = session.data().train->epochs_before(config.schedule.steps);
  char gflops[32];
  std::snprintf(gflops, sizeof gflops, "%.1f", facts.gemm_peak_flops_per_s * 1e-9);
  char rounded_epochs[32];
  std::snprintf(rounded_epochs, sizeof rounded_epochs, "%.2f", epochs);
  return {
      concat_text(
          "run    ",
          config.run.dir,
          ": ",
          config.schedule.steps,
          " steps of ",
          facts.tokens_per_step,
          " tokens, ",
          rounded_epochs,
          " times through the data"
      ),
      concat_text(
          "model  ",
          config.model.kind,
          " with ",
          short_count(static_cast<double>(facts.parameters)),
          " parameters, ",
          facts.strategy,
          " on ",
          facts.mesh
      ),
      concat_text(
          "ranks  ",
          facts.world_size,
          " with ",
          facts.threads_a_rank,
          facts.threads_a_rank == 1 ? " thread" : " threads",
          " each, ",
          facts.world
      ),
      concat_text(
          "peak   ",
          gflops,
          " GFLOP/s measured (",
          facts.gemm_dtype,
          " GEMM ",
          facts.gemm_shape,
          ", all ranks at once); MFU is relative to it"
      )
  };
}

}  // namespace hypershard::train
