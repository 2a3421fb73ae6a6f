// Runs a test body on several ranks: threads of this process, the cheapest level at which a
// collective program can be tested, or processes of their own. Every run has a deadline.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hypershard/comm/world.h"

namespace hypershard::testing {

/// What the ranks are and which communicators they talk through.
enum class RankBackend {
  kLocal,    ///< comm/local: shared memory of the process
  kGloo,     ///< comm/c10d over Gloo and loopback, as between supernodes
  kDelayed,  ///< comm/local without shared memory; works complete late, on another thread, in a
             ///< seeded random order
  kShm,      ///< processes that join as a launcher's would: comm/shm inside a supernode
};
std::string to_text(RankBackend backend);

/// How the ranks talk and how long they may take.
struct RunRanksOptions {
  RankBackend backend = RankBackend::kLocal;
  std::vector<std::string> supernodes = {};  ///< label a rank; {} = all in one
  double deadline_s =
      60;  ///< for the whole body; then every rank's last collective is printed and the run fails
  double timeout_s = 20;   ///< of a collective
  std::uint64_t seed = 0;  ///< kDelayed: of the delays
};

/// Runs `body` on `num_ranks` ranks and rethrows the first failure, with its rank and the others
/// listed.
///
/// With kShm each rank is this program again, which runs the calling test up to this call, then
/// `body` in this call alone, and ends: what `body` writes to the test's variables is not seen
/// afterwards, and the call must be in the thread of a GoogleTest test. Failed expectations of a
/// rank become one of the test.
/// Errors: the body's own (kShm: of ours the type and the text); CommError at the deadline.
void run_ranks(
    int num_ranks,
    const std::function<void(std::shared_ptr<comm::World>)>& body,
    const RunRanksOptions& options = {}
);

}  // namespace hypershard::testing
