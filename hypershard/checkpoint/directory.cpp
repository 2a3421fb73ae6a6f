// The directory that holds checkpoints: names, the newest one, and what may be removed.
#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "hypershard/checkpoint/checkpoint.h"
#include "hypershard/checkpoint/internal/files.h"
#include "hypershard/checkpoint/internal/manifest.h"
#include "hypershard/checkpoint/internal/paths.h"
#include "hypershard/core/error.h"

namespace hypershard::checkpoint {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";
constexpr std::size_t kLeastDigits = 8;

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

std::string trimmed(std::string text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r' || text.back() == ' ')) {
    text.pop_back();
  }
  return text;
}

// The names in a folder, in no order.
std::vector<std::string> list_names(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator at(directory, error), end; !error && at != end; at.increment(error)) {
    names.push_back(at->path().filename().string());
  }
  if (error) {
    HS_FAIL(IoError, "checkpoint: ", directory, ": cannot be listed: ", error.message());
  }
  return names;
}

}  // namespace

namespace internal {

std::string step_name(std::int64_t step) {
  std::array<char, 40> text{};
  const int length =
      std::snprintf(text.data(), text.size(), "step-%08lld", static_cast<long long>(step));
  return {text.data(), static_cast<std::size_t>(length)};
}

std::optional<std::int64_t> parse_step_name(std::string_view name) {
  if (!name.starts_with(kPrefix) || name.size() < kPrefix.size() + kLeastDigits) {
    return std::nullopt;
  }
  const std::string_view digits = name.substr(kPrefix.size());
  std::int64_t step = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (error != std::errc() || end != digits.data() + digits.size() || step < 0) {
    return std::nullopt;
  }
  return step;
}

std::string find_folder(const std::string& path) {
  const std::string clean = fs::path(path).lexically_normal().string();
  const std::string name =
      fs::path(clean.ends_with('/') ? clean.substr(0, clean.size() - 1) : clean)
          .filename()
          .string();
  if (name.starts_with(kPrefix) && name.ends_with(kPartialSuffix)) {
    HS_FAIL(
        IoError,
        "checkpoint: ",
        path,
        ": is an unfinished checkpoint, which an interrupted save left"
    );
  }
  if (is_there(fs::path(path) / kManifestFile)) {
    return path;
  }
  const std::string latest = find_latest(path);
  if (latest.empty()) {
    HS_FAIL(
        IoError,
        "checkpoint: ",
        path,
        is_there(path) ? ": holds neither a checkpoint nor a 'latest' file" : ": does not exist"
    );
  }
  return latest;
}

}  // namespace internal

std::string find_latest(const std::string& directory) {
  const fs::path file = fs::path(directory) / internal::kLatestFile;
  if (!is_there(file)) {
    return {};
  }
  const std::string name = trimmed(internal::read_text(file.string()));
  // Anything but the name of a checkpoint here could point anywhere.
  if (!internal::parse_step_name(name)) {
    HS_FAIL(
        IoError,
        "checkpoint: ",
        file.string(),
        ": names '",
        name.substr(0, 80),
        "'; expected the name of a checkpoint, step-NNNNNNNN"
    );
  }
  const fs::path folder = fs::path(directory) / name;
  if (!is_there(folder / internal::kManifestFile)) {
    HS_FAIL(
        IoError,
        "checkpoint: ",
        file.string(),
        ": names ",
        name,
        ", which is not there or not whole",
        HS_HINT("pass the path of another checkpoint in ", directory)
    );
  }
  return folder.string();
}

std::vector<std::string> prune(const std::string& directory, int keep) {
  HS_CHECK_GE(keep, 0, "checkpoint: keep counts checkpoints");
  if (!is_there(directory)) {
    return {};
  }
  std::vector<std::pair<std::int64_t, std::string>> whole;
  std::vector<std::string> doomed;
  for (const std::string& name : list_names(directory)) {
    if (name.starts_with(kPrefix) && name.ends_with(internal::kPartialSuffix)) {
      doomed.push_back(name);
    } else if (const auto step = internal::parse_step_name(name)) {
      whole.emplace_back(*step, name);
    }
  }
  std::sort(whole.rbegin(), whole.rend());
  const std::string latest = fs::path(find_latest(directory)).filename().string();
  if (keep > 0 && whole.size() > static_cast<std::size_t>(keep)) {
    for (auto old = whole.begin() + keep; old != whole.end(); ++old) {
      if (old->second != latest) {
        doomed.push_back(old->second);
      }
    }
  }
  std::sort(doomed.begin(), doomed.end());
  std::vector<std::string> removed;
  for (const std::string& name : doomed) {
    const std::string path = (fs::path(directory) / name).string();
    std::string partial = path;
    if (!name.ends_with(internal::kPartialSuffix)) {
      // Renamed first: what is half removed must not look like a checkpoint.
      partial += internal::kPartialSuffix;
      internal::replace_folder(path, partial);
    }
    internal::remove_tree(partial);
    removed.push_back(path);
  }
  return removed;
}

}  // namespace hypershard::checkpoint
