// Why: the manifest says what a checkpoint must hold, so that a torn one is told from a whole one
// and a foreign one from the right one before a tensor is touched.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>

#include "hypershard/checkpoint/checkpoint.h"

namespace hypershard::checkpoint::internal {

inline constexpr const char* kManifestFile = "manifest.json";

/// A logical parameter as it was saved.
struct SavedParameter {
  std::string name;
  std::vector<std::string> aliases = {};
  std::vector<std::int64_t> shape;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::int64_t steps = 0;               ///< of the optimizer; 0: its state is zero and not saved
  std::vector<std::string> state = {};  ///< names of its state

  /// Returns the number of elements; the shape was checked when it was read.
  std::int64_t numel() const;
};

/// What a file is part of.
enum class Holds : std::uint8_t { kWeights, kOptimizer };

/// One data file.
struct SavedFile {
  std::string file;  ///< name in the checkpoint's folder
  Holds holds = Holds::kWeights;
  int rank = 0;  ///< that wrote it
  std::uint64_t size_bytes = 0;
  std::string checksum = {};
};

/// The optimizer as it was saved.
struct SavedOptimizer {
  std::string kind;
  std::int64_t steps = 0;
};

/// The content of `manifest.json`.
struct Manifest {
  TrainState state;
  std::string library_version;
  int world_size = 1;
  std::vector<std::pair<std::string, int>> axes;  ///< of the mesh
  std::string strategy;
  std::vector<std::pair<std::string, std::string>> layouts;  ///< plane: layout, for readers' eyes
  std::vector<SavedParameter> parameters;
  std::optional<SavedOptimizer> optimizer;
  std::vector<SavedFile> files;
};

/// Returns the name of a rank's data file.
std::string file_name(Holds holds, int rank);
std::string to_text(Holds holds);

/// Writes the manifest as JSON text, with a checksum over itself.
std::string write_manifest(const Manifest& manifest);
/// Reads JSON text. Shapes, dtypes and file names are checked, names for being told once.
/// Errors: IoError naming `path`: torn, altered, of a newer version, or no manifest.
Manifest parse_manifest(std::string_view text, const std::string& path);
/// Reads the manifest of a checkpoint's folder. Errors: as for parse_manifest.
Manifest read_manifest(const std::string& folder);

}  // namespace hypershard::checkpoint::internal
