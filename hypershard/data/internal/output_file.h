// Why: a prepared file is either whole or absent, whatever interrupts its writer.
// It is written beside its place, flushed to the disk, and renamed into it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace hypershard::data::internal {

/// A file under construction.
///
/// Nothing is visible at `path` before commit(); a file that is destroyed without it leaves
/// nothing. Errors: IoError naming the path and the system's reason (disk full, no permission).
class OutputFile {
 public:
  explicit OutputFile(std::string path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  /// Appends `size` bytes.
  void write(const void* data, std::size_t size);
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// Replaces bytes that were already written.
  void overwrite(std::uint64_t offset, const void* data, std::size_t size);
  /// Flushes to the disk and moves the file to its path.
  void commit();

  const std::string& path() const { return path_; }
  std::uint64_t size_bytes() const { return size_bytes_; }

 private:
  [[noreturn]] void fail(const char* what, int error_number) const;
  void sync_folder() const;

  std::string path_;
  std::string partial_path_;
  int fd_ = -1;
  std::uint64_t size_bytes_ = 0;
};

/// Writes `text` as the whole content of `path`, durably, all or nothing.
void write_file(const std::string& path, std::string_view text);
/// Returns the whole content of the regular file `path`.
/// Errors: IoError if it cannot be opened or read, or is not a regular file.
std::string read_file(const std::string& path);

}  // namespace hypershard::data::internal
