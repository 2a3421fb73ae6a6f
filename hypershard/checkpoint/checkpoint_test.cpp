// What is saved is what is loaded, bit for bit, on the mesh that saved it and on any other; and a
// resumed run is the run that never stopped.
#include "hypershard/checkpoint/checkpoint.h"

#include <filesystem>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "hypershard/checkpoint/internal/manifest.h"
#include "hypershard/checkpoint/safetensors.h"
#include "hypershard/checkpoint/scratch_folder.h"
#include "hypershard/checkpoint/test_runs.h"
#include "hypershard/core/error.h"
#include "hypershard/testing/tensor_matchers.h"

namespace hypershard::checkpoint {
namespace {

using layout::Strategy;
using test::by_name;
using test::expect_part;
using test::on_ranks;
using test::Run;
using test::ScratchFolder;
using test::Setup;
using test::thrown_text;

namespace fs = std::filesystem;

std::vector<test::Setup> all_setups() {
  return {
      {.ranks = 1},
      {.ranks = 2},
      {.ranks = 3},
      {.ranks = 4},
      {.ranks = 2, .strategy = Strategy::kDdp},
      {.ranks = 3, .strategy = Strategy::kZero1},
      {.ranks = 2, .strategy = Strategy::kZero2},
      {.ranks = 4, .replicate = 2, .strategy = Strategy::kHsdp},
      {.ranks = 4, .replicate = 2, .strategy = Strategy::kHierarchical},
  };
}

// Three steps, a checkpoint, three more: the losses of each rank after the checkpoint.
std::vector<std::vector<double>> uninterrupted(
    const test::Setup& setup, const std::string& directory
) {
  std::vector<std::vector<double>> losses(static_cast<std::size_t>(setup.ranks));
  on_ranks(setup, [&](test::Run& run) {
    run.train(0, 3);
    run.save_to(directory, 3);
    losses[static_cast<std::size_t>(run.mesh.rank())] = run.train(3, 6);
  });
  return losses;
}

void expect_resumes(const test::Setup& setup) {
  SCOPED_TRACE(to_text(setup));
  const ScratchFolder folder;
  const auto expected = uninterrupted(setup, folder.path());
  test::Setup fresh = setup;
  fresh.other_values = true;
  on_ranks(fresh, [&](test::Run& run) {
    const TrainState state = run.load_from(folder.path());
    EXPECT_EQ(state.step, 3);
    EXPECT_EQ(state.seed, 17);
    EXPECT_EQ(state.config_toml, "a = 1\n");
    EXPECT_EQ(run.optimizer->num_steps(), 3);
    EXPECT_EQ(run.train(3, 6), expected[static_cast<std::size_t>(run.mesh.rank())]);
  });
}

TEST(CheckpointTest, ResumedRunEqualsTheUninterruptedBitForBit) {
  for (const test::Setup& setup : all_setups()) {
    expect_resumes(setup);
  }
}

TEST(CheckpointTest, SgdBf16AndFrozenRunsResumeToo) {
  expect_resumes({.ranks = 3, .sgd = true});
  expect_resumes({.ranks = 2, .bf16 = true});
  expect_resumes({.ranks = 3, .frozen = true});
  expect_resumes({.ranks = 4, .replicate = 2, .strategy = Strategy::kHsdp, .bf16 = true});
}

// Saved again after loading elsewhere: every weight and every state tensor has the same bits.
TEST(CheckpointTest, AnyMeshLoadsWhatAnyMeshSaved) {
  const std::vector<std::pair<test::Setup, test::Setup>> moves = {
      {{.ranks = 4}, {.ranks = 3}},
      {{.ranks = 4}, {.ranks = 2}},
      {{.ranks = 4}, {.ranks = 1}},
      {{.ranks = 1}, {.ranks = 4}},
      {{.ranks = 3}, {.ranks = 4}},
      {{.ranks = 4, .replicate = 2, .strategy = Strategy::kHsdp}, {.ranks = 4}},
      {{.ranks = 4}, {.ranks = 4, .replicate = 2, .strategy = Strategy::kHsdp}},
      {{.ranks = 4, .replicate = 2, .strategy = Strategy::kHierarchical}, {.ranks = 3}},
      {{.ranks = 2, .strategy = Strategy::kDdp}, {.ranks = 4}},
      {{.ranks = 4, .bf16 = true}, {.ranks = 3, .bf16 = true}},
      {{.ranks = 4, .sgd = true}, {.ranks = 2, .sgd = true}},
      {{.ranks = 4, .frozen = true}, {.ranks = 2, .frozen = true}},
  };
  for (const auto& [from, given] : moves) {
    SCOPED_TRACE(to_text(from) + " -> " + to_text(given));
    test::Setup to = given;
    to.other_values = true;
    const ScratchFolder first;
    const ScratchFolder second;
    on_ranks(from, [&](test::Run& run) {
      run.train(0, 3);
      run.save_to(first.path(), 3);
    });
    on_ranks(to, [&](test::Run& run) {
      run.load_from(first.path());
      run.save_to(second.path(), 3);
    });
    for (const auto read : {&read_weights, &read_optimizer}) {
      const auto expected = by_name(read(first.path()));
      const auto found = by_name(read(second.path()));
      ASSERT_EQ(found.size(), expected.size());
      EXPECT_GT(expected.size(), 5);
      for (const auto& [name, tensor] : expected) {
        SCOPED_TRACE(name);
        ASSERT_EQ(found.count(name), 1);
        EXPECT_TENSORS_EQUAL(found.at(name), tensor);
      }
    }
  }
}

// On another mesh sums are taken in another order; the losses agree as well as two meshes do.
TEST(CheckpointTest, RunGoesOnElsewhereAsCloselyAsMeshesAgree) {
  const ScratchFolder folder;
  const auto expected = uninterrupted({.ranks = 4}, folder.path());
  on_ranks({.ranks = 2, .other_values = true}, [&](test::Run& run) {
    run.load_from(folder.path());
    const std::vector<double> losses = run.train(3, 6);
    for (std::size_t i = 0; i < losses.size(); ++i) {
      const auto rank = static_cast<std::size_t>(2 * run.mesh.rank());
      const double mean = (expected[rank][i] + expected[rank + 1][i]) / 2;
      EXPECT_NEAR(losses[i], mean, 1e-12 * std::abs(mean));
    }
  });
}

TEST(CheckpointTest, FilesHoldEveryElementOnceUnderItsLogicalName) {
  for (const test::Setup& setup : all_setups()) {
    SCOPED_TRACE(to_text(setup));
    const ScratchFolder folder;
    std::map<std::string, at::Tensor> values;
    std::string path;
    on_ranks(setup, [&](test::Run& run) {
      run.train(0, 1);
      const std::string saved = run.save_to(folder.path(), 41);
      for (const std::string& name : run.sharded->parameter_names()) {
        const at::Tensor value = run.sharded->full_parameter(name);
        if (run.mesh.rank() == 0) {
          values[name] = value;
        }
      }
      if (run.mesh.rank() == 0) {
        path = saved;
      }
    });
    EXPECT_EQ(path, folder / "step-00000041");
    std::map<std::string, std::int64_t> elements;
    for (const auto& file : fs::directory_iterator(path)) {
      if (file.path().filename().string().starts_with("weights-")) {
        const SafetensorsFile data(file.path().string());
        for (const SafetensorsEntry& entry : data.entries()) {
          const std::string name = entry.name.substr(0, entry.name.find('@'));
          elements[name] += static_cast<std::int64_t>(entry.size_bytes / 8);
          if (name != entry.name) {
            EXPECT_EQ(data.metadata().count("shape:" + name), 1) << entry.name;
          }
        }
      }
    }
    const auto weights = by_name(read_weights(path));
    EXPECT_EQ(weights.size(), values.size());
    for (const auto& [name, value] : values) {
      SCOPED_TRACE(name);
      EXPECT_EQ(elements[name], value.numel());
      EXPECT_TENSORS_EQUAL(weights.at(name), value);
    }
  }
}

TEST(CheckpointTest, ReplicasWriteNothing) {
  const ScratchFolder folder;
  on_ranks({.ranks = 4, .replicate = 2, .strategy = Strategy::kHsdp}, [&](test::Run& run) {
    run.train(0, 1);
    run.save_to(folder.path(), 1);
  });
  std::set<std::string> names;
  for (const auto& file : fs::directory_iterator(folder / "step-00000001")) {
    names.insert(file.path().filename().string());
  }
  EXPECT_EQ(names.count("manifest.json"), 1);
  EXPECT_EQ(names.count("weights-00000.safetensors"), 1);
  for (const std::string& name : names) {
    EXPECT_TRUE(
        name.find("-00002") == std::string::npos && name.find("-00003") == std::string::npos
    ) << name;
  }
}

TEST(CheckpointTest, TiedParametersAreSavedOnceWithAllNames) {
  const ScratchFolder folder;
  on_ranks({.ranks = 2}, [&](test::Run& run) { run.save_to(folder.path(), 0); });
  const auto manifest = internal::read_manifest(folder / "step-00000000");
  int tied = 0;
  for (const internal::SavedParameter& parameter : manifest.parameters) {
    EXPECT_NE(parameter.name, "head");
    tied += parameter.aliases == std::vector<std::string>{"head"} ? 1 : 0;
  }
  EXPECT_EQ(tied, 1);
  EXPECT_EQ(by_name(read_weights(folder.path())).count("embed"), 1);
}

TEST(CheckpointTest, FrozenParametersHaveNoState) {
  const ScratchFolder folder;
  on_ranks({.ranks = 2, .frozen = true}, [&](test::Run& run) {
    run.train(0, 2);
    run.save_to(folder.path(), 2);
  });
  const auto state = by_name(read_optimizer(folder.path()));
  EXPECT_EQ(state.count("exp_avg/blocks.0.a.weight"), 0);
  EXPECT_EQ(state.count("exp_avg/blocks.1.a.weight"), 1);
  EXPECT_EQ(state.count("exp_avg_sq/embed"), 1);
  EXPECT_EQ(by_name(read_weights(folder.path())).count("blocks.0.a.weight"), 1);
}

TEST(CheckpointTest, WeightsLoadWithoutOptimizer) {
  const ScratchFolder folder;
  on_ranks({.ranks = 2}, [&](test::Run& run) {
    run.train(0, 2);
    run.save_to(folder.path(), 2);
  });
  const auto saved = by_name(read_weights(folder.path()));
  on_ranks({.ranks = 3, .other_values = true}, [&](test::Run& run) {
    load(folder.path(), *run.sharded, nullptr, run.mesh);
    EXPECT_EQ(run.optimizer->num_steps(), 0);
    EXPECT_TENSORS_EQUAL(run.sharded->full_parameter("embed"), saved.at("embed"));
  });
}

// A step count of its own survives: frozen for two steps, saved one step after unfreezing.
TEST(CheckpointTest, StepCountsOfUnfrozenParametersSurvive) {
  const ScratchFolder folder;
  const auto unfreeze = [](test::Run& run) {
    for (auto& parameter : run.model->blocks[0]->parameters()) {
      parameter.set_requires_grad(true);
    }
  };
  std::vector<double> expected;
  on_ranks({.ranks = 2, .frozen = true}, [&](test::Run& run) {
    run.train(0, 2);
    unfreeze(run);
    run.train(2, 3);
    run.save_to(folder.path(), 3);
    const std::vector<double> losses = run.train(3, 6);
    if (run.mesh.rank() == 0) {
      expected = losses;
    }
  });
  const auto manifest = internal::read_manifest(folder / "step-00000003");
  for (const internal::SavedParameter& parameter : manifest.parameters) {
    EXPECT_EQ(
        parameter.steps,
        parameter.name.starts_with("blocks.0.") ? 1
        : parameter.numel() == 0                ? 0
                                                : 3
    ) << parameter.name;
  }
  on_ranks({.ranks = 2, .frozen = true, .other_values = true}, [&](test::Run& run) {
    run.load_from(folder.path());
    unfreeze(run);
    const std::vector<double> losses = run.train(3, 6);
    if (run.mesh.rank() == 0) {
      EXPECT_EQ(losses, expected);
    }
  });
  // In a model that never froze them they share update tensors with nobody who was stepped more.
  on_ranks({.ranks = 1, .other_values = true}, [&](test::Run& run) {
    run.load_from(folder.path());
  });
}

// Row 18 of the behaviours: padding is zero in planes, and no file holds any of it.
TEST(CheckpointTest, PaddingIsNeverSavedAndStaysZeroOnLoad) {
  const ScratchFolder folder;
  on_ranks({.ranks = 4}, [&](test::Run& run) {
    run.train(0, 2);
    run.save_to(folder.path(), 2);
  });
  on_ranks({.ranks = 3, .other_values = true}, [&](test::Run& run) {
    run.load_from(folder.path());
    for (const shard::UpdateTensor& update : run.sharded->update_parameters()) {
      at::Tensor rest = update.tensor.clone();
      for (const shard::UpdatePiece& piece : update.pieces) {
        rest.narrow(0, piece.offset, piece.range.numel()).zero_();
      }
      EXPECT_EQ(rest.count_nonzero().item<std::int64_t>(), 0) << update.name;
    }
  });
}

// Built without memory, then loaded: the first forward may run, and runs with the saved values.
TEST(CheckpointTest, MetaParametersAreInitialisedByALoad) {
  const ScratchFolder folder;
  std::vector<double> expected;
  on_ranks({.ranks = 2}, [&](test::Run& run) {
    run.save_to(folder.path(), 0);
    const std::vector<double> losses = run.train(0, 2);
    if (run.mesh.rank() == 0) {
      expected = losses;
    }
  });
  testing::run_ranks(2, [&](test::WorldPtr world) {
    test::OddNet model;
    for (const at::Tensor& param : model->parameters()) {
      param.unsafeGetTensorImpl()->shallow_copy_from(
          at::empty(param.sizes(), param.options().device(at::kMeta)).getIntrusivePtr()
      );
    }
    const comm::ProcessMesh mesh = shard::test::make_mesh(world);
    const shard::ShardedModel sharded = shard::fully_shard(*model, mesh, {.units = {"blocks.*"}});
    optim::AdamW optimizer(sharded, {.lr = 0.01});
    load(folder.path(), sharded, &optimizer, mesh);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      const at::Tensor loss = shard::test::loss_of(model->forward(
          shard::test::rows_of(shard::test::make_inputs(12, 7, step), mesh.rank(), 2)
      ));
      if (mesh.rank() == 0) {
        EXPECT_EQ(loss.item<double>(), expected[static_cast<std::size_t>(step)]);
      }
      loss.backward();
      optimizer.step();
    }
  });
}

TEST(CheckpointTest, OtherUpdateDtypeIsConverted) {
  const ScratchFolder folder;
  on_ranks({.ranks = 2}, [&](test::Run& run) {
    run.train(0, 2);
    run.save_to(folder.path(), 2);
  });
  const auto saved = by_name(read_weights(folder.path()));
  on_ranks({.ranks = 3, .bf16 = true, .other_values = true}, [&](test::Run& run) {
    run.load_from(folder.path());
    EXPECT_TENSORS_EQUAL(run.sharded->full_parameter("embed"), saved.at("embed").to(at::kFloat));
  });
}

}  // namespace
}  // namespace hypershard::checkpoint
