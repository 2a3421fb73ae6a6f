// Why: a logical tensor may lie in several entries of several files, cut for another number of
// ranks. The index finds the bytes of any range of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/checkpoint/internal/manifest.h"
#include "hypershard/checkpoint/safetensors.h"
#include "hypershard/layout/block.h"

namespace hypershard::checkpoint::internal {

/// Returns an entry's name: the key, `[B:E,B:E]` behind it unless the block is the whole tensor,
/// and `@BEGIN:END` unless the range is the whole block.
std::string entry_name(const std::string& key, const layout::Block& block, layout::Range range);

/// What an entry's name says.
struct EntryName {
  std::string key;
  std::vector<layout::Range> ranges = {};  ///< of the block; empty: none in the name
  layout::Range range = {};                ///< of the block's elements; empty: none in the name
};
/// Splits a name. What is no block or range belongs to the key.
EntryName parse_entry_name(std::string_view name);
/// Returns the metadata key that holds the whole shape of a cut entry.
std::string shape_key(const std::string& key);

/// Opens a checkpoint's data file. Errors: IoError if its size is not the manifest's, or as for
/// SafetensorsFile.
SafetensorsFile open_file(const std::string& folder, const SavedFile& saved);
/// Throws IoError unless the file has the manifest's size and checksum.
void verify_file(const std::string& folder, const SavedFile& saved);

/// The entries of all files that hold weights, or of all that hold optimizer state.
///
/// Construction opens the files and checks that every element of every logical tensor in the
/// manifest lies in exactly one entry.
/// Errors: IoError naming files and entries.
class EntryIndex {
 public:
  EntryIndex(const std::string& folder, const Manifest& manifest, Holds holds);

  /// Tells whether there is such a logical tensor: `NAME` or `exp_avg/NAME`.
  bool has(const std::string& key) const { return tensors_.count(key) > 0; }
  /// Copies a range of a block of a logical tensor to `flat`, converting its dtype.
  /// Shapes: flat [range.numel()], contiguous; the block's shape that of the tensor. Errors:
  /// IoError for a key that is not there.
  void read(
      const std::string& key,
      const layout::Block& block,
      layout::Range range,
      const at::Tensor& flat
  ) const;
  /// Reads a logical tensor whole, in the dtype it was saved in.
  at::Tensor read_whole(const std::string& key) const;
  /// Returns the keys in the manifest's order.
  const std::vector<std::string>& keys() const { return keys_; }

 private:
  struct Source {
    layout::Block block;
    layout::Range range;  // of the block's elements
    const SafetensorsFile* file = nullptr;
    const SafetensorsEntry* entry = nullptr;
  };
  struct Tensor {
    std::vector<std::int64_t> shape;
    c10::ScalarType dtype{};
    std::int64_t numel = 0;
    std::vector<Source> sources;  // by block and range
  };
  void add_keys(const SavedParameter& parameter, Holds holds);
  void add_entry(const SafetensorsFile& file, const SafetensorsEntry& entry);
  void check_complete(const std::string& folder);
  static std::string find_gap(const std::string& key, const Tensor& tensor);
  const Tensor& find(const std::string& key) const;

  std::vector<SafetensorsFile> files_;
  std::vector<std::string> keys_;
  std::map<std::string, Tensor> tensors_;
  std::vector<std::string> problems_;
};

}  // namespace hypershard::checkpoint::internal
