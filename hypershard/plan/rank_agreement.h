// Ranks that run one program must do the same thing, and hold the same values where the layouts say
// so. Each rank keeps a record of what it did; at meetings the records are compared.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include "hypershard/comm/communicator.h"
#include "hypershard/layout/mesh.h"
#include "hypershard/layout/tensor_spec.h"
#include "hypershard/plan/layout_error.h"

namespace hypershard::plan {

/// Something that all ranks must do alike.
struct AgreedEvent {
  std::string name;    ///< operator or place
  std::string module;  ///< where
  std::vector<layout::TensorSpec> specs = {};
  std::vector<c10::ScalarType> dtypes = {};  ///< of its operands
};

/// What values are expected to do along an axis.
enum class Along : std::uint8_t {
  kFree,   ///< nothing is expected
  kEqual,  ///< the same bits on all ranks of the axis
  kDiffer  ///< no two ranks of the axis alike
};

/// A hash of values that is compared between ranks.
struct AgreedValue {
  std::string what;    ///< names the tensor in the message
  std::string module;  ///< where
  std::uint64_t hash = 0;
  std::vector<Along> axes = {};  ///< by mesh axis
  std::string fix = {};
};

/// Returns a hash of a tensor's shape and bits; a meta tensor's of its shape.
std::uint64_t fingerprint(const at::Tensor& tensor);

/// The records of one rank and the meetings.
///
/// A meeting costs one gather of a few numbers; only where it shows a difference the records
/// themselves are exchanged, to name the first operator or value that differs. A rank that has to
/// refuse, or that fails, says so at its next meeting, so that all ranks leave with its message.
/// Threads: the communicator's.
class RankAgreement {
 public:
  /// `everyone` joins all ranks of `mesh`, in order. Both must outlive it.
  RankAgreement(std::shared_ptr<comm::Communicator> everyone, const layout::DeviceMesh& mesh);

  /// Notes what this rank does next.
  void add_event(AgreedEvent event);
  /// Notes a value to compare at the next meeting.
  void add_value(AgreedValue value);

  /// Compares what was added since the last meeting. Collective: all ranks.
  /// Errors: LayoutError on all ranks, naming the first difference and the ranks; PeerFailure if
  /// another rank told of one; CommError.
  void meet();
  /// Tells the other ranks of a fault and throws it. Collective: pairs with the others' meetings.
  [[noreturn]] void fail(const LayoutFault& fault);
  /// Tells the other ranks that this one cannot go on, with what it threw. Nothing if a fault or a
  /// failure was told before, or communication failed. Returns whether they know.
  /// Collective: pairs with the others' meetings. Errors: none; what fails is logged.
  bool tell_failure(ErrorCode code, const std::string& text) noexcept;

  std::int64_t num_meetings() const { return num_meetings_; }
  std::int64_t num_values() const { return num_values_; }
  /// Counts what waits for the next meeting.
  std::size_t num_pending() const { return events_.size() + values_.size(); }

 private:
  /// What a rank says instead of meeting.
  struct Farewell {
    std::string text = {};
    std::int64_t code = 0;  ///< 0: a fault of layouts, text and fix by line; else 1 + ErrorCode
  };
  std::vector<std::int64_t> header(const Farewell& farewell) const;
  void exchange(const Farewell& farewell);
  void hear_farewells(const at::Tensor& headers, const Farewell& own);
  bool values_differ(const at::Tensor& headers) const;
  void forget_records();
  std::string text_of_rank(int rank, const std::string& mine) const;
  void compare_events(const at::Tensor& headers);
  void compare_values();
  void check_value(std::size_t index, const at::Tensor& hashes);

  std::shared_ptr<comm::Communicator> everyone_;
  const layout::DeviceMesh& mesh_;
  std::vector<AgreedEvent> events_;
  std::vector<std::uint64_t> event_hashes_;
  std::vector<AgreedValue> values_;
  std::uint64_t event_hash_ = 0;
  std::vector<std::uint64_t> value_hashes_;  // by axis, of values that must be equal there
  std::int64_t num_differing_ = 0;           // values that must differ somewhere
  std::int64_t num_meetings_ = 0;
  std::int64_t num_values_ = 0;
  bool is_over_ = false;  // a fault was told, or an exchange failed: ranks are not in step
};

}  // namespace hypershard::plan
