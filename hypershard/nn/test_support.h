// For tests of layers and models: expected errors, exact comparison, numeric gradients, operator
// traces, gradient slots. Not installed; tests of nn and of what stands on it include it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include "hypershard/nn/gradient_slot.h"

namespace hypershard::nn::testing {

/// Returns the text of the `Type` that `action` throws, or says that it threw none.
template <class Type, class Action>
std::string thrown_text(const Action& action) {
  try {
    action();
  } catch (const Type& error) {
    return error.what();
  }
  return "(threw no such error)";
}

/// Expects a `Type` whose text contains `fragment`.
#define HS_EXPECT_THROWN(Type, statement, fragment)                                            \
  do {                                                                                         \
    const std::string text = ::hypershard::nn::testing::thrown_text<Type>([&] { statement; }); \
    EXPECT_NE(text.find(fragment), std::string::npos) << "thrown: " << text;                   \
  } while (false)

/// Equal in shape, dtype and every bit.
inline ::testing::AssertionResult same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) {
    return a.defined() == b.defined() ? ::testing::AssertionSuccess()
                                      : ::testing::AssertionFailure() << "one tensor is undefined";
  }
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) {
    return ::testing::AssertionFailure()
           << a.toString() << a.sizes() << " and " << b.toString() << b.sizes();
  }
  const auto x = a.detach().contiguous();
  const auto y = b.detach().contiguous();
  if (std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0) {
    return ::testing::AssertionSuccess();
  }
  const auto gap = (x.to(at::kDouble) - y.to(at::kDouble)).abs().flatten();
  return ::testing::AssertionFailure() << "largest difference " << gap.max().item<double>()
                                       << " at element " << gap.argmax().item<std::int64_t>();
}

/// |a - b| <= tolerance * max(1, |b|) everywhere; says where it fails worst.
inline ::testing::AssertionResult near(const at::Tensor& a, const at::Tensor& b, double tolerance) {
  if (!a.defined() || !b.defined() || a.sizes() != b.sizes()) {
    return ::testing::AssertionFailure() << "shapes differ or a tensor is undefined";
  }
  const auto x = a.detach().to(at::kDouble).flatten();
  const auto y = b.detach().to(at::kDouble).flatten();
  if (x.numel() == 0) {
    return ::testing::AssertionSuccess();
  }
  const auto excess = (x - y).abs() / y.abs().clamp_min(1.0);
  const double worst = excess.max().item<double>();
  if (worst <= tolerance) {
    return ::testing::AssertionSuccess();
  }
  const auto at = excess.argmax().item<std::int64_t>();
  return ::testing::AssertionFailure()
         << "element " << at << ": " << x[at].item<double>() << " and " << y[at].item<double>()
         << ", " << worst / tolerance << " of the tolerance";
}

inline at::Tensor random_tensor(at::IntArrayRef sizes, at::ScalarType dtype, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(sizes, generator, at::TensorOptions().dtype(at::kDouble)).to(dtype);
}

using Function = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

/// Compares autograd's gradients of sum(fn(inputs) * fixed weights) with central differences, in
/// fp64.
inline void check_gradients(
    const Function& fn, std::vector<at::Tensor> inputs, double tolerance = 1e-7
) {
  const auto weights = random_tensor(fn(inputs).sizes(), at::kDouble, 991);
  const auto value = [&] { return (fn(inputs) * weights).sum(); };
  for (auto& input : inputs) {
    input.mutable_grad() = at::Tensor();
  }
  value().backward();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].requires_grad()) {
      continue;
    }
    const at::NoGradGuard no_grad;
    const auto numeric = at::zeros_like(inputs[i]);
    auto flat = inputs[i].detach().view({-1});
    for (std::int64_t k = 0; k < flat.numel(); ++k) {
      constexpr double kStep = 1e-5;
      const double middle = flat[k].item<double>();
      flat[k] = middle + kStep;
      const double above = value().item<double>();
      flat[k] = middle - kStep;
      const double below = value().item<double>();
      flat[k] = middle;
      numeric.view({-1})[k] = (above - below) / (2 * kStep);
    }
    EXPECT_TRUE(near(inputs[i].grad(), numeric, tolerance)) << "gradient of input " << i;
  }
}

/// Names of all operators that this thread runs while it lives, nested ones included.
class OperatorTrace {
 public:
  OperatorTrace() {
    current() = &names_;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(
                                             [](const at::RecordFunction& fn
                                             ) -> std::unique_ptr<at::ObserverContext> {
                                               if (current() != nullptr) {
                                                 current()->push_back(fn.name());
                                               }
                                               return nullptr;
                                             }
    ).scopes({at::RecordScope::FUNCTION}));
  }
  OperatorTrace(const OperatorTrace&) = delete;
  OperatorTrace& operator=(const OperatorTrace&) = delete;
  ~OperatorTrace() {
    at::removeCallback(handle_);
    current() = nullptr;
  }

  std::int64_t count(const std::string& name) const {
    return std::count(names_.begin(), names_.end(), name);
  }
  /// Copies, clones, cats and casts.
  std::int64_t count_movements() const {
    return count("aten::copy_") + count("aten::clone") + count("aten::cat") +
           count("aten::_to_copy");
  }
  const std::vector<std::string>& names() const { return names_; }

 private:
  static std::vector<std::string>*& current() {
    static thread_local std::vector<std::string>* names = nullptr;
    return names;
  }

  std::vector<std::string> names_;
  at::CallbackHandle handle_ = 0;
};

/// A slot over a buffer full of NaN, so that an unwritten element shows.
class BufferSlot : public GradientSlot {
 public:
  BufferSlot(const at::Tensor& param, at::ScalarType dtype)
      : buffer(at::full_like(
            param, std::numeric_limits<double>::quiet_NaN(), at::TensorOptions().dtype(dtype)
        )) {
    buffer = buffer.detach();
  }
  Claim claim() override { return {buffer, claims++ == 0}; }

  at::Tensor buffer;
  int claims = 0;
};

inline std::shared_ptr<BufferSlot> attach_slot(const at::Tensor& param, at::ScalarType dtype) {
  auto slot = std::make_shared<BufferSlot>(param, dtype);
  set_gradient_slot(param, slot);
  return slot;
}

}  // namespace hypershard::nn::testing
