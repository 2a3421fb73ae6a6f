// See validation.h; the checks are in internal/validator.cpp.
#include "hypershard/plan/validation.h"

#include "hypershard/plan/internal/validator.h"

namespace hypershard::plan {

class ValidationGuard::Validator {
 public:
  Validator(torch::nn::Module& model, const AppliedPlan& applied, const ValidationOptions& options)
      : work(applied, options), tracking(work.tracker(), model) {
    {
      const TrackingPause pause;
      work.begin(model);
    }
    previous_ = set_boundary_observer(&work);
  }
  ~Validator() { set_boundary_observer(previous_); }
  Validator(const Validator&) = delete;
  Validator& operator=(const Validator&) = delete;

  internal::Validator work;
  TrackingGuard tracking;

 private:
  BoundaryObserver* previous_ = nullptr;
};

ValidationGuard::ValidationGuard(
    torch::nn::Module& model, const AppliedPlan& applied, const ValidationOptions& options
)
    : validator_(std::make_unique<Validator>(model, applied, options)) {}

ValidationGuard::~ValidationGuard() = default;

void ValidationGuard::set_layout(
    const at::Tensor& tensor, const layout::Layout& layout, const std::string& name
) {
  validator_->work.set_layout(tensor, layout, name);
}

void ValidationGuard::finish() {
  validator_->work.finish();
}

bool ValidationGuard::tell_failure(ErrorCode code, const std::string& text) noexcept {
  return validator_->work.tell_failure(code, text);
}

ValidationCounts ValidationGuard::counts() const {
  return validator_->work.counts();
}

}  // namespace hypershard::plan
