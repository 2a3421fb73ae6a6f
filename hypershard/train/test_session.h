// A tiny run on prepared text, for tests that need sessions of several ranks.
#pragma once

#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <unistd.h>
#include <vector>

#include "hypershard/data/prepare.h"
#include "hypershard/testing/run_ranks.h"
#include "hypershard/train/run_plan.h"
#include "hypershard/train/session.h"

namespace hypershard::train::test {

/// A folder with prepared data, gone with the object.
class TextFolder {
 public:
  explicit TextFolder(const std::string& name)
      : path_(
            std::filesystem::temp_directory_path() /
            ("hs_" + name + "_" + std::to_string(::getpid()))
        ) {
    std::filesystem::create_directories(path_);
    for (const char* file_name : {"a.txt", "b.txt"}) {
      std::ofstream file(path_ / file_name);
      for (int line = 0; line < 200; ++line) {
        file << "line " << line << " of a text without any sense\n";
      }
    }
    data::PrepareOptions options;
    options.out_dir = data();
    options.holdout = {"b"};
    data::prepare_text({(path_ / "a.txt").string(), (path_ / "b.txt").string()}, options);
  }
  ~TextFolder() { std::filesystem::remove_all(path_); }
  TextFolder(const TextFolder&) = delete;
  TextFolder& operator=(const TextFolder&) = delete;

  std::string data() const { return (path_ / "data").string(); }
  /// Loads a tiny configuration on this text.
  void load(RunConfigFile& file, const std::vector<std::string>& overrides, int num_ranks) const {
    file.load_text(
        "[data]\npath = \"" + data() +
            "\"\n[model]\nlayers = 3\ndim = 32\nheads = 2\nsequence = 16\n"
            "[batch]\nglobal_batch = 24\n",
        "plan.toml",
        overrides,
        num_ranks
    );
  }

 private:
  std::filesystem::path path_;
};

/// Runs `body` on ranks that lie in supernodes as the configuration says.
inline void run_on_ranks(
    const RunConfig& config,
    int num_ranks,
    const std::function<void(const std::shared_ptr<comm::World>&)>& body,
    testing::RankBackend backend = testing::RankBackend::kLocal
) {
  testing::RunRanksOptions options{.backend = backend};
  const layout::Topology topology = planned_topology(config, num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank) {
    options.supernodes.push_back(std::to_string(topology.supernode_of(rank)));
  }
  testing::run_ranks(num_ranks, body, options);
}

}  // namespace hypershard::train::test
