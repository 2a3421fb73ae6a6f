// See plain_shapes.h.
#include "hypershard/plan/internal/plain_shapes.h"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include "hypershard/core/text.h"

namespace hypershard::plan::internal {
namespace {

class Recorder final : public TrackerObserver {
 public:
  void on_fault(const LayoutFault& /*fault*/) override {}  // the sharded run reports it
  void after_operator(const SeenOperator& seen, c10::ArrayRef<at::Tensor> results) override {
    PlainOperator op{.name = seen.name, .results = {}};
    for (const at::Tensor& result : results) {
      op.results.push_back(result.defined() ? result.sizes().vec() : std::vector<std::int64_t>{});
    }
    seen_.push_back(std::move(op));
  }
  std::vector<PlainOperator> take() { return std::move(seen_); }

 private:
  std::vector<PlainOperator> seen_;
};

// Gives the inputs' handles their global shapes for the time of the run.
class GlobalInputs {
 public:
  explicit GlobalInputs(const std::vector<PlannedInput>& inputs) {
    for (const PlannedInput& input : inputs) {
      if (input.local.sizes() != at::IntArrayRef(input.spec.shape)) {
        at::Tensor handle = input.local;
        changed_.emplace_back(handle, handle.variable_data());
        handle.set_data(at::zeros(input.spec.shape, handle.options().requires_grad(false)));
      }
    }
  }
  ~GlobalInputs() {
    for (auto& [handle, held] : changed_) {
      handle.set_data(held);
    }
  }
  GlobalInputs(const GlobalInputs&) = delete;
  GlobalInputs& operator=(const GlobalInputs&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> changed_;
};

}  // namespace

std::vector<PlainOperator> plain_operators(
    torch::nn::Module& model,
    const layout::DeviceMesh& mesh,
    int rank,
    const std::vector<PlannedInput>& inputs,
    const ForwardRun& forward
) {
  Recorder recorder;
  const GlobalInputs global(inputs);
  LayoutTracker tracker(mesh, rank, recorder);
  const TrackingGuard guard(tracker, model);
  const at::AutoGradMode with_grad(true);
  forward();
  return recorder.take();
}

std::string PlainComparison::next(const SeenOperator& seen) {
  if (at_ >= plain_.size()) {
    return "";
  }
  const PlainOperator& plain = plain_[at_++];
  if (plain.name != seen.name || plain.results.size() != seen.verdict.outputs.size()) {
    stop();
    return "";
  }
  for (std::size_t i = 0; i < plain.results.size(); ++i) {
    if (seen.verdict.outputs[i].shape != plain.results[i]) {
      return concat_text(
          "result ",
          i,
          " is globally ",
          seen.verdict.outputs[i].shape,
          ", but the unsharded model computes ",
          plain.results[i],
          " here"
      );
    }
  }
  return "";
}

}  // namespace hypershard::plan::internal
