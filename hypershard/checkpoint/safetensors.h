// Reads and writes safetensors files: a JSON header and tensors behind it, in the clear.
// Own code, because a checkpoint must stream out and must trust no byte of what it reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>

namespace hypershard::checkpoint {

namespace internal {
class MappedFile;
class OutputFile;
}  // namespace internal

/// One tensor of a file.
struct SafetensorsEntry {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<std::int64_t> shape = {};
  std::uint64_t begin = 0;       ///< of its bytes, from the end of the header
  std::uint64_t size_bytes = 0;  ///< reader and writer fill this and `begin`
};

/// Returns the format's name of a dtype, `F32`.
/// Errors: Unsupported for a dtype the format has no name for.
std::string safetensors_dtype(c10::ScalarType dtype);

/// Reads one file through a memory map.
///
/// Everything is checked on construction: the header's length and form, names told once, known
/// dtypes, sizes that fit the shapes, and entries that cover the data without gap or overlap up to
/// the file's last byte. No more memory is taken than the header has.
/// Memory: the map lives as long as the object; entries and data refer to it.
/// Errors: IoError naming the file and the entry.
/// Source: the format is described at https://github.com/huggingface/safetensors.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&& other) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&& other) noexcept;

  const std::string& path() const;
  /// Returns the entries in the order of their data.
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  /// Finds an entry by name; null if there is none.
  const SafetensorsEntry* find(std::string_view name) const;
  /// Returns an entry's bytes, which need not be aligned for its dtype.
  std::span<const std::byte> data(const SafetensorsEntry& entry) const;
  /// Returns the whole file.
  std::span<const std::byte> bytes() const;

 private:
  void parse_header(std::string_view header);
  void check_layout();

  std::unique_ptr<internal::MappedFile> file_;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, std::string> metadata_;
  std::uint64_t data_begin_ = 0;
};

/// What was written.
struct WrittenFile {
  std::uint64_t size_bytes = 0;
  std::uint64_t checksum = 0;  ///< XXH64 of the whole file
};

/// Writes one file from front to back, without holding its tensors.
///
/// Life cycle: the constructor writes the header; write() is called with the data of all entries,
/// in their order, in pieces of any size; finish() makes the file durable. An object destroyed
/// before that leaves an incomplete file, which no reader takes. Entries with larger elements
/// should come first, so that all of them are aligned. Errors: IoError naming the file and the
/// system's reason; InvalidArgument for a name that is repeated or reserved, or too much or too
/// little data.
class SafetensorsWriter {
 public:
  SafetensorsWriter(
      const std::string& path,
      std::vector<SafetensorsEntry> entries,
      const std::map<std::string, std::string>& metadata = {}
  );
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  /// Appends data.
  void write(std::span<const std::byte> data);
  /// Flushes the file to the disk and closes it.
  WrittenFile finish();

 private:
  std::unique_ptr<internal::OutputFile> file_;
  std::uint64_t left_bytes_ = 0;
};

}  // namespace hypershard::checkpoint
