// Carries layouts along a running program: sees each operator above autograd, looks up what its
// tensors are, asks the rules, and writes down what comes out. The program and its tensors stay
// plain.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "hypershard/dtensor/op_rules.h"
#include "hypershard/layout/mesh.h"
#include "hypershard/layout/tensor_spec.h"
#include "hypershard/nn/watched_operators.h"
#include "hypershard/plan/layout_error.h"
#include "hypershard/plan/layout_table.h"
#include "hypershard/plan/tape.h"

namespace torch::nn {
class Module;
}

namespace hypershard::plan {

/// A forward operator as an observer sees it. Refers to the tracker's data for the call only.
struct SeenOperator {
  const c10::OperatorHandle& op;
  const std::string& name;  ///< with overload, `aten::add.Tensor`
  c10::ArrayRef<c10::IValue> arguments;
  c10::ArrayRef<at::Tensor> operands;       ///< defined tensors of the arguments, lists flattened
  c10::ArrayRef<layout::TensorSpec> specs;  ///< of the operands
  const dtensor::Verdict& verdict;
};

/// What happens while a tracker runs. An exception leaves the program where it stands.
class TrackerObserver {
 public:
  virtual ~TrackerObserver() = default;
  /// A rule refused, or a result is not what the rule said. The default throws LayoutError; if it
  /// returns, the operator runs and its results get the layouts of operands of their shape.
  virtual void on_fault(const LayoutFault& fault);
  virtual void before_operator(const SeenOperator& /*seen*/) {}
  virtual void after_operator(
      const SeenOperator& /*seen*/, c10::ArrayRef<at::Tensor> /*results*/
  ) {}
  /// An operator of a backward (or of a recomputed segment) is about to run; layouts are not known
  /// there. `origin` is the module whose forward made the node that runs. See NOTE [empty pieces]
  /// for `is_comparable`.
  virtual void before_backward_operator(
      const std::string& /*name*/,
      c10::ArrayRef<at::Tensor> /*operands*/,
      const std::string& /*origin*/,
      bool /*is_comparable*/
  ) {}
  /// A tensor that nobody gave a layout was taken as Replicate.
  virtual void on_assumed(const at::Tensor& /*tensor*/, const std::string& /*used_by*/) {}
  virtual void enter_module(const std::string& /*path*/, c10::ArrayRef<at::Tensor> /*inputs*/) {}
  virtual void leave_module(const std::string& /*path*/, c10::ArrayRef<at::Tensor> /*outputs*/) {}
};

/// Side table, module path and tape of one rank's program.
///
/// Tensors without a known layout count as Replicate, with their local shape as the global one.
/// Only forward operators are checked, inside modules or with grad mode (an optimizer's arithmetic
/// on parameters is nobody's layout); those of a backward have no layouts of their own (see NOTE
/// [gradient law]).
///
/// NOTE [empty pieces]: libtorch multiplies and slices empty tensors in other ways than full ones,
/// so where a dimension is cut into more pieces than it has entries, ranks run other operators in
/// backward. These are not comparable between ranks, nor are those that a boundary runs, whose
/// steps are the ranks' own.
///
/// Threads: the one that it tracks.
class LayoutTracker {
 public:
  /// `mesh` must outlive the tracker; `observer` too.
  LayoutTracker(const layout::DeviceMesh& mesh, int rank, TrackerObserver& observer);

  const layout::DeviceMesh& mesh() const { return mesh_; }
  int rank() const { return rank_; }

  /// Says how a tensor lies; replaces what was known. `name` is for messages.
  /// Errors: LayoutError if the tensor's shape is not this rank's part.
  void set_spec(const at::Tensor& tensor, layout::TensorSpec spec, const std::string& name);
  /// Returns what is known of a tensor.
  std::optional<layout::TensorSpec> spec_of(const at::Tensor& tensor);
  /// Tells whether nobody gave this tensor a layout, nor one that it was computed from: then what
  /// is known of it is a guess.
  bool is_assumed(const at::Tensor& tensor);
  /// Returns the spec of a tensor; one without becomes Replicate.
  layout::TensorSpec spec_or_assume(const at::Tensor& tensor, const std::string& used_by);
  /// Tells whether a tensor is fresh memory that no operator wrote to: it holds anything.
  bool is_unwritten(const at::Tensor& tensor);
  std::size_t table_size() const { return table_.size(); }

  /// Starts a new tape and sweeps the table.
  void begin_forward();
  const Tape& tape() const { return tape_; }
  /// Returns the tape's value for a tensor as it is now, new if it has none.
  int value_of(const at::Tensor& tensor, const std::string& used_by);
  /// Records that `result` came from `source` through a boundary. `result` gets `spec`.
  void record_boundary(
      const at::Tensor& source, const at::Tensor& result, layout::TensorSpec spec, TapeOperator op
  );

  /// Module path, innermost last.
  void enter_module(const std::string& path, c10::ArrayRef<at::Tensor> inputs);
  void leave_module(c10::ArrayRef<at::Tensor> outputs);
  void abandon_module() noexcept;
  const std::string& module() const { return paths_[static_cast<std::size_t>(current_module())]; }
  int current_module() const { return stack_.empty() ? 0 : stack_.back(); }
  const std::string& module_path(int index) const {
    return paths_[static_cast<std::size_t>(index)];
  }
  std::size_t module_depth() const { return stack_.size(); }
  /// Returns the innermost module that an exception left last, or `(root)`.
  const std::string& failed_module() const {
    return paths_[static_cast<std::size_t>(failed_module_)];
  }

  /// Runs one operator: the body of the mode key's fallback.
  void run(const c10::OperatorHandle& op, std::vector<c10::IValue>* stack);

 private:
  struct Call;
  struct OriginMark {
    std::uint64_t end = 0;  // sequence number after the operator's own nodes
    int module = 0;
    bool is_comparable = true;  // see NOTE [empty pieces]
  };

  int module_index(const std::string& path);
  void add_origin(bool is_comparable);
  OriginMark backward_origin() const;
  bool has_empty_pieces(const Call& call) const;
  TableEntry& entry_of(const at::Tensor& tensor, const std::string& used_by);
  void refresh_value(const at::Tensor& tensor, TableEntry& entry);
  void gather_operands(Call& call);
  void check_written(const Call& call);
  bool is_view_of_unwritten(const Call& call, const at::Tensor& result);
  void check_results(const Call& call, c10::ArrayRef<at::Tensor> results);
  void record_results(Call& call, c10::ArrayRef<at::Tensor> results, bool is_refused);
  std::vector<layout::TensorSpec> guess(const Call& call, c10::ArrayRef<at::Tensor> results) const;
  LayoutFault fault_of(const Call& call, std::string what, std::string fix) const;
  void run_forward(const c10::OperatorHandle& op, std::vector<c10::IValue>* stack);
  void run_backward(const c10::OperatorHandle& op, std::vector<c10::IValue>* stack);

  const layout::DeviceMesh& mesh_;
  int rank_;
  TrackerObserver& observer_;
  LayoutTable table_;
  Tape tape_;
  std::uint64_t epoch_ = 1;
  struct Write {
    int value;
    std::int64_t version;
  };
  std::unordered_map<const void*, Write> last_write_;  // by storage, of this epoch
  std::vector<std::string> paths_{"(root)"};
  std::unordered_map<std::string, int> path_index_{{"(root)", 0}};
  std::vector<int> stack_;
  int failed_module_ = 0;
  std::size_t failed_depth_ = 0;  // of the module that an exception is leaving; 0: none
  std::deque<OriginMark> origins_;
  bool has_empty_pieces_ = false;  // of this epoch's operators
};

/// Switches a tracker on for the calling thread while alive: operators, and the modules of `model`
/// that can be hooked. Backward on the same thread counts too.
///
/// One guard a thread at a time. Errors: InvalidArgument if the thread has a tracker already.
class TrackingGuard {
 public:
  TrackingGuard(LayoutTracker& tracker, torch::nn::Module& model);
  ~TrackingGuard();
  TrackingGuard(const TrackingGuard&) = delete;
  TrackingGuard& operator=(const TrackingGuard&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Returns the calling thread's tracker or null; costs a thread-local read.
LayoutTracker* current_tracker();

/// Keeps the calling thread's operators from the tracker while alive: for work that is not the
/// program's, such as a boundary's collectives.
using TrackingPause = nn::Unwatched;

}  // namespace hypershard::plan
