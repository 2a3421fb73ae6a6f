// The work behind ValidationGuard: what is checked when.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "hypershard/plan/apply.h"
#include "hypershard/plan/gradient_layouts.h"
#include "hypershard/plan/internal/collective_watch.h"
#include "hypershard/plan/rank_agreement.h"
#include "hypershard/plan/tracker.h"
#include "hypershard/plan/validation.h"

namespace hypershard::plan::internal {

/// What to do about values that should be alike.
inline constexpr const char* kReplicateFix =
    "something before it differs between these ranks: their parameters, inputs, random numbers, or "
    "a reduction that is missing; validate with level `operators` to find the operator";

/// Tells whether the calling thread runs a backward.
bool in_backward();

/// Observes one rank's operators, modules and boundaries. See ValidationGuard.
class Validator final : public TrackerObserver, public BoundaryObserver {
 public:
  Validator(const AppliedPlan& applied, const ValidationOptions& options);

  LayoutTracker& tracker() { return tracker_; }
  /// Gives parameters their layouts and compares what should be alike. Collective.
  void begin(torch::nn::Module& model);
  void set_layout(const at::Tensor& tensor, const layout::Layout& layout, const std::string& name);
  void finish();
  bool tell_failure(ErrorCode code, const std::string& text) noexcept;
  ValidationCounts counts() const;

  void on_fault(const LayoutFault& fault) override;
  void before_operator(const SeenOperator& seen) override;
  void after_operator(const SeenOperator& seen, c10::ArrayRef<at::Tensor> results) override;
  void before_backward_operator(
      const std::string& name,
      c10::ArrayRef<at::Tensor> operands,
      const std::string& origin,
      bool is_comparable
  ) override;
  void on_assumed(const at::Tensor& tensor, const std::string& used_by) override;
  void enter_module(const std::string& path, c10::ArrayRef<at::Tensor> inputs) override;
  void leave_module(const std::string& path, c10::ArrayRef<at::Tensor> outputs) override;

  void before_boundary(const ResolvedBoundary& boundary, const at::Tensor& arriving) override;
  void after_boundary(
      const ResolvedBoundary& boundary, const at::Tensor& arriving, const at::Tensor& result
  ) override;
  void before_gradient(const ResolvedBoundary& boundary, const at::Tensor& gradient) override;
  void before_reduction(const ResolvedParameter& parameter, const at::Tensor& gradient) override;

 private:
  void begin_root(c10::ArrayRef<at::Tensor> inputs);
  void end_root(c10::ArrayRef<at::Tensor> outputs);
  void check_identities(const std::string& path, RuleKind kind, c10::ArrayRef<at::Tensor> tensors);
  void check_random(const SeenOperator& seen);
  void meet(const std::string& place);
  void compare(
      const at::Tensor& tensor,
      const layout::Layout& layout,
      std::string what,
      std::string fix,
      bool include_data_axes = true
  );
  void compare_parameters();
  void compare_parameters_of(const std::string& path);
  void compare_parameter(const ResolvedParameter& parameter, const at::Tensor& tensor);
  void give_gradients_layouts();
  void end_backward();
  void check_gradients();
  void check_boundary_gradients(const GradientLayouts& gradients);
  void check_parameter_gradients(const GradientLayouts& gradients);
  LayoutFault fault_at(
      const ResolvedBoundary& boundary, const at::Tensor& tensor, const layout::TensorSpec& spec
  ) const;
  int number_of(const ResolvedBoundary& boundary) const;
  /// Tells whether two layouts put the same on every rank: on an axis of one rank all do.
  bool are_alike(layout::Layout a, layout::Layout b) const;
  bool is_data_axis(std::size_t axis) const;

  const AppliedPlan applied_;
  const ValidationOptions options_;
  const ResolvedPlan& plan_;
  const layout::DeviceMesh& mesh_;
  std::shared_ptr<comm::Communicator> everyone_;
  LayoutTracker tracker_;
  RankAgreement agreement_;
  CollectiveWatch collectives_;
  std::vector<std::pair<const ResolvedParameter*, at::Tensor>> parameters_;
  std::map<std::string, std::vector<std::size_t>> parameters_of_;  // by module text; with an engine
  std::map<std::string, std::vector<const ResolvedBoundary*>> identities_;  // by module text
  ValidationCounts counts_;

  // Of the running forward and backward.
  bool in_root_ = false;
  std::map<int, int> crossings_;  // tape operator -> boundary
  struct RootOutput {
    int value;
    std::shared_ptr<bool> has_gradient;
  };
  std::vector<RootOutput> outputs_;
  int graph_task_ = -1;
};

}  // namespace hypershard::plan::internal
