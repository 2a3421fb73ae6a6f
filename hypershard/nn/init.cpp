// Fills by counter-based random numbers.
#include "hypershard/nn/init.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include "hypershard/core/error.h"
#include "hypershard/core/random.h"

namespace hypershard::nn {
namespace {

constexpr std::int64_t kGrain = 1 << 14;

template <class T>
void fill_span(
    std::span<T> values,
    const Init& init,
    std::uint64_t seed,
    std::uint64_t stream,
    std::uint64_t begin
) {
  switch (init.kind) {
    case InitKind::kNormal:
      return fill_normal(values, seed, stream, begin, init.mean, init.std);
    case InitKind::kTruncNormal:
      return fill_trunc_normal(
          values,
          seed,
          stream,
          begin,
          {.mean = init.mean, .stddev = init.std, .low = init.low, .high = init.high}
      );
    case InitKind::kUniform:
      return fill_uniform(values, seed, stream, begin, init.low, init.high);
    case InitKind::kConstant:
      HS_FAIL(InternalError, "nn.init: a constant is no random fill");
  }
}

template <class T>
void fill_tensor(
    const at::Tensor& out,
    const Init& init,
    std::uint64_t seed,
    std::uint64_t stream,
    std::int64_t begin
) {
  T* data = out.mutable_data_ptr<T>();
  at::parallel_for(0, out.numel(), kGrain, [&](std::int64_t first, std::int64_t last) {
    const std::span<T> values(data + first, static_cast<std::size_t>(last - first));
    fill_span(values, init, seed, stream, static_cast<std::uint64_t>(begin + first));
  });
}

}  // namespace

void fill_range(
    at::Tensor flat_out,
    const Init& init,
    std::uint64_t seed,
    std::string_view logical_name,
    std::int64_t begin
) {
  HS_CHECK(
      flat_out.defined() && flat_out.dim() == 1 && flat_out.is_contiguous() &&
          flat_out.is_floating_point(),
      "nn.init: '",
      logical_name,
      "' needs a contiguous floating point tensor of one dimension to fill"
  );
  HS_CHECK_GE(begin, 0, "nn.init: '", logical_name, "' begins at a negative element");
  const at::NoGradGuard no_grad;
  if (init.kind == InitKind::kConstant) {
    flat_out.fill_(init.mean);
    return;
  }
  const bool is_double = flat_out.scalar_type() == at::kDouble;
  const auto drawn_dtype = is_double ? at::kDouble : at::kFloat;
  const bool in_place = flat_out.device().is_cpu() && flat_out.scalar_type() == drawn_dtype;
  const auto drawn =
      in_place ? flat_out : at::empty({flat_out.numel()}, at::TensorOptions().dtype(drawn_dtype));
  const std::uint64_t stream = stream_of(logical_name);
  if (is_double) {
    fill_tensor<double>(drawn, init, seed, stream, begin);
  } else {
    fill_tensor<float>(drawn, init, seed, stream, begin);
  }
  if (!in_place) {
    flat_out.copy_(drawn);
  }
}

void initialize_module(torch::nn::Module& module, const InitFn& init, std::uint64_t seed) {
  const at::NoGradGuard no_grad;
  for (auto& item : module.named_parameters()) {
    at::Tensor& parameter = item.value();
    HS_CHECK(
        !parameter.is_meta() && parameter.is_contiguous(),
        "nn.init: parameter '",
        item.key(),
        "' ",
        parameter.is_meta() ? "is on the meta device" : "is not contiguous",
        HS_HINT("materialise it first, e.g. by fully_shard() or Module::to_empty")
    );
    fill_range(parameter.view({-1}), init(item.key(), parameter.sizes()), seed, item.key(), 0);
  }
}

}  // namespace hypershard::nn
