// Why: everything that can be wrong with a user's text files is found here, before anything is
// written. Order and names depend on the files' names alone, never on the file system's own order.
#include "hypershard/data/internal/text_source.h"

#include <algorithm>
#include <filesystem>
#include <fnmatch.h>
#include <set>
#include <system_error>

#include "hypershard/core/error.h"
#include "hypershard/data/gutenberg.h"
#include "hypershard/data/internal/output_file.h"
#include "hypershard/data/internal/sha256.h"
#include "hypershard/data/internal/utf8.h"

namespace hypershard::data::internal {
namespace fs = std::filesystem;

namespace {

constexpr std::size_t kMaxTitleBytes = 80;
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

bool matches_any(const std::vector<std::string>& patterns, const fs::path& relative) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
    const bool has_slash = pattern.find('/') != std::string::npos;
    const std::string text = has_slash ? relative.generic_string() : relative.filename().string();
    return ::fnmatch(pattern.c_str(), text.c_str(), FNM_PATHNAME | FNM_PERIOD) == 0;
  });
}

SourceFile make_source(const fs::path& relative, const fs::path& path) {
  fs::path name = relative;
  name.replace_extension();
  return {name.generic_string(), relative.generic_string(), path.string()};
}

// Returns how many files the folder holds, matching or not.
std::size_t add_folder(
    const fs::path& folder, const std::vector<std::string>& include, std::vector<SourceFile>& files
) {
  std::size_t num_seen = 0;
  std::error_code error;
  fs::recursive_directory_iterator it(folder, error);
  for (; !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    if (it->path().filename().string().starts_with('.')) {
      if (it->is_directory(error)) {
        it.disable_recursion_pending();
      }
      continue;
    }
    if (!it->is_regular_file(error)) {
      continue;
    }
    ++num_seen;
    const fs::path relative = it->path().lexically_relative(folder);
    if (matches_any(include, relative)) {
      files.push_back(make_source(relative, it->path()));
    }
  }
  if (error) {
    HS_FAIL(IoError, "data: ", folder.string(), ": cannot be listed: ", error.message());
  }
  return num_seen;
}

void check_names(const std::vector<SourceFile>& files) {
  const auto same = std::adjacent_find(
      files.begin(), files.end(), [](const auto& a, const auto& b) { return a.name == b.name; }
  );
  if (same != files.end()) {
    HS_FAIL(
        InvalidArgument,
        "data: two files would both be document '",
        same->name,
        "': ",
        same->path,
        " and ",
        std::next(same)->path,
        HS_HINT("rename one, or give their common folder instead of the files")
    );
  }
}

}  // namespace

std::vector<SourceFile> find_sources(
    const std::vector<std::string>& paths, const std::vector<std::string>& include
) {
  HS_CHECK(!paths.empty(), "data: no text was given: 0 paths (expected files or folders)");
  std::vector<SourceFile> files;
  std::size_t num_seen = 0;
  for (const std::string& given : paths) {
    std::error_code error;
    const fs::path path = fs::path(given).lexically_normal();
    const fs::file_status status = fs::status(path, error);
    if (!fs::exists(status)) {
      HS_FAIL(
          IoError,
          "data: ",
          given,
          ": cannot be read: ",
          error ? error.message() : "no such file or folder"
      );
    }
    if (fs::is_directory(status)) {
      num_seen += add_folder(path, include, files);
    } else {
      ++num_seen;
      files.push_back(make_source(path.filename(), path));
    }
  }
  HS_CHECK(
      !files.empty(),
      "data: no file matches ",
      include,
      " in ",
      paths,
      ", which hold ",
      num_seen,
      " files",
      HS_HINT("choose files with --include 'PATTERN', for example --include '*.md'")
  );
  std::sort(files.begin(), files.end(), [](const SourceFile& a, const SourceFile& b) {
    return std::pair(a.name, a.path) < std::pair(b.name, b.path);
  });
  std::set<fs::path> seen;
  std::erase_if(files, [&](const SourceFile& file) {
    std::error_code error;
    const fs::path real = fs::canonical(file.path, error);
    return !error && !seen.insert(real).second;
  });
  check_names(files);
  return files;
}

namespace {

std::size_t line_of(std::string_view text, std::size_t offset) {
  return 1 + static_cast<std::size_t>(
                 std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(offset), '\n')
             );
}

void check_is_text(std::string_view bytes, const std::string& path) {
  const bool is_blank = bytes.find_first_not_of(" \t\r\n\f\v") == std::string_view::npos;
  HS_CHECK(
      !is_blank,
      "data: ",
      path,
      ": holds no text: ",
      bytes.size(),
      " bytes",
      HS_HINT("remove it or choose other files with --include")
  );
  const std::size_t zero = bytes.find('\0');
  HS_CHECK(
      zero == std::string_view::npos,
      "data: ",
      path,
      ": is not text: byte ",
      zero,
      " is zero",
      HS_HINT("convert UTF-16 or UTF-32 to UTF-8; leave binary files out with --include")
  );
}

// Returns true for UTF-8 and false for Latin-1.
bool decide_utf8(std::string_view bytes, TextEncoding encoding, const std::string& path) {
  if (encoding == TextEncoding::kLatin1) {
    return false;
  }
  const Utf8Scan scan = scan_utf8(bytes);
  if (scan.valid) {
    return true;
  }
  if (encoding == TextEncoding::kAuto && scan.num_multibyte == 0) {
    return false;
  }
  HS_FAIL(
      InvalidArgument,
      "data: ",
      path,
      ": is not UTF-8: line ",
      line_of(bytes, scan.first_invalid),
      ", byte ",
      scan.first_invalid,
      " is 0x",
      hex_of(bytes.substr(scan.first_invalid, 1)),
      "; it has ",
      scan.num_multibyte,
      " UTF-8 sequences and ",
      scan.num_invalid,
      " bytes outside any",
      HS_HINT("mend the file, or read every byte as one character with --encoding latin1")
  );
}

std::string title_of(std::string_view text) {
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    const auto is_letter = [](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) != 0 || (c & 0x80) != 0;
    };
    const auto first = std::find_if(line.begin(), line.end(), is_letter);
    if (first != line.end()) {
      const std::size_t from = line.find_first_not_of(" \t");
      const std::size_t to = line.find_last_not_of(" \t\r");
      return std::string(utf8_prefix(line.substr(from, to - from + 1), kMaxTitleBytes));
    }
    begin = end + 1;
  }
  return {};
}

}  // namespace

SourceText read_source(const SourceFile& file, const PrepareOptions& options) {
  std::string bytes = read_file(file.path);
  SourceText result;
  result.source_bytes = bytes.size();
  result.sha256 = sha256_hex(bytes);
  check_is_text(bytes, file.path);

  const bool is_utf8 = decide_utf8(bytes, options.encoding, file.path);
  result.encoding = is_utf8 ? "utf-8" : "latin-1";
  if (!is_utf8) {
    bytes = latin1_to_utf8(bytes);
  } else if (bytes.starts_with(kByteOrderMark)) {
    bytes.erase(0, kByteOrderMark.size());  // a signature, not text
  }

  const GutenbergBody gutenberg = hypershard::data::strip_gutenberg(bytes);
  const std::size_t num_cut = gutenberg.head_bytes + gutenberg.tail_bytes;
  result.has_gutenberg_markers = num_cut > 0;
  if (options.strip_gutenberg) {
    result.stripped_bytes = num_cut;
    result.text = std::string(gutenberg.body);
    check_is_text(result.text, file.path + " without its Project Gutenberg wrapping");
  } else {
    result.text = std::move(bytes);
  }
  result.title = title_of(result.text);
  return result;
}

}  // namespace hypershard::data::internal
