// Why: the system calls behind a checkpoint, each with an error that names path and reason.
// Durability is spelled out: a file is flushed, and so is the folder that names it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "hypershard/checkpoint/internal/checksum.h"

namespace hypershard::checkpoint::internal {

/// A file that is written from front to back.
///
/// Nothing is durable before finish(); a file that is destroyed without it stays, incomplete.
/// Errors: IoError naming the path and the system's reason.
class OutputFile {
 public:
  explicit OutputFile(std::string path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  /// Appends bytes and digests them on the way.
  void write(std::span<const std::byte> data);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  /// Flushes to the disk and closes.
  void finish();

  const std::string& path() const { return path_; }
  std::uint64_t size_bytes() const { return size_bytes_; }
  std::uint64_t checksum() const { return checksum_.value(); }

 private:
  void write_chunk(const std::byte* data, std::size_t size);
  [[noreturn]] void fail(const char* what, int error_number) const;

  std::string path_;
  int fd_ = -1;
  std::uint64_t size_bytes_ = 0;
  Checksum checksum_;
};

/// A regular file mapped read-only for as long as the object lives.
/// Errors: IoError if it cannot be opened or mapped, or is not a regular file.
class MappedFile {
 public:
  explicit MappedFile(std::string path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::string path_;
  std::span<const std::byte> bytes_;
};

/// Returns a whole small file. Errors: IoError as for MappedFile.
std::string read_text(const std::string& path);
/// Writes a whole file durably in its place, all or nothing: readers see the old or the new text.
void replace_text(const std::string& path, std::string_view text);
/// Flushes a folder's list of names to the disk.
void sync_folder(const std::string& path);
/// Makes the folder `path` and the folders above it.
void make_folders(const std::string& path);
/// Removes a file or folder with all it holds; nothing if it is not there.
void remove_tree(const std::string& path);
/// Moves a folder to a path where another may already be, which is then removed. Whoever looks
/// finds one of the two, whole; only where the file system cannot exchange two names there is an
/// instant with none.
void replace_folder(const std::string& from, const std::string& to);

}  // namespace hypershard::checkpoint::internal
