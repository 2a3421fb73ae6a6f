// Reading a checkpoint whole in one process, without a mesh; see checkpoint.h.
#include <string>
#include <vector>

#include "hypershard/checkpoint/checkpoint.h"
#include "hypershard/checkpoint/internal/entry_index.h"
#include "hypershard/checkpoint/internal/manifest.h"
#include "hypershard/checkpoint/internal/paths.h"
#include "hypershard/core/error_context.h"

namespace hypershard::checkpoint {

namespace {

std::vector<NamedTensor> read_all(const std::string& path, internal::Holds holds) {
  const ErrorContext context("checkpoint read");
  const std::string folder = internal::find_folder(path);
  const internal::Manifest manifest = internal::read_manifest(folder);
  for (const internal::SavedFile& file : manifest.files) {
    if (file.holds == holds) {
      internal::verify_file(folder, file);
    }
  }
  const internal::EntryIndex index(folder, manifest, holds);
  std::vector<NamedTensor> tensors;
  for (const std::string& key : index.keys()) {
    tensors.push_back({.name = key, .tensor = index.read_whole(key)});
  }
  return tensors;
}

}  // namespace

std::vector<NamedTensor> read_weights(const std::string& path) {
  return read_all(path, internal::Holds::kWeights);
}

std::vector<NamedTensor> read_optimizer(const std::string& path) {
  return read_all(path, internal::Holds::kOptimizer);
}

TrainState read_state(const std::string& path) {
  return internal::read_manifest(internal::find_folder(path)).state;
}

}  // namespace hypershard::checkpoint
