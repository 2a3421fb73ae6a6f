// Layout-independent initialisation: an element's first value depends on seed, logical name and
// logical index, never on which rank asks or how the parameter is cut.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}

namespace hypershard::nn {

/// Distributions that a parameter can start from.
enum class InitKind { kConstant, kNormal, kTruncNormal, kUniform };

/// How a parameter starts. Fields that the kind does not name are ignored.
struct Init {
  InitKind kind = InitKind::kConstant;
  double mean = 0;  ///< constant: the value; normal, trunc_normal: the mean before cutting
  double std = 1;   ///< normal, trunc_normal: the standard deviation before cutting
  double low = 0;   ///< trunc_normal, uniform: smallest value
  double high = 1;  ///< trunc_normal, uniform: largest value

  static Init constant(double value) { return {.kind = InitKind::kConstant, .mean = value}; }
  static Init normal(double mean, double std) {
    return {.kind = InitKind::kNormal, .mean = mean, .std = std};
  }
  static Init trunc_normal(double mean, double std, double low, double high) {
    return {.kind = InitKind::kTruncNormal, .mean = mean, .std = std, .low = low, .high = high};
  }
  static Init uniform(double low, double high) {
    return {.kind = InitKind::kUniform, .low = low, .high = high};
  }
};

/// Gives the Init of a parameter from its logical name and its logical (global) shape.
using InitFn = std::function<Init(std::string_view logical_name, at::IntArrayRef logical_shape)>;

/// Fills `flat_out` with elements [begin, begin + n) of the parameter's logical row-major order, n
/// = flat_out.numel().
///
/// A pure function of its arguments: fills of the pieces of any cut give the bits of one fill of
/// the whole. Numbers are drawn from the random stream of the name, in fp32 (fp64 for fp64), then
/// rounded to the tensor's dtype. Shapes: flat_out [n], contiguous, any floating point dtype, on
/// any device. Threads: may be called concurrently; large fills use libtorch's threads. Errors:
/// InvalidArgument if flat_out is not as above or a field of `init` is out of range.
void fill_range(
    at::Tensor flat_out,
    const Init& init,
    std::uint64_t seed,
    std::string_view logical_name,
    std::int64_t begin
);

/// Fills every parameter of an unsharded module, named as by named_parameters().
///
/// Errors: InvalidArgument if a parameter is on the meta device or not contiguous (names it).
void initialize_module(torch::nn::Module& module, const InitFn& init, std::uint64_t seed);

}  // namespace hypershard::nn
