// Checks that no run overwrites another by accident, and that only a run's own files are removed.
#include "hypershard/train/run_folder.h"

#include <filesystem>
#include <fstream>
#include <string>
#include <unistd.h>

#include <gtest/gtest.h>

#include "hypershard/core/error.h"

namespace hypershard::train {
namespace {

namespace fs = std::filesystem;

class RunFolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    base_ = fs::temp_directory_path() / ("hs_run_folder_" + std::to_string(::getpid()));
    fs::create_directories(base_);
  }
  void TearDown() override { fs::remove_all(base_); }

  std::string run_path() const { return (base_ / "run").string(); }
  void touch(const std::string& name) const {
    fs::create_directories((base_ / "run" / name).parent_path());
    std::ofstream(base_ / "run" / name) << "x";
  }
  static std::string refusal(const RunFolder& folder, FolderPolicy policy) {
    try {
      folder.check(policy);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return {};
  }

  fs::path base_;
};

TEST_F(RunFolderTest, NewFolderIsMade) {
  const RunFolder folder(run_path());
  folder.prepare(FolderPolicy::kRefuse);
  EXPECT_TRUE(fs::is_directory(folder.checkpoint_dir()));
}

TEST_F(RunFolderTest, RunIsNotTouchedUnasked) {
  touch("config.toml");
  const std::string text = refusal(RunFolder(run_path()), FolderPolicy::kRefuse);
  EXPECT_NE(text.find("holds a run already"), std::string::npos) << text;
  EXPECT_NE(text.find("--resume"), std::string::npos) << text;
  EXPECT_NE(text.find("--overwrite"), std::string::npos) << text;
}

TEST_F(RunFolderTest, OverwriteRemovesTheRunButNothingElse) {
  touch("config.toml");
  touch("checkpoints/step-00000001/weights");
  touch("notes.txt");
  RunFolder(run_path()).prepare(FolderPolicy::kOverwrite);
  EXPECT_FALSE(fs::exists(base_ / "run/config.toml"));
  EXPECT_FALSE(fs::exists(base_ / "run/checkpoints/step-00000001"));
  EXPECT_TRUE(fs::exists(base_ / "run/notes.txt"));
}

TEST_F(RunFolderTest, FolderWithOtherFilesIsRefused) {
  touch("thesis.tex");
  const std::string text = refusal(RunFolder(run_path()), FolderPolicy::kOverwrite);
  EXPECT_NE(text.find("thesis.tex"), std::string::npos) << text;
}

TEST_F(RunFolderTest, ResumePointIsTheNewestOrTheOneNamed) {
  touch("config.toml");
  touch("checkpoints/step-00000002/weights");
  touch("checkpoints/step-00000010/weights");
  touch("checkpoints/step-00000010/manifest.json");
  std::ofstream(base_ / "run/checkpoints/latest") << "step-00000010\n";
  const ResumePoint newest = find_resume_point(run_path() + "/");
  EXPECT_EQ(newest.run_dir, run_path());
  EXPECT_EQ(fs::path(newest.checkpoint).filename(), "step-00000010");
  const ResumePoint named = find_resume_point(run_path() + "/checkpoints/step-00000002");
  EXPECT_EQ(named.run_dir, run_path());
  EXPECT_EQ(fs::path(named.checkpoint).filename(), "step-00000002");
}

TEST_F(RunFolderTest, RunWithoutCheckpointCannotBeResumed) {
  touch("config.toml");
  EXPECT_THROW(find_resume_point(run_path()), InvalidArgument);
  EXPECT_THROW(find_resume_point((base_ / "absent").string()), InvalidArgument);
}

TEST_F(RunFolderTest, CheckpointsWithoutLatestAreNamed) {
  touch("config.toml");
  touch("checkpoints/step-00000002/weights");
  touch("checkpoints/step-00000010/weights");
  try {
    find_resume_point(run_path());
    FAIL() << "no error";
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("no file 'latest'"), std::string::npos) << text;
    EXPECT_NE(text.find("step-00000010"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace hypershard::train
