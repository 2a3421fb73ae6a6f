// The shapes that the unsharded model computes, operator by operator: what a sharded run's global
// shapes must be.
#pragma once

#include <string>
#include <vector>

#include "hypershard/layout/mesh.h"
#include "hypershard/plan/resolve.h"
#include "hypershard/plan/tracker.h"

namespace hypershard::plan::internal {

/// One operator of the unsharded run.
struct PlainOperator {
  std::string name;
  std::vector<std::vector<std::int64_t>> results;  ///< shapes, {} for undefined ones
};

/// Runs `forward` with the inputs' global shapes (and zeros for values) and lists its operators.
/// The model has its global shapes.
std::vector<PlainOperator> plain_operators(
    torch::nn::Module& model,
    const layout::DeviceMesh& mesh,
    int rank,
    const std::vector<PlannedInput>& inputs,
    const ForwardRun& forward
);

/// Walks along the list as a sharded run goes on.
class PlainComparison {
 public:
  explicit PlainComparison(std::vector<PlainOperator> plain) : plain_(std::move(plain)) {}
  /// Returns what is wrong with the next operator's results, empty if nothing is. Ends where the
  /// runs take different ways: there is nothing to compare with any more.
  std::string next(const SeenOperator& seen);
  void stop() { at_ = plain_.size(); }

 private:
  std::vector<PlainOperator> plain_;
  std::size_t at_ = 0;
};

}  // namespace hypershard::plan::internal
