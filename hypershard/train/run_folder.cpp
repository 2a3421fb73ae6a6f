// Why: see run_folder.h. Only files that a run writes are ever removed.
#include "hypershard/train/run_folder.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>

#include "hypershard/checkpoint/checkpoint.h"
#include "hypershard/core/error.h"

namespace hypershard::train {
namespace fs = std::filesystem;

namespace {

// What a run may leave in its folder.
constexpr std::array<const char*, 8> kRunFiles = {
    "config.toml",
    "run.json",
    "metrics.jsonl",
    "trace.json",
    "log",
    "tokenizer.json",
    "tokenizer.model",
    "checkpoints"
};
constexpr const char* kStepPrefix = "step-";

// Tells a whole checkpoint from one under construction by its name.
bool is_checkpoint(const fs::path& path) {
  const std::string name = path.filename().string();
  const std::size_t digits = std::string_view(kStepPrefix).size();
  return name.size() > digits && name.rfind(kStepPrefix, 0) == 0 &&
         name.find_first_not_of("0123456789", digits) == std::string::npos &&
         fs::is_directory(path);
}

// Returns a checkpoint of a folder whose `latest` is gone, or nothing.
std::string any_checkpoint(const std::string& folder) {
  std::error_code error;
  std::string newest;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string path = entry.path().string();
    if (is_checkpoint(entry.path()) && path > newest) {
      newest = path;
    }
  }
  return newest;
}

void remove_tree(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) {
    HS_FAIL(IoError, "train.run_folder: cannot remove '", path.string(), "': ", error.message());
  }
}

}  // namespace

RunFolder::RunFolder(std::string path) : path_(std::move(path)) {}

std::string RunFolder::file(const std::string& name) const {
  return (fs::path(path_) / name).string();
}

bool RunFolder::has_run() const {
  return fs::exists(config_path()) || fs::exists(checkpoint_dir());
}

std::string RunFolder::newest_checkpoint() const {
  return checkpoint::find_latest(checkpoint_dir());
}

void RunFolder::check(FolderPolicy policy) const {
  std::error_code error;
  if (!fs::exists(path_, error) || policy == FolderPolicy::kResume) {
    return;
  }
  HS_CHECK(
      fs::is_directory(path_, error),
      "train.run_folder: '",
      path_,
      "' is not a folder",
      HS_HINT("name another with --set run.dir=...")
  );
  if (has_run()) {
    HS_CHECK(
        policy == FolderPolicy::kOverwrite,
        "train.run_folder: '",
        path_,
        "' holds a run already",
        HS_HINT(
            "go on with it by --resume ",
            path_,
            ", replace it by --overwrite, or name another folder with --set run.dir=..."
        )
    );
    return;
  }
  for (const auto& entry : fs::directory_iterator(path_, error)) {
    const std::string name = entry.path().filename().string();
    HS_CHECK(
        std::find(kRunFiles.begin(), kRunFiles.end(), name) != kRunFiles.end(),
        "train.run_folder: '",
        path_,
        "' holds '",
        name,
        "', which is no part of a run",
        HS_HINT("name an empty or new folder with --set run.dir=...")
    );
  }
}

void RunFolder::prepare(FolderPolicy policy) const {
  check(policy);
  if (policy != FolderPolicy::kResume) {
    for (const char* name : kRunFiles) {
      // The launcher may have begun the log of this very run.
      if (std::string_view(name) != "log") {
        remove_tree(fs::path(path_) / name);
      }
    }
  }
  std::error_code error;
  fs::create_directories(checkpoint_dir(), error);
  if (error) {
    HS_FAIL(IoError, "train.run_folder: cannot make '", checkpoint_dir(), "': ", error.message());
  }
}

void write_text_file(const std::string& path, const std::string& text) {
  const std::string beside = path + ".partial";
  {
    std::ofstream file(beside, std::ios::binary | std::ios::trunc);
    file << text;
    file.close();
    if (!file) {
      const int error = errno;
      std::error_code absent;
      fs::remove(beside, absent);  // what is torn would be foreign to the next run in this folder
      HS_FAIL(IoError, "train: cannot write '", path, "': ", errno_text(error));
    }
  }
  std::error_code error;
  fs::rename(beside, path, error);
  if (error) {
    HS_FAIL(IoError, "train: cannot rename '", beside, "' to '", path, "': ", error.message());
  }
}

std::string read_text_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    HS_FAIL(IoError, "train: cannot read '", path, "': ", errno_text(errno));
  }
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

ResumePoint find_resume_point(const std::string& given) {
  fs::path path = fs::path(given);
  if (!fs::exists(path) && fs::exists(fs::path("runs") / path)) {
    path = fs::path("runs") / path;
  }
  HS_CHECK(
      fs::is_directory(path),
      "train.resume: there is no folder '",
      given,
      "'",
      HS_HINT("name a run folder, such as runs/NAME, or one of its checkpoints")
  );
  path = path.lexically_normal();
  if (!path.has_filename()) {
    path = path.parent_path();  // a trailing slash
  }
  if (is_checkpoint(path)) {
    return {.run_dir = path.parent_path().parent_path().string(), .checkpoint = path.string()};
  }
  const RunFolder folder(path.string());
  const std::string newest = folder.newest_checkpoint();
  const std::string unnamed = newest.empty() ? any_checkpoint(folder.checkpoint_dir()) : "";
  HS_CHECK(
      unnamed.empty(),
      "train.resume: '",
      folder.checkpoint_dir(),
      "' holds checkpoints but no file 'latest' that names the newest",
      HS_HINT("name one, such as ", unnamed)
  );
  HS_CHECK(
      !newest.empty(),
      "train.resume: '",
      path.string(),
      folder.has_run() ? "' is a run without a checkpoint" : "' is neither a run nor a checkpoint",
      HS_HINT("a run writes checkpoints as checkpoint.every and checkpoint.at_end say")
  );
  return {.run_dir = path.string(), .checkpoint = newest};
}

}  // namespace hypershard::train
