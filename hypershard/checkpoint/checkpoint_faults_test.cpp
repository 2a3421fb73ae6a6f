// What is torn, altered, foreign or unfinished is refused by name on every rank, and a save that
// fails leaves what was there before.
#include <algorithm>
#include <csignal>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <sys/resource.h>
#include <vector>

#include <gtest/gtest.h>

#include "hypershard/checkpoint/checkpoint.h"
#include "hypershard/checkpoint/internal/agreement.h"
#include "hypershard/checkpoint/internal/files.h"
#include "hypershard/checkpoint/scratch_folder.h"
#include "hypershard/checkpoint/test_runs.h"
#include "hypershard/core/error.h"
#include "hypershard/testing/tensor_matchers.h"

namespace hypershard::checkpoint {
namespace {

using layout::Strategy;
using test::content_of;
using test::expect_part;
using test::flip_byte;
using test::on_ranks;
using test::put;
using test::Run;
using test::ScratchFolder;
using test::Setup;
using test::thrown_text;

namespace fs = std::filesystem;

class CheckpointFaultsTest : public ::testing::Test {
 protected:
  // A checkpoint of two ranks at step 2, and one of step 1 before it.
  void SetUp() override {
    on_ranks({.ranks = 2}, [&](test::Run& run) {
      run.train(0, 1);
      run.save_to(folder_.path(), 1);
      run.train(1, 2);
      run.save_to(folder_.path(), 2);
    });
  }

  // The text with which every rank refuses the newest checkpoint; the model keeps its values.
  template <class Type = IoError>
  std::string refusal(const std::string& path, int ranks = 2) {
    std::vector<std::string> texts(static_cast<std::size_t>(ranks));
    on_ranks({.ranks = ranks, .other_values = true}, [&](test::Run& run) {
      const at::Tensor before = run.sharded->full_parameter("embed");
      texts[static_cast<std::size_t>(run.mesh.rank())] =
          thrown_text<Type>([&] { run.load_from(path); });
      EXPECT_TENSORS_EQUAL(run.sharded->full_parameter("embed"), before);
      EXPECT_EQ(run.optimizer->num_steps(), 0);
    });
    for (const std::string& text : texts) {
      EXPECT_EQ(
          text.substr(text.find("checkpoint:")), texts[0].substr(texts[0].find("checkpoint:"))
      );
    }
    return texts[0];
  }

  ScratchFolder folder_;
  std::string newest_ = folder_ / "step-00000002";
};

TEST_F(CheckpointFaultsTest, FlippedByteAnywhereIsRefusedByFile) {
  for (const std::string name :
       {"weights-00000.safetensors",
        "weights-00001.safetensors",
        "optimizer-00001.safetensors",
        "manifest.json"}) {
    const std::string file = newest_ + "/" + name;
    const std::string good = content_of(file);
    for (const std::size_t at :
         {std::size_t{0}, std::size_t{40}, good.size() / 2, good.size() - 3}) {
      SCOPED_TRACE(name + " at " + std::to_string(at));
      flip_byte(file, at);
      expect_part(refusal(folder_.path()), file);
      put(file, good);
    }
  }
}

TEST_F(CheckpointFaultsTest, TruncatedLengthenedAndMissingFilesAreRefused) {
  const std::string file = newest_ + "/weights-00001.safetensors";
  const std::string good = content_of(file);
  for (const std::size_t size : {std::size_t{0}, std::size_t{7}, good.size() - 1}) {
    put(file, good.substr(0, size));
    const std::string text = refusal(folder_.path());
    expect_part(text, file);
    expect_part(
        text, std::to_string(size) + " bytes long; expected " + std::to_string(good.size())
    );
    expect_part(text, "on rank 1");
  }
  put(file, good + "x");
  expect_part(refusal(folder_.path(), 1), "torn or altered");
  fs::remove(file);
  expect_part(refusal(folder_.path(), 3), file);
  put(file, good);
  on_ranks({.ranks = 2}, [&](test::Run& run) { EXPECT_EQ(run.load_from(folder_.path()).step, 2); });
}

TEST_F(CheckpointFaultsTest, SingleProcessReadersRefuseTheSame) {
  flip_byte(newest_ + "/weights-00001.safetensors", 300);
  expect_part(
      thrown_text<IoError>([&] { read_weights(folder_.path()); }), "weights-00001.safetensors"
  );
  EXPECT_FALSE(read_optimizer(folder_.path()).empty());
  EXPECT_EQ(read_state(folder_.path()).step, 2);
  EXPECT_EQ(read_weights(folder_ / "step-00000001").size(), 12);
}

TEST_F(CheckpointFaultsTest, UnfinishedCheckpointIsNeverRead) {
  const std::string partial = folder_ / "step-00000009.tmp";
  fs::copy(newest_, partial);
  expect_part(refusal(partial), "unfinished");
  expect_part(refusal(partial + "/"), "unfinished");
  on_ranks({.ranks = 2}, [&](test::Run& run) { EXPECT_EQ(run.load_from(folder_.path()).step, 2); });
}

TEST_F(CheckpointFaultsTest, LatestMustNameACheckpointOfTheFolder) {
  EXPECT_EQ(content_of(folder_ / "latest"), "step-00000002\n");
  EXPECT_EQ(find_latest(folder_.path()), newest_);
  for (const std::string name : {"../elsewhere", "/tmp", "", "step-2", "step-00000002.tmp"}) {
    put(folder_ / "latest", name);
    expect_part(refusal(folder_.path()), "expected the name of a checkpoint");
  }
  put(folder_ / "latest", "step-00000007");
  expect_part(refusal(folder_.path()), "names step-00000007, which is not there or not whole");
  put(folder_ / "latest", "step-00000001");
  on_ranks({.ranks = 2}, [&](test::Run& run) { EXPECT_EQ(run.load_from(folder_.path()).step, 1); });
  fs::remove(folder_ / "latest");
  EXPECT_EQ(find_latest(folder_.path()), "");
  expect_part(refusal(folder_.path()), "neither a checkpoint nor a 'latest' file");
  expect_part(refusal(folder_ / "nowhere"), "does not exist");
}

TEST_F(CheckpointFaultsTest, StaleLeftoversDoNotDisturbASave) {
  fs::create_directories(folder_ / "step-00000003.tmp/weights-00000.safetensors");
  put(folder_ / "step-00000003.tmp/garbage", "x");
  on_ranks({.ranks = 2}, [&](test::Run& run) { run.save_to(folder_.path(), 3); });
  EXPECT_FALSE(fs::exists(folder_ / "step-00000003.tmp"));
  EXPECT_FALSE(fs::exists(folder_ / "step-00000003/garbage"));
  EXPECT_EQ(find_latest(folder_.path()), folder_ / "step-00000003");
}

TEST_F(CheckpointFaultsTest, SameStepIsReplaced) {
  const auto before = test::by_name(read_weights(newest_));
  on_ranks({.ranks = 3}, [&](test::Run& run) {
    run.train(0, 3);
    run.save_to(folder_.path(), 2);
  });
  EXPECT_FALSE(at::equal(test::by_name(read_weights(newest_)).at("embed"), before.at("embed")));
  EXPECT_TRUE(fs::exists(newest_ + "/weights-00002.safetensors"));
  EXPECT_FALSE(fs::exists(newest_ + ".tmp"));
}

TEST_F(CheckpointFaultsTest, PruneKeepsTheNewestAndTheLatest) {
  on_ranks({.ranks = 1}, [&](test::Run& run) {
    for (const std::int64_t step : {3, 4, 123456789}) {
      run.save_to(folder_.path(), step);
    }
  });
  fs::create_directories(folder_ / "step-00000005.tmp");
  put(folder_ / "notes.txt", "mine");
  EXPECT_THROW(prune(folder_.path(), -1), InvalidArgument);
  EXPECT_EQ(prune(folder_.path(), 0), std::vector<std::string>{folder_ / "step-00000005.tmp"});
  put(folder_ / "latest", "step-00000001");
  const std::vector<std::string> removed = {folder_ / "step-00000002", folder_ / "step-00000003"};
  EXPECT_EQ(prune(folder_.path(), 2), removed);
  std::vector<std::string> left;
  for (const auto& entry : fs::directory_iterator(folder_.path())) {
    left.push_back(entry.path().filename().string());
  }
  std::sort(left.begin(), left.end());
  EXPECT_EQ(
      left,
      (std::vector<std::string>{
          "latest", "notes.txt", "step-00000001", "step-00000004", "step-123456789"
      })
  );
  EXPECT_TRUE(prune(folder_ / "nowhere", 1).empty());
}

TEST_F(CheckpointFaultsTest, WrongModelIsRefusedWithTheNames) {
  testing::run_ranks(2, [&](test::WorldPtr world) {
    const comm::ProcessMesh mesh = shard::test::make_mesh(world);
    shard::test::Net model;  // in, blocks.0-2 with another width, out
    const shard::ShardedModel sharded = shard::fully_shard(*model, mesh, {.units = {"blocks.*"}});
    const std::string text =
        thrown_text<InvalidArgument>([&] { load(folder_.path(), sharded, nullptr, mesh); });
    expect_part(text, "does not fit the model");
    expect_part(text, "8 missing in the checkpoint: ");
    expect_part(text, "in.weight");
    expect_part(text, "4 unexpected: ");
    expect_part(text, "embed");
    expect_part(text, "blocks.0.a.weight has shape [5, 6] in the checkpoint, [7, 6] in the model");
  });
}

TEST_F(CheckpointFaultsTest, ManyMismatchesAreCountedAndTenAreListed) {
  testing::run_ranks(1, [&](test::WorldPtr world) {
    const comm::ProcessMesh mesh = shard::test::make_mesh(world);
    shard::test::Net model(shard::test::NetOptions{.num_blocks = 9});
    const shard::ShardedModel sharded = shard::fully_shard(*model, mesh, {.units = {"blocks.*"}});
    const std::string text =
        thrown_text<InvalidArgument>([&] { load(folder_.path(), sharded, nullptr, mesh); });
    expect_part(text, "32 missing in the checkpoint");
    expect_part(text, "and 22 more");
  });
}

TEST_F(CheckpointFaultsTest, ModelThatTiesOtherwiseIsRefused) {
  testing::run_ranks(2, [&](test::WorldPtr world) {
    const comm::ProcessMesh mesh = shard::test::make_mesh(world);
    test::OddNet model(1.0, /*tied=*/false);
    const shard::ShardedModel sharded = shard::fully_shard(*model, mesh, {.units = {"blocks.*"}});
    const std::string text =
        thrown_text<InvalidArgument>([&] { load(folder_.path(), sharded, nullptr, mesh); });
    expect_part(
        text,
        "embed is one tensor under the names [embed, head] in the checkpoint, [embed] in the model"
    );
    expect_part(text, "head is one tensor under the names [embed, head]");
  });
}

TEST_F(CheckpointFaultsTest, StateOfAnotherOptimizerIsRefused) {
  on_ranks({.ranks = 2, .sgd = true}, [&](test::Run& run) {
    const std::string text = thrown_text<InvalidArgument>([&] { run.load_from(folder_.path()); });
    expect_part(text, "adamw");
    expect_part(text, "sgd");
  });
  const ScratchFolder other;
  on_ranks({.ranks = 2}, [&](test::Run& run) {
    save(other.path(), *run.sharded, nullptr, {.step = 1}, run.mesh);
    expect_part(
        thrown_text<InvalidArgument>([&] { run.load_from(other.path()); }),
        "holds no optimizer state for 'adamw'"
    );
    EXPECT_EQ(load(other.path(), *run.sharded, nullptr, run.mesh).step, 1);
  });
}

TEST_F(CheckpointFaultsTest, MissingMomentumIsNamed) {
  const ScratchFolder other;
  on_ranks({.ranks = 2}, [&](test::Run& run) {
    optim::Sgd plain(*run.sharded, {.lr = 0.01});
    run.optimizer->zero_grad();
    shard::test::loss_of(run.model->forward(shard::test::rows_of(
                             shard::test::make_inputs(12, 7, 0), run.mesh.rank(), 2
                         )))
        .backward();
    plain.step();
    save(other.path(), *run.sharded, &plain, {.step = 1}, run.mesh);
    optim::Sgd heavy(*run.sharded, {.lr = 0.01, .momentum = 0.9});
    const std::string text =
        thrown_text<InvalidArgument>([&] { load(other.path(), *run.sharded, &heavy, run.mesh); });
    expect_part(text, "does not fit the optimizer");
    expect_part(text, "momentum_buffer/");
  });
}

TEST_F(CheckpointFaultsTest, LoadDuringAForwardIsRefusedOnAllRanks) {
  on_ranks({.ranks = 2}, [&](test::Run& run) {
    const at::Tensor loss = shard::test::loss_of(run.model->forward(
        shard::test::rows_of(shard::test::make_inputs(12, 7, 0), run.mesh.rank(), 2)
    ));
    expect_part(
        thrown_text<InvalidArgument>([&] { run.load_from(folder_.path()); }),
        "may not be written now"
    );
    loss.backward();
    EXPECT_EQ(run.load_from(folder_.path()).step, 2);
  });
}

// Files beyond a size cannot be written: the way a full disk is felt, without a disk to fill.
class SmallFiles {
 public:
  explicit SmallFiles(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &limit_);
    rlimit small = limit_;
    small.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &small);
  }
  ~SmallFiles() {
    ::setrlimit(RLIMIT_FSIZE, &limit_);
    (void)std::signal(SIGXFSZ, handler_);
  }
  SmallFiles(const SmallFiles&) = delete;
  SmallFiles& operator=(const SmallFiles&) = delete;

 private:
  void (*handler_)(int);
  rlimit limit_{};
};

TEST_F(CheckpointFaultsTest, FullDiskFailsOnAllRanksAndKeepsTheOlderCheckpoint) {
  // Replicas write nothing and must fail all the same.
  const test::Setup setup{.ranks = 4, .replicate = 2, .strategy = Strategy::kHsdp};
  on_ranks(setup, [&](test::Run& run) {
    run.train(0, 1);
    run.mesh.world().world_communicator()->barrier()->wait();
    std::string text;
    {
      std::unique_ptr<SmallFiles> small;
      if (run.mesh.rank() == 0) {
        small = std::make_unique<SmallFiles>(256);
      }
      run.mesh.world().world_communicator()->barrier()->wait();
      text = thrown_text<IoError>([&] { run.save_to(folder_.path(), 3); });
      run.mesh.world().world_communicator()->barrier()->wait();
    }
    expect_part(text, "on rank 0 (and 1 more)");
    expect_part(text, "weights-00000.safetensors: cannot be written after 256 bytes");
    expect_part(text, "File too large");
    expect_part(text, "free some space");
    run.mesh.world().world_communicator()->barrier()->wait();
    EXPECT_FALSE(fs::exists(folder_ / "step-00000003"));
    EXPECT_FALSE(fs::exists(folder_ / "step-00000003.tmp"));
    EXPECT_EQ(find_latest(folder_.path()), newest_);
    EXPECT_EQ(run.load_from(folder_.path()).step, 2);
    run.train(0, 1);
    run.save_to(folder_.path(), 3);
    EXPECT_EQ(find_latest(folder_.path()), folder_ / "step-00000003");
  });
}

TEST_F(CheckpointFaultsTest, DirectoryThatCannotBeMadeFailsOnAllRanks) {
  put(folder_ / "file", "not a folder");
  on_ranks({.ranks = 3}, [&](test::Run& run) {
    const std::string text = thrown_text<IoError>([&] { run.save_to(folder_ / "file/below", 3); });
    expect_part(text, "on rank 0");
    expect_part(text, "file/below");
  });
}

TEST_F(CheckpointFaultsTest, DifferentOptimizersOnRanksAreNoticed) {
  const ScratchFolder other;
  on_ranks({.ranks = 2}, [&](test::Run& run) {
    run.train(0, 1);
    if (run.mesh.rank() == 1) {
      run.optimizer->set_num_steps(5);
    }
    const std::string text = thrown_text<InvalidArgument>([&] { run.save_to(other.path(), 1); });
    expect_part(text, "ranks disagree on the optimizer's state of parameter");
  });
  EXPECT_EQ(find_latest(other.path()), "");
}

// What one rank throws arrives on all, with type, rank and words.
TEST(AgreementTest, FirstFailureIsThrownOnEveryRank) {
  testing::run_ranks(4, [](std::shared_ptr<comm::World> world) {
    comm::Communicator& ranks = *world->world_communicator();
    const std::vector<std::string> all = internal::together(ranks, [&] {
      return std::string(static_cast<std::size_t>(world->rank()), 'a');
    });
    EXPECT_EQ(all, (std::vector<std::string>{"", "a", "aa", "aaa"}));
    const auto fails = [&](auto what) {
      internal::together(ranks, [&]() -> std::string {
        if (world->rank() >= 2) {
          what();
        }
        return {};
      });
    };
    expect_part(
        thrown_text<InvalidArgument>([&] {
          fails([&] { HS_FAIL(InvalidArgument, "bad rank ", world->rank(), HS_HINT("do this")); });
        }),
        "on rank 2 (and 1 more): bad rank 2"
    );
    expect_part(
        thrown_text<Unsupported>([&] { fails([] { HS_FAIL(Unsupported, "no such thing"); }); }),
        "no such thing"
    );
    expect_part(
        thrown_text<InternalError>([&] { fails([] { throw std::runtime_error("foreign"); }); }),
        "foreign"
    );
  });
}

TEST(FilesTest, FolderReplacesAnother) {
  const ScratchFolder folder;
  fs::create_directories(folder / "new");
  fs::create_directories(folder / "old/deep");
  put(folder / "new/a", "1");
  put(folder / "old/deep/b", "2");
  internal::replace_folder(folder / "new", folder / "old");
  EXPECT_EQ(content_of(folder / "old/a"), "1");
  EXPECT_FALSE(fs::exists(folder / "old/deep"));
  EXPECT_FALSE(fs::exists(folder / "new"));
}

}  // namespace
}  // namespace hypershard::checkpoint
