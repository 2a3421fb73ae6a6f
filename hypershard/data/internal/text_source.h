// Why: preparation needs the documents behind a list of paths, in an order that never changes.
// Texts are read one at a time, so that a corpus need not fit into memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hypershard/data/prepare.h"

namespace hypershard::data::internal {

/// A file that will be one document.
struct SourceFile {
  std::string name;    ///< path below the given folder without extension, or the file's stem
  std::string source;  ///< the same with its extension
  std::string path;
};

/// A document's text, decoded and stripped.
struct SourceText {
  std::string text;      ///< well-formed UTF-8
  std::string title;     ///< first line with a letter or digit, at most 80 bytes
  std::string encoding;  ///< `utf-8` or `latin-1`
  std::string sha256;    ///< of the file's bytes
  std::uint64_t source_bytes = 0;
  std::uint64_t stripped_bytes = 0;
  bool has_gutenberg_markers = false;
};

/// Lists the files that `paths` name, sorted by name; a file reached twice counts once.
/// Errors: IoError for a path that is not there or cannot be listed; InvalidArgument if nothing
///         matches or two files would have one name.
std::vector<SourceFile> find_sources(
    const std::vector<std::string>& paths, const std::vector<std::string>& include
);

/// Reads one document.
/// Errors: IoError if it cannot be read; InvalidArgument if it is empty, holds a zero byte, or its
///         bytes fit neither encoding, naming file, line and offset.
SourceText read_source(const SourceFile& file, const PrepareOptions& options);

}  // namespace hypershard::data::internal
