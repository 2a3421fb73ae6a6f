// A small transformer whose parameters are cut over an axis `tp` by hand, and its unsharded oracle,
// for the tests of the engine and of checkpoints on meshes with plan axes. Tests only.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/pimpl.h>

#include "hypershard/comm/world.h"
#include "hypershard/dtensor/redistribute.h"
#include "hypershard/layout/block.h"
#include "hypershard/nn/hooks.h"
#include "hypershard/nn/recompute.h"
#include "hypershard/shard/fully_shard.h"
#include "hypershard/shard/test_models.h"

namespace hypershard::shard::test {

/// How activations lie along `tp`; no mesh: nothing is cut.
struct TensorParallel {
  std::shared_ptr<const comm::ProcessMesh> mesh;
  bool sequence = false;  ///< positions are cut between the layers, so norms see a part of them

  bool is_on() const { return mesh != nullptr; }
  int size() const { return is_on() ? mesh->mesh().axis_size("tp") : 1; }
  int coordinate() const { return is_on() ? mesh->mesh().coordinate(mesh->rank(), "tp") : 0; }
  layout::Layout layout(layout::Placement placement) const {
    layout::Layout layout = layout::replicated_layout(mesh->mesh());
    layout.placements[static_cast<std::size_t>(mesh->mesh().axis_index("tp"))] = placement;
    return layout;
  }
  at::Tensor move(
      const at::Tensor& x,
      std::vector<std::int64_t> shape,
      layout::Placement from,
      layout::Placement to,
      std::optional<layout::Placement> gradient = {}
  ) const {
    dtensor::GradientLayouts gradients;
    if (gradient) {
      gradients.output = layout(*gradient);
    }
    return dtensor::redistribute(x, {std::move(shape), layout(from)}, layout(to), mesh, gradients);
  }
  layout::Placement between() const {
    return sequence ? layout::Placement::shard(1) : layout::Placement::replicate();
  }
  /// Activations [rows, positions, dim] before column-parallel weights: whole, and their gradient
  /// is a sum of terms.
  at::Tensor enter(const at::Tensor& x) const {
    if (!is_on()) {
      return x;
    }
    const std::int64_t positions = x.size(1) * (sequence ? size() : 1);
    return move(
        x,
        {x.size(0), positions, x.size(2)},
        between(),
        layout::Placement::replicate(),
        layout::Placement::partial()
    );
  }
  /// Terms after row-parallel weights: summed.
  at::Tensor leave(const at::Tensor& x) const {
    return is_on() ? move(x, x.sizes().vec(), layout::Placement::partial(), between()) : x;
  }
  at::Tensor sum(const at::Tensor& x) const {
    return is_on() ? move(
                         x,
                         x.sizes().vec(),
                         layout::Placement::partial(),
                         layout::Placement::replicate()
                     )
                   : x;
  }
};

struct TpSizes {
  std::int64_t vocab = 9;  // uneven on two and four ranks
  std::int64_t dim = 8;
  std::int64_t heads = 4;
  std::int64_t hidden = 7;
  std::int64_t positions = 4;
  int num_blocks = 2;
  bool recompute = false;
  at::ScalarType dtype = at::kDouble;
};

inline at::Tensor unit_length(const at::Tensor& x) {
  return x * at::rsqrt(x.pow(2).mean(-1, true) + 1e-3);
}

struct TpBlockImpl : nn::Hookable<TpBlockImpl, at::Tensor(at::Tensor), torch::nn::Module> {
  TpBlockImpl(const TpSizes& sizes, TensorParallel how) : tp(std::move(how)) {
    const auto options = at::TensorOptions().dtype(sizes.dtype);
    head_dim = sizes.dim / sizes.heads;
    norm1 = register_parameter("norm1", at::ones({sizes.dim}, options));
    qkv = register_parameter("qkv", at::zeros({3, sizes.dim, sizes.dim}, options));
    proj = register_parameter("proj", at::zeros({sizes.dim, sizes.dim}, options));
    norm2 = register_parameter("norm2", at::ones({sizes.dim}, options));
    up = register_parameter("up", at::zeros({sizes.hidden, sizes.dim}, options));
    up_bias = register_parameter("up_bias", at::zeros({sizes.hidden}, options));
    down = register_parameter("down", at::zeros({sizes.dim, sizes.hidden}, options));
    down_bias = register_parameter("down_bias", at::zeros({sizes.dim}, options));
  }
  at::Tensor attention(const at::Tensor& x) const {
    const auto heads = [&](int which) {
      return at::linear(x, qkv[which]).view({x.size(0), x.size(1), -1, head_dim}).transpose(1, 2);
    };
    const auto scores = at::matmul(heads(0), heads(1).transpose(-1, -2));
    const auto mixed = at::matmul(at::softmax(scores, -1), heads(2));
    return at::linear(mixed.transpose(1, 2).reshape({x.size(0), x.size(1), -1}), proj);
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    const at::Tensor h = x + tp.leave(attention(tp.enter(unit_length(x) * norm1)));
    const at::Tensor wide = at::tanh(at::linear(tp.enter(unit_length(h) * norm2), up, up_bias));
    return h + tp.leave(at::linear(wide, down)) + down_bias;
  }
  TensorParallel tp;
  std::int64_t head_dim = 0;
  at::Tensor norm1, qkv, proj, norm2, up, up_bias, down, down_bias;
};
TORCH_MODULE(TpBlock);

/// Tokens [rows, positions] to a loss; embedding and head are one tensor, cut by vocabulary.
struct TpNetImpl : nn::Hookable<TpNetImpl, at::Tensor(at::Tensor), torch::nn::Module> {
  explicit TpNetImpl(const TpSizes& given = {}, TensorParallel how = {})
      : sizes(given), tp(std::move(how)) {
    const auto options = at::TensorOptions().dtype(sizes.dtype);
    embed = register_parameter("embed", at::zeros({sizes.vocab, sizes.dim}, options));
    for (int i = 0; i < sizes.num_blocks; ++i) {
      blocks->push_back(TpBlock(sizes, tp));
    }
    register_module("blocks", blocks);
    norm = register_parameter("norm", at::ones({sizes.dim}, options));
    head = register_parameter("head", embed);
    fill_by_formula(*this);
    if (tp.is_on()) {
      cut_parameters();
    }
  }
  at::Tensor forward_impl(const at::Tensor& tokens) {
    const layout::Range rows = layout::cut_piece(sizes.vocab, tp.size(), tp.coordinate());
    const at::Tensor here = tokens.ge(rows.begin).logical_and(tokens.lt(rows.end));
    const at::Tensor found = at::embedding(embed, (tokens - rows.begin).clamp(0, rows.numel() - 1));
    at::Tensor h = tp.leave(found * here.unsqueeze(-1));
    for (std::size_t i = 0; i < blocks->size(); ++i) {
      auto* block = blocks[i]->as<TpBlockImpl>();
      h = sizes.recompute
              ? nn::recompute([block](const at::Tensor& x) { return block->forward(x); }, h)
              : block->forward(h);
    }
    const at::Tensor logits = at::linear(tp.enter(unit_length(h) * norm), head);
    const at::Tensor wave = logits.pow(2) + at::sin(logits * 3);
    return tp.sum(wave.sum(-1)).mean();
  }
  /// The layouts that cut_parameters uses, and the gradients that stay Partial.
  std::map<std::string, ParameterSpec> specs() const {
    std::map<std::string, ParameterSpec> result;
    for (const auto& item : named_parameters()) {
      const std::string& name = item.key();
      if (name == "head") {
        continue;
      }
      ParameterSpec spec;
      spec.spec = {global_shapes.at(name), tp.layout(placement_of(name))};
      const bool after_reduction = name.ends_with("norm1") || name.ends_with("norm2") ||
                                   name == "norm" || name.ends_with("down_bias");
      if (after_reduction && tp.sequence) {
        spec.reduce_axes = {"tp"};
      }
      result.emplace(name, std::move(spec));
    }
    return result;
  }
  static layout::Placement placement_of(const std::string& name) {
    using layout::Placement;
    if (name.ends_with("qkv")) {
      return Placement::shard(1);
    }
    if (name == "embed" || name.ends_with("up") || name.ends_with("up_bias")) {
      return Placement::shard(0);
    }
    return name.ends_with("proj") || name.ends_with("down") ? Placement::shard(1)
                                                            : Placement::replicate();
  }
  void cut_parameters() {
    const at::NoGradGuard no_grad;
    for (auto& item : named_parameters()) {
      if (item.key() == "head") {
        continue;  // the embedding
      }
      global_shapes[item.key()] = item.value().sizes().vec();
      const layout::TensorSpec spec{
          item.value().sizes().vec(), tp.layout(placement_of(item.key()))
      };
      const auto& mesh = tp.mesh->mesh();
      const layout::Block block =
          layout::local_block(spec, mesh, mesh.coordinates(tp.mesh->rank()));
      at::Tensor part = item.value().variable_data();
      for (std::size_t dim = 0; dim < block.ranges.size(); ++dim) {
        const layout::Range& range = block.ranges[dim];
        part = part.narrow(static_cast<std::int64_t>(dim), range.begin, range.numel());
      }
      item.value().set_data(part.clone(at::MemoryFormat::Contiguous));
    }
  }

  TpSizes sizes;
  TensorParallel tp;
  at::Tensor embed;
  torch::nn::ModuleList blocks;
  at::Tensor norm, head;
  std::map<std::string, std::vector<std::int64_t>> global_shapes;
};
TORCH_MODULE(TpNet);

/// Tokens of all data ranks: the same everywhere.
inline at::Tensor make_tokens(std::int64_t rows, const TpSizes& sizes, int step) {
  return at::arange(rows * sizes.positions, at::kLong)
      .mul(5)
      .add(3 * step)
      .remainder(sizes.vocab)
      .view({rows, sizes.positions});
}

/// A mesh with `tp` last: replicate, shard and tp of these sizes; 0 leaves an axis out.
struct TpMesh {
  int replicate = 0;
  int shard = 0;
  int tp = 2;

  int num_data() const { return (replicate > 0 ? replicate : 1) * (shard > 0 ? shard : 1); }
  int ranks() const { return num_data() * (tp > 0 ? tp : 1); }
  std::string text() const {
    return "r" + std::to_string(replicate) + "s" + std::to_string(shard) + "t" + std::to_string(tp);
  }
  std::shared_ptr<const comm::ProcessMesh> make(std::shared_ptr<comm::World> world) const {
    std::vector<layout::MeshAxis> axes;
    for (const auto& [name, size] :
         {std::pair{"replicate", replicate}, std::pair{"shard", shard}, std::pair{"tp", tp}}) {
      if (size > 0) {
        axes.push_back({name, size});
      }
    }
    layout::DeviceMesh mesh(std::move(axes), world->topology());
    return std::make_shared<const comm::ProcessMesh>(std::move(world), std::move(mesh));
  }
};

/// This data rank's rows: ranks that differ on `tp` alone see the same.
inline at::Tensor own_tokens(const at::Tensor& tokens, const comm::ProcessMesh& mesh) {
  int index = 0;
  int count = 1;
  for (const char* axis : {"replicate", "shard"}) {
    if (mesh.mesh().has_axis(axis)) {
      const int size = mesh.mesh().axis_size(axis);
      index = index * size + mesh.mesh().coordinate(mesh.rank(), axis);
      count *= size;
    }
  }
  return rows_of(tokens, index, count);
}

}  // namespace hypershard::shard::test
