// Why: a run's files lie in one folder that explains itself, and no run overwrites another by
// accident.
#pragma once

#include <string>

namespace hypershard::train {

/// What to do if the folder holds a run already.
enum class FolderPolicy { kRefuse, kOverwrite, kResume };

/// The folder of a run: config.toml, run.json, metrics.jsonl, log, tokenizer.json, checkpoints/.
class RunFolder {
 public:
  explicit RunFolder(std::string path);

  const std::string& path() const { return path_; }
  std::string config_path() const { return file("config.toml"); }
  std::string facts_path() const { return file("run.json"); }
  std::string metrics_path() const { return file("metrics.jsonl"); }
  std::string log_path() const { return file("log"); }
  std::string checkpoint_dir() const { return file("checkpoints"); }
  /// Returns the path of a file of this run.
  std::string file(const std::string& name) const;

  /// Tells whether there is a run in it.
  bool has_run() const;
  /// Returns the checkpoint written last, empty if there is none. Errors: IoError if it is damaged.
  std::string newest_checkpoint() const;

  /// Checks that a run may begin here.
  /// Errors: InvalidArgument if it holds a run and may not be touched, or holds other files.
  void check(FolderPolicy policy) const;
  /// Makes the folder; removes a former run's files if told to.
  /// Errors: as check; IoError.
  void prepare(FolderPolicy policy) const;

 private:
  std::string path_;
};

/// Writes a text file beside its place and renames it. Errors: IoError.
void write_text_file(const std::string& path, const std::string& text);
/// Reads a whole file. Errors: IoError.
std::string read_text_file(const std::string& path);

/// Where to go on: a run folder, or one of its checkpoints.
struct ResumePoint {
  std::string run_dir;
  std::string checkpoint;
};
/// Understands a run folder (its newest checkpoint is meant), a checkpoint, or a name below `runs`.
/// Errors: InvalidArgument if it is neither, or the run has no checkpoint.
ResumePoint find_resume_point(const std::string& path);

}  // namespace hypershard::train
