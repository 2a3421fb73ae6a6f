// See tape.h.
#include "hypershard/plan/tape.h"

#include <utility>

namespace hypershard::plan {

int Tape::add_given(layout::TensorSpec spec, bool differentiable, std::string name) {
  values_.push_back({std::move(spec), -1, differentiable, std::move(name)});
  return static_cast<int>(values_.size()) - 1;
}

int Tape::add_operator(TapeOperator op, std::vector<TapeValue> outputs) {
  const auto index = static_cast<int>(ops_.size());
  for (TapeValue& output : outputs) {
    output.producer = index;
    op.outputs.push_back(static_cast<int>(values_.size()));
    values_.push_back(std::move(output));
  }
  ops_.push_back(std::move(op));
  return index;
}

void Tape::clear() {
  values_.clear();
  ops_.clear();
}

}  // namespace hypershard::plan
