// Small models with formula-defined weights, and their unsharded oracle, for the tests of the
// engine.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "hypershard/comm/world.h"
#include "hypershard/nn/hooks.h"
#include "hypershard/nn/recompute.h"
#include "hypershard/shard/fully_shard.h"
#include "hypershard/testing/run_ranks.h"

namespace hypershard::shard::test {

/// Values that depend on the name's length and the index only, around zero, all different.
inline void fill_by_formula(torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  double phase = 0.1;
  for (auto& item : module.named_parameters()) {
    at::Tensor values =
        at::arange(item.value().numel(), at::kDouble).mul(0.7).add(phase).sin().mul(0.3);
    item.value().copy_(values.view_as(item.value()));
    phase += 1.3;
  }
}

/// x + b(tanh(a(x))): two linears with bias.
struct BlockImpl : nn::Hookable<BlockImpl, at::Tensor(at::Tensor), torch::nn::Module> {
  BlockImpl(std::int64_t dim, std::int64_t hidden) : a(dim, hidden), b(hidden, dim) {
    register_module("a", a);
    register_module("b", b);
  }
  at::Tensor forward_impl(const at::Tensor& x) { return x + b->forward(at::tanh(a->forward(x))); }
  torch::nn::Linear a;
  torch::nn::Linear b;
};
TORCH_MODULE(Block);

/// Makes modules of one kind, the lowest in memory at another place for every `shift` below
/// `count`: whatever follows addresses comes in another order on every rank that shifts by its
/// number.
template <class Make>
auto make_scattered(int count, int shift, const Make& make) {
  std::vector<decltype(make())> made;
  for (int i = 0; i < count; ++i) {
    made.push_back(make());
  }
  const auto address_of = [](const auto& module) {
    return module->parameters().front().unsafeGetTensorImpl();
  };
  std::sort(made.begin(), made.end(), [&](const auto& a, const auto& b) {
    return std::less<>()(address_of(a), address_of(b));
  });
  if (count > 0) {
    std::rotate(made.begin(), made.begin() + shift % count, made.end());
  }
  return made;
}

struct NetOptions {
  std::int64_t inputs = 5;
  std::int64_t dim = 6;
  std::int64_t hidden = 7;
  std::int64_t outputs = 3;
  int num_blocks = 3;
  bool recompute = false;
  int memory_shift = 0;  ///< of the blocks; see make_scattered
};

/// Linear, blocks, linear.
struct NetImpl : nn::Hookable<NetImpl, at::Tensor(at::Tensor), torch::nn::Module> {
  explicit NetImpl(const NetOptions& shape = {})
      : options(shape), in(shape.inputs, shape.dim), out(shape.dim, shape.outputs) {
    register_module("in", in);
    const auto make_block = [&shape] { return Block(shape.dim, shape.hidden); };
    for (Block& block : make_scattered(shape.num_blocks, shape.memory_shift, make_block)) {
      blocks->push_back(block);
    }
    register_module("blocks", blocks);
    register_module("out", out);
    to(at::kDouble);
    fill_by_formula(*this);
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    at::Tensor h = in->forward(x);
    for (std::size_t i = 0; i < blocks->size(); ++i) {
      if (skip_block == static_cast<int>(i)) {
        continue;
      }
      auto* block = blocks[i]->as<BlockImpl>();
      h = options.recompute
              ? nn::recompute([block](const at::Tensor& y) { return block->forward(y); }, h)
              : block->forward(h);
    }
    return out->forward(h);
  }
  NetOptions options;
  using torch::nn::Module::to;
  torch::nn::Linear in;
  torch::nn::ModuleList blocks;
  torch::nn::Linear out;
  int skip_block = -1;
};
TORCH_MODULE(Net);

/// Units of all kinds: blocks of three sizes, of which blocks.1 runs twice, blocks.2 is frozen, and
/// blocks.0 and blocks.3 share a layer.
struct OddNetImpl : nn::Hookable<OddNetImpl, at::Tensor(at::Tensor), torch::nn::Module> {
  OddNetImpl() : in(5, 6), out(6, 3) {
    register_module("in", in);
    for (const std::int64_t hidden : {7, 3, 11, 7}) {
      blocks->push_back(Block(6, hidden));
    }
    register_module("blocks", blocks);
    register_module("out", out);
    to(at::kDouble);
    fill_by_formula(*this);
    auto* last = blocks[3]->as<BlockImpl>();
    last->a = blocks[0]->as<BlockImpl>()->a;
    last->replace_module("a", last->a);
    for (at::Tensor& parameter : blocks[2]->parameters()) {
      parameter.requires_grad_(false);
    }
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    at::Tensor h = in->forward(x);
    for (const std::size_t block : {0, 1, 2, 1, 3}) {
      h = blocks[block]->as<BlockImpl>()->forward(h);
    }
    return out->forward(h);
  }
  using torch::nn::Module::to;
  torch::nn::Linear in;
  torch::nn::ModuleList blocks;
  torch::nn::Linear out;
};
TORCH_MODULE(OddNet);

/// Rows of the global batch: the same on all ranks.
inline at::Tensor make_inputs(
    std::int64_t rows, std::int64_t columns, int step, at::ScalarType dtype = at::kDouble
) {
  return at::arange(rows * columns, at::kDouble)
      .mul(0.37)
      .add(0.9 * step)
      .cos()
      .view({rows, columns})
      .to(dtype);
}
inline at::Tensor rows_of(const at::Tensor& batch, int rank, int num_ranks) {
  const std::int64_t rows = batch.size(0) / num_ranks;
  return batch.narrow(0, rank * rows, rows);
}
/// A loss with mean over rows, so that the mean over ranks of equal parts is the whole's.
inline at::Tensor loss_of(const at::Tensor& output) {
  return (output * output * output).sum(1).add(output.pow(2).sum(1)).mean();
}

/// A one- or two-axis mesh: {replicate, shard}; replicate 1 gives the single axis `shard`, unless
/// both axes are to be there.
inline comm::ProcessMesh make_mesh(
    std::shared_ptr<comm::World> world, int replicate = 1, bool has_both = false
) {
  const int size = world->size();
  std::vector<layout::MeshAxis> axes;
  if (replicate > 1 || has_both) {
    axes.push_back({"replicate", replicate});
  }
  axes.push_back({"shard", size / replicate});
  layout::DeviceMesh mesh(axes, world->topology());
  return comm::ProcessMesh(std::move(world), std::move(mesh));
}

/// Gradients of the unsharded model by logical name.
inline std::map<std::string, at::Tensor> reference_gradients(
    const std::function<at::Tensor()>& loss, torch::nn::Module& model
) {
  model.zero_grad();
  loss().backward();
  std::map<std::string, at::Tensor> gradients;
  for (const auto& item : model.named_parameters()) {
    const at::Tensor& grad = item.value().grad();
    gradients[item.key()] = grad.defined() ? grad.clone() : at::zeros_like(item.value());
  }
  return gradients;
}

/// The back ends on which every behaviour must hold: in shared memory an unshard moves nothing, so
/// the others keep it honest.
inline const std::vector<testing::RankBackend>& all_backends() {
  static const std::vector<testing::RankBackend> backends{
      testing::RankBackend::kLocal,
      testing::RankBackend::kGloo,
      testing::RankBackend::kDelayed,
      testing::RankBackend::kShm,
  };
  return backends;
}

inline FullyShardOptions block_units() {
  FullyShardOptions options;
  options.units = {"blocks.*"};
  return options;
}

/// The text of what `body` throws, empty if nothing.
inline std::string thrown_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

/// The largest absolute difference of two tensors; infinite if their shapes differ or one is not
/// finite, since a NaN would pass as no larger than the largest so far.
inline double largest_difference(const at::Tensor& found, const at::Tensor& expected) {
  if (found.sizes() != expected.sizes()) {
    return std::numeric_limits<double>::infinity();
  }
  if (expected.numel() == 0) {
    return 0;
  }
  const at::Tensor difference = found.to(at::kDouble) - expected.to(at::kDouble);
  const double largest = difference.abs().max().item<double>();
  return std::isfinite(largest) ? largest : std::numeric_limits<double>::infinity();
}

enum class Deviation {
  kAbsolute,
  kRelative,  ///< beside the largest element of what is expected
};

/// The largest deviation of any reduced gradient, infinite if one is missing or not finite.
inline double worst_gradient(
    const ShardedModel& sharded,
    const std::map<std::string, at::Tensor>& expected,
    Deviation deviation = Deviation::kAbsolute
) {
  double worst = 0;
  for (const auto& [name, gradient] : expected) {
    const at::Tensor found = sharded.full_gradient(name);
    if (!found.defined()) {
      return std::numeric_limits<double>::infinity();
    }
    const double difference = largest_difference(found, gradient);
    const bool is_relative = deviation == Deviation::kRelative && difference > 0;
    worst = std::max(
        worst, is_relative ? difference / gradient.abs().max().item<double>() : difference
    );
  }
  return worst;
}

/// By how much the gradients of two of a Net's blocks differ at least, beside the larger; 0 if one
/// is not finite.
inline double least_difference(const std::map<std::string, at::Tensor>& gradients, int num_blocks) {
  double least = std::numeric_limits<double>::infinity();
  for (const char* parameter : {".a.weight", ".a.bias", ".b.weight", ".b.bias"}) {
    for (int i = 0; i < num_blocks; ++i) {
      for (int j = 0; j < i; ++j) {
        const at::Tensor& x = gradients.at("blocks." + std::to_string(i) + parameter);
        const at::Tensor& y = gradients.at("blocks." + std::to_string(j) + parameter);
        const double size = std::max(x.norm().item<double>(), y.norm().item<double>());
        const double difference = (x - y).norm().item<double>() / size;
        least = std::min(least, std::isfinite(difference) ? difference : 0);
      }
    }
  }
  return least;
}

}  // namespace hypershard::shard::test
