// A large plan, made on meta tensors for ranks that do not exist.
#include <memory>
#include <string>
#include <vector>

#include "cases.h"
#include <nlohmann/json.hpp>

#include <ATen/ops/empty.h>

#include "hypershard/comm/fake/fake_world.h"
#include "hypershard/model/gpt.h"
#include "hypershard/model/gpt_plan.h"
#include "hypershard/plan/apply.h"

namespace hypershard::bench {
namespace {

using Json = nlohmann::ordered_json;

model::GptConfig large_config() {
  return {
      .vocab_size = 128256,
      .num_layers = 80,
      .dim = 8192,
      .num_heads = 64,
      .num_kv_heads = 8,
      .hidden_dim = 28672,
      .max_sequence = 4096
  };
}

layout::DeviceMesh large_mesh() {
  std::vector<std::string> hosts;
  for (int rank = 0; rank < 1024; ++rank) {
    hosts.push_back(std::to_string(rank / 8));
  }
  return layout::DeviceMesh(
      {{"replicate", 4}, {"outer", 4}, {"shard", 8}, {"tp", 8}},
      layout::Topology::from_labels(hosts)
  );
}

}  // namespace

std::string measure_resolve(int repeats) {
  using layout::Placement;
  const layout::DeviceMesh mesh = large_mesh();
  const auto world = comm::make_fake_world(/*rank=*/5, mesh.topology());
  const auto ranks = std::make_shared<const comm::ProcessMesh>(world, mesh);
  const auto plan =
      model::gpt_plan(large_config(), mesh, {.tensor = true, .sequence = true, .vocabulary = true});
  std::vector<double> resolving, applying;
  std::size_t boundaries = 0;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    model::Gpt model(
        large_config(), model::GptOptions{.device = at::kMeta, .dtype = at::kBFloat16}
    );
    const layout::Layout batch{
        {Placement::shard(0), Placement::shard(0), Placement::shard(0), Placement::replicate()}
    };
    const auto make = [&] {
      return at::empty({1, 4096}, at::TensorOptions().dtype(at::kLong).device(at::kMeta));
    };
    const at::Tensor tokens = make();
    const at::Tensor targets = make();
    plan::ResolvedPlan resolved;
    resolving.push_back(seconds_of([&] {
      resolved = plan::resolve(
          *model,
          plan,
          mesh,
          world->rank(),
          {{tokens, plan::even_spec(tokens, batch, mesh), "tokens"},
           {targets, plan::even_spec(targets, batch, mesh), "targets"}},
          [&] { return std::vector<at::Tensor>{model->loss(tokens, targets)}; },
          {.data_axes = {"replicate", "outer", "shard"}}
      );
    }));
    boundaries = resolved.boundaries.size();
    applying.push_back(seconds_of([&] {
      const auto applied = plan::apply_plan(*model, std::move(resolved), ranks);
    }));
  }
  return Json{
      {"layers", 80},
      {"ranks", mesh.size()},
      {"boundaries", boundaries},
      {"resolve_s", summary(resolving, 1)},
      {"apply_s", summary(applying, 1)}
  }.dump();
}

}  // namespace hypershard::bench
