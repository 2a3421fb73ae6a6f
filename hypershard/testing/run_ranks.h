// Runs a test body on several ranks that are threads of this process.
// The cheapest level at which a collective program can be tested; every run has a deadline.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hypershard/comm/world.h"

namespace hypershard::testing {

/// Which communicators the threads talk through.
enum class RankBackend {
  kLocal,    ///< comm/local: shared memory of the process
  kGloo,     ///< comm/c10d over Gloo and loopback, as between supernodes
  kDelayed,  ///< comm/local without shared memory; works complete late, on another thread, in a
             ///< seeded random order
};
std::string to_text(RankBackend backend);

/// How the threads talk and how long they may take.
struct RunRanksOptions {
  RankBackend backend = RankBackend::kLocal;
  std::vector<std::string> supernodes = {};  ///< label a rank; {} = all in one
  double deadline_s =
      60;  ///< for the whole body; then every rank's last collective is printed and the run fails
  double timeout_s = 20;   ///< of a collective
  std::uint64_t seed = 0;  ///< kDelayed: of the delays
};

/// Runs `body` on `num_ranks` threads and rethrows the first failure, with its rank and the others
/// listed. Errors: the body's own; CommError at the deadline.
void run_ranks(
    int num_ranks,
    const std::function<void(std::shared_ptr<comm::World>)>& body,
    const RunRanksOptions& options = {}
);

}  // namespace hypershard::testing
