// Why: the tests of this folder write files, damage them, and read messages; all need the same two
// tools. Tests only; not installed.
#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <unistd.h>

#include <gtest/gtest.h>

namespace hypershard::data {

/// An empty folder that lives as long as the object.
class ScratchFolder {
 public:
  ScratchFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "hs_data_XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~ScratchFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::string path() const { return path_.string(); }

  /// Writes a file, making its folders, and returns its path.
  std::string write(const std::string& name, std::string_view content) const {
    std::filesystem::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name, std::ios::binary) << content;
    return (path_ / name).string();
  }

 private:
  std::filesystem::path path_;
};

inline std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/// Runs `action` and returns the text of the `Type` it throws; fails the test for anything else.
template <class Type, class Action>
std::string thrown_text(const Action& action) {
  try {
    action();
  } catch (const Type& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another type was thrown: " << error.what();
    return {};
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

inline bool has(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

#define HS_EXPECT_HAS(text, part) \
  EXPECT_TRUE(::hypershard::data::has(text, part)) << "'" << (part) << "' is not in: " << (text)

}  // namespace hypershard::data
