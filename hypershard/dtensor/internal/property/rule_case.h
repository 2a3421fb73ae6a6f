// One operator's calls for the property test: how to make arguments, and what of them is a size.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "hypershard/dtensor/internal/property/simulated_mesh.h"

namespace hypershard::dtensor::property {

using Tensors = std::vector<at::Tensor>;
using Sizes = std::vector<std::int64_t>;

/// Where each of a rank's tensors begins in its whole, by dimension.
using Offsets = std::vector<Sizes>;

/// One argument: a constant, a tensor (whole, to be cut), a list of tensors, or what the model
/// would compute from its own tensors (sizes) or knows of their places.
struct Argument {
  Argument(c10::IValue constant) : value(std::move(constant)) {}      // NOLINT: implicit
  Argument(at::Tensor tensor) : value(std::move(tensor)) {}           // NOLINT: implicit
  Argument(Sizes list) : value(c10::IValue(std::move(list))) {}       // NOLINT: implicit
  Argument(const Tensors& list) : value(c10::IValue(list)) {}         // NOLINT: implicit
  Argument(std::int64_t number) : value(number) {}                    // NOLINT: implicit
  Argument(int number) : value(static_cast<std::int64_t>(number)) {}  // NOLINT: implicit
  Argument(double number) : value(number) {}                          // NOLINT: implicit
  Argument(bool flag) : value(flag) {}                                // NOLINT: implicit
  Argument(const char* text) : value(std::string(text)) {}            // NOLINT: implicit
  Argument(std::function<c10::IValue(const Tensors&)> made)           // NOLINT: implicit
      : from_tensors([made = std::move(made)](const Tensors& t, const Offsets&) { return made(t); }
        ) {}

  c10::IValue value;
  std::function<c10::IValue(const Tensors&, const Offsets&)> from_tensors;
  std::string name;  ///< for arguments out of order
};

inline Argument none() {
  return c10::IValue();
}
inline Argument named(std::string name, Argument argument) {
  argument.name = std::move(name);
  return argument;
}
/// Sizes as a rank computes them from its tensors `t`.
inline Argument sizes(std::function<Sizes(const Tensors&)> made) {
  return std::function<c10::IValue(const Tensors&)>([made = std::move(made)](const Tensors& t) {
    return c10::IValue(made(t));
  });
}

/// What a rank knows of its tensors `t` and of where they begin.
inline Argument placed(std::function<c10::IValue(const Tensors&, const Offsets&)> made) {
  Argument argument = none();
  argument.from_tensors = std::move(made);
  return argument;
}

/// Draws arguments. Sizes are small; some are 1, uneven or 0.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random(seed) {}

  std::int64_t size();
  /// A size that four ranks can halve twice.
  std::int64_t even() { return draw(random, 3) * 4 + 4; }
  /// A size whose pieces are longer than 1, so that sizes of views tell dimensions apart; or 1.
  std::int64_t long_size() { return chance(random, 0.2) ? 1 : 8 + draw(random, 5); }
  Sizes shape(int least_rank = 0, int most_rank = 3);
  /// `shape` with some entries made 1 and some leading ones dropped: broadcasts against it.
  Sizes beside(const Sizes& shape);
  std::int64_t number(std::int64_t bound) { return bound > 0 ? draw(random, bound) : 0; }
  std::int64_t dim(const Sizes& shape) { return number(static_cast<std::int64_t>(shape.size())); }
  bool flag() { return chance(random, 0.5); }

  at::Tensor real(const Sizes& shape, double least = -2.0, double most = 2.0);
  at::Tensor whole_numbers(const Sizes& shape, std::int64_t bound);
  at::Tensor flags(const Sizes& shape);

  Random random;
};

/// How results are compared.
enum class Compare {
  kValues,
  kShapes,  ///< values are random or undefined
};

using Arguments = std::vector<Argument>;

struct RuleCase {
  std::string op;  ///< `aten::sum.dim_IntList`
  std::function<Arguments(Draw&)> make;
  Compare compare = Compare::kValues;

  /// Without overload.
  std::string name() const { return op.substr(0, op.find('.')); }
};
using RuleCases = std::vector<RuleCase>;

void add_pointwise_cases(RuleCases& cases);
void add_reduction_cases(RuleCases& cases);
void add_view_cases(RuleCases& cases);
void add_contraction_cases(RuleCases& cases);
void add_index_cases(RuleCases& cases);
void add_network_cases(RuleCases& cases);
void add_image_cases(RuleCases& cases);
void add_loss_cases(RuleCases& cases);
void add_making_cases(RuleCases& cases);
void add_backward_cases(RuleCases& cases);
RuleCases all_rule_cases();

}  // namespace hypershard::dtensor::property
