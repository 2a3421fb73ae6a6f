// What a verdict costs: validation pays it once an operator.
#include <vector>

#include <benchmark/benchmark.h>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "hypershard/dtensor/op_rules.h"

namespace hypershard::dtensor {
namespace {

using layout::Placement;
using layout::TensorSpec;
using Sizes = std::vector<std::int64_t>;

void judge(
    benchmark::State& state,
    const char* name,
    const char* overload,
    std::vector<c10::IValue> stack,
    const std::vector<TensorSpec>& specs
) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  for (std::size_t i = stack.size(); i < op.schema().arguments().size(); ++i) {
    stack.push_back(op.schema().arguments()[i].default_value().value_or(c10::IValue()));
  }
  const layout::DeviceMesh mesh({{"dp", 2}, {"tp", 2}}, layout::Topology::single_supernode(4));
  for (auto _ : state) {
    Verdict verdict = propagate({op, stack, specs}, mesh);
    if (verdict.refusal) {
      state.SkipWithError(verdict.refusal->what.c_str());
      break;
    }
    benchmark::DoNotOptimize(verdict);
  }
}

const Placement kShard0 = Placement::shard(0);

void BM_Linear(benchmark::State& state) {
  const std::vector<TensorSpec> specs = {
      {{8, 16, 32}, {{kShard0, Placement::replicate()}}},
      {{64, 32}, {{Placement::replicate(), kShard0}}},
      {{64}, {{Placement::replicate(), kShard0}}}
  };
  const at::Tensor x = at::empty({4, 16, 32});
  judge(state, "aten::linear", "", {x, at::empty({32, 32}), at::empty({32})}, specs);
}
BENCHMARK(BM_Linear);

void BM_Add(benchmark::State& state) {
  const TensorSpec spec = {{8, 16, 32}, {{kShard0, Placement::replicate()}}};
  const at::Tensor x = at::empty({4, 16, 32});
  judge(state, "aten::add", "Tensor", {x, x}, {spec, spec});
}
BENCHMARK(BM_Add);

void BM_View(benchmark::State& state) {
  const TensorSpec spec = {{8, 16, 32}, {{kShard0, Placement::shard(2)}}};
  judge(state, "aten::view", "", {at::empty({4, 16, 16}), Sizes{4, 16, -1, 8}}, {spec});
}
BENCHMARK(BM_View);

}  // namespace
}  // namespace hypershard::dtensor
