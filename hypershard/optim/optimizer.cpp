// Why: torch::save(optimizer) does nothing unless it is overridden, which would lose state in
// silence.
#include "hypershard/optim/optimizer.h"

#include "hypershard/core/error.h"

namespace hypershard::optim {

void ShardedOptimizer::save(torch::serialize::OutputArchive& /*archive*/) const {
  HS_FAIL(
      Unsupported,
      "optim: torch::save cannot hold the sharded state of '",
      kind(),
      "'",
      HS_HINT("use checkpoint::save, which writes weights and optimizer state by logical name")
  );
}

void ShardedOptimizer::load(torch::serialize::InputArchive& /*archive*/) {
  HS_FAIL(
      Unsupported,
      "optim: torch::load cannot fill the sharded state of '",
      kind(),
      "'",
      HS_HINT("use checkpoint::load")
  );
}

}  // namespace hypershard::optim
