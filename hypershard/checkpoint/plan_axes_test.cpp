// Checkpoints of models that a plan cuts over an axis of its own: what is saved is the logical
// tensor, each element once, and any mesh loads it bit for bit.
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "hypershard/checkpoint/checkpoint.h"
#include "hypershard/checkpoint/internal/entry_index.h"
#include "hypershard/checkpoint/safetensors.h"
#include "hypershard/checkpoint/scratch_folder.h"
#include "hypershard/checkpoint/test_runs.h"
#include "hypershard/shard/test_tensor_parallel.h"
#include "hypershard/testing/tensor_matchers.h"

namespace hypershard::checkpoint {
namespace {

using layout::Strategy;
using shard::test::TpMesh;
using test::by_name;
using test::ScratchFolder;

struct TpSetup {
  TpMesh mesh;
  Strategy strategy = Strategy::kZero3;
  bool sequence = true;
};

std::string to_text(const TpSetup& setup) {
  return layout::to_text(setup.strategy) + " on " + setup.mesh.text();
}

struct TpRun {
  TpRun(std::shared_ptr<comm::World> world, const TpSetup& given, std::uint64_t seed)
      : setup(given), mesh(given.mesh.make(std::move(world))) {
    const bool has_tp = setup.mesh.tp > 0;
    model = shard::test::TpNet(
        shard::test::TpSizes{},
        has_tp ? shard::test::TensorParallel{mesh, setup.sequence} : shard::test::TensorParallel{}
    );
    shard::FullyShardOptions options;
    options.strategy = setup.strategy;
    options.units = {"blocks.*"};
    if (has_tp) {
      options.parameters = model->specs();
    }
    sharded = std::make_unique<shard::ShardedModel>(shard::fully_shard(*model, *mesh, options));
    sharded->initialize(
        [](std::string_view, at::IntArrayRef) { return nn::Init::uniform(-0.4, 0.5); }, seed
    );
    optimizer = std::make_unique<optim::AdamW>(*sharded, optim::AdamWOptions{.lr = 0.01});
  }
  std::vector<double> train(int first, int last) {
    std::vector<double> losses;
    for (int step = first; step < last; ++step) {
      optimizer->zero_grad();
      const at::Tensor loss =
          model->forward(shard::test::own_tokens(shard::test::make_tokens(8, {}, step), *mesh));
      losses.push_back(loss.item<double>());
      loss.backward();
      optimizer->step();
    }
    return losses;
  }
  void save_to(const std::string& folder, std::int64_t step) {
    save(folder, *sharded, optimizer.get(), {.step = step}, *mesh);
  }
  void load_from(const std::string& folder) { load(folder, *sharded, optimizer.get(), *mesh); }

  TpSetup setup;
  std::shared_ptr<const comm::ProcessMesh> mesh;
  shard::test::TpNet model{nullptr};
  std::unique_ptr<shard::ShardedModel> sharded;
  std::unique_ptr<optim::ShardedOptimizer> optimizer;
};

template <class Body>
void on_ranks(const TpSetup& setup, std::uint64_t seed, const Body& body) {
  testing::run_ranks(setup.mesh.ranks(), [&](std::shared_ptr<comm::World> world) {
    TpRun run(std::move(world), setup, seed);
    body(run);
  });
}

std::vector<TpSetup> all_setups() {
  return {
      {{.tp = 2}},
      {{.tp = 4}},
      {{.shard = 2, .tp = 0}},
      {{.shard = 1, .tp = 0}},
      {{.shard = 2, .tp = 2}},
      {{.shard = 3, .tp = 2}, Strategy::kZero1},
      {{.replicate = 2, .tp = 2}, Strategy::kDdp, false},
      {{.replicate = 2, .shard = 1, .tp = 2}, Strategy::kHsdp},
      {{.replicate = 1, .shard = 1, .tp = 4}, Strategy::kHierarchical, false},
  };
}

// From each mesh to the next, and around: the bits of every weight and state survive.
TEST(CheckpointPlanAxesTest, AnyMeshLoadsWhatAnyMeshSaved) {
  std::map<std::string, at::Tensor> weights;
  std::map<std::string, at::Tensor> state;
  const std::vector<TpSetup> setups = all_setups();
  const ScratchFolder first;
  on_ranks(setups.front(), 1, [&](TpRun& run) {
    run.train(0, 2);
    run.save_to(first.path(), 2);
  });
  weights = by_name(read_weights(first.path()));
  state = by_name(read_optimizer(first.path()));
  EXPECT_EQ(weights.at("blocks.0.qkv").sizes(), (std::vector<std::int64_t>{3, 8, 8}));
  EXPECT_EQ(state.size(), 2 * weights.size());
  std::string last = first.path();
  std::vector<std::unique_ptr<ScratchFolder>> folders;
  for (std::size_t i = 1; i <= setups.size(); ++i) {
    const TpSetup& setup = setups[i % setups.size()];
    SCOPED_TRACE(to_text(setup));
    folders.push_back(std::make_unique<ScratchFolder>());
    on_ranks(setup, 2, [&](TpRun& run) {
      run.load_from(last);
      for (const auto& [name, value] : weights) {
        EXPECT_TENSORS_EQUAL(run.sharded->full_parameter(name), value);
      }
      run.save_to(folders.back()->path(), 2);
    });
    last = folders.back()->path();
    const auto found_weights = by_name(read_weights(last));
    const auto found_state = by_name(read_optimizer(last));
    ASSERT_EQ(found_weights.size(), weights.size());
    ASSERT_EQ(found_state.size(), state.size());
    for (const auto& [name, value] : weights) {
      EXPECT_TENSORS_EQUAL(found_weights.at(name), value);
    }
    for (const auto& [name, value] : state) {
      EXPECT_TENSORS_EQUAL(found_state.at(name), value);
    }
  }
}

TEST(CheckpointPlanAxesTest, ResumedRunEqualsTheUninterruptedBitForBit) {
  for (const TpSetup& setup : all_setups()) {
    SCOPED_TRACE(to_text(setup));
    const ScratchFolder folder;
    std::vector<std::vector<double>> expected(static_cast<std::size_t>(setup.mesh.ranks()));
    on_ranks(setup, 1, [&](TpRun& run) {
      run.train(0, 2);
      run.save_to(folder.path(), 2);
      expected[static_cast<std::size_t>(run.mesh->rank())] = run.train(2, 4);
    });
    on_ranks(setup, 2, [&](TpRun& run) {
      run.load_from(folder.path());
      EXPECT_EQ(run.train(2, 4), expected[static_cast<std::size_t>(run.mesh->rank())]);
    });
  }
}

TEST(CheckpointPlanAxesTest, RunGoesOnAtAnotherDegree) {
  const ScratchFolder folder;
  std::vector<double> expected;
  on_ranks({{.tp = 2}}, 1, [&](TpRun& run) {
    run.train(0, 2);
    run.save_to(folder.path(), 2);
    const std::vector<double> losses = run.train(2, 4);
    if (run.mesh->rank() == 0) {
      expected = losses;
    }
  });
  for (const TpSetup& setup : {TpSetup{{.tp = 4}}, TpSetup{{.shard = 1, .tp = 0}}}) {
    on_ranks(setup, 2, [&](TpRun& run) {
      run.load_from(folder.path());
      const std::vector<double> losses = run.train(2, 4);
      for (std::size_t i = 0; i < losses.size(); ++i) {
        EXPECT_NEAR(losses[i], expected[i], 1e-12 * std::abs(expected[i])) << i;
      }
    });
  }
}

// Also elements of replicated parameters, which every rank of `tp` holds.
TEST(CheckpointPlanAxesTest, EachElementIsWrittenOnce) {
  for (const TpSetup& setup : all_setups()) {
    SCOPED_TRACE(to_text(setup));
    const ScratchFolder folder;
    on_ranks(setup, 1, [&](TpRun& run) { run.save_to(folder.path(), 1); });
    std::map<std::string, std::int64_t> bytes;
    for (const auto& file : std::filesystem::directory_iterator(folder / "step-00000001")) {
      if (file.path().filename().string().starts_with("weights-")) {
        const SafetensorsFile data(file.path().string());
        for (const SafetensorsEntry& entry : data.entries()) {
          const std::string key = internal::parse_entry_name(entry.name).key;
          bytes[key] += static_cast<std::int64_t>(entry.size_bytes);
          EXPECT_EQ(data.metadata().count("shape:" + key), entry.name == key ? 0 : 1);
        }
      }
    }
    for (const auto& [name, value] : by_name(read_weights(folder.path()))) {
      EXPECT_EQ(bytes[name], value.numel() * value.element_size()) << name;
    }
  }
}

}  // namespace
}  // namespace hypershard::checkpoint
