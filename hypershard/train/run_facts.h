// Why: what a run was made of, beside its settings: machine, versions, sizes, the measured peak.
// Kept in run.json, so that numbers can be compared later.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hypershard::train {

class Session;

/// Facts of a run.
struct RunFacts {
  std::string version;
  std::string torch_version;
  std::string host;
  std::string cpu;
  int threads_a_rank = 0;
  int world_size = 0;
  std::string world;  ///< how ranks reach each other
  std::string mesh;
  std::string strategy;
  std::int64_t parameters = 0;
  double flops_per_token = 0;
  std::int64_t tokens_per_step = 0;
  std::uint64_t train_tokens = 0;
  std::uint64_t heldout_tokens = 0;
  double gemm_peak_flops_per_s = 0;  ///< of all ranks together
  std::string gemm_dtype;
  std::vector<std::int64_t> gemm_shape;
};

/// Writes facts as JSON for people.
std::string to_json(const RunFacts& facts);
/// Reads run.json; facts without a peak if the file is missing or of another kind.
RunFacts read_facts_if_any(const std::string& path);

/// Fills in all but the GEMM peak.
void fill_facts(RunFacts& facts, const Session& session);
/// Says in a few lines what is about to run.
std::vector<std::string> describe_facts(const RunFacts& facts, const Session& session);

/// Returns the processor's name, from /proc/cpuinfo.
std::string cpu_name();

}  // namespace hypershard::train
