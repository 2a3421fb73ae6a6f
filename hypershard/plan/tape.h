// What one forward did, as far as layouts go: which operator read and made which value.
// Integers and names only; the gradient layouts are derived from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "hypershard/layout/tensor_spec.h"

namespace hypershard::plan {

/// A tensor at one point of its life: writing to it in place makes a new value.
struct TapeValue {
  layout::TensorSpec spec = {};
  int producer = -1;            ///< operator of the tape; -1: given from outside
  bool differentiable = false;  ///< a gradient may flow into it
  std::string name = {};        ///< of given values: parameter or input; else empty
};

/// What an entry of the tape stands for.
enum class TapeKind : std::uint8_t {
  kOperator,
  kBoundary,  ///< a redistribution of one value; `boundary` says which
  kAlias,     ///< a tensor whose memory was written through another one: {old, written} -> new
};

/// One operator. Values are indices into the tape.
struct TapeOperator {
  TapeKind kind = TapeKind::kOperator;
  std::string name = {};  ///< `aten::add.Tensor`; of a boundary its site
  int module = 0;         ///< index of the module it ran in, by the tracker
  std::vector<int> operands = {};
  std::vector<int> outputs = {};
  int boundary = -1;                        ///< kBoundary: number given by who placed it
  std::vector<std::uint8_t> is_named = {};  ///< kBoundary: by mesh axis, whether the plan names it
};

/// A growing record. Plain data: copies are independent. Threads: not thread-safe.
class Tape {
 public:
  /// Adds a value from outside.
  int add_given(layout::TensorSpec spec, bool differentiable, std::string name = {});
  /// Adds an operator and one value for each of `outputs`; returns the operator's index.
  int add_operator(TapeOperator op, std::vector<TapeValue> outputs);
  /// Says that no gradient flows into a value after all.
  void set_constant(int value) { values_[static_cast<std::size_t>(value)].differentiable = false; }

  const TapeValue& value(int index) const { return values_.at(static_cast<std::size_t>(index)); }
  const TapeOperator& op(int index) const { return ops_.at(static_cast<std::size_t>(index)); }
  const std::vector<TapeValue>& values() const { return values_; }
  const std::vector<TapeOperator>& ops() const { return ops_; }
  /// Forgets everything.
  void clear();

 private:
  std::vector<TapeValue> values_;
  std::vector<TapeOperator> ops_;
};

}  // namespace hypershard::plan
