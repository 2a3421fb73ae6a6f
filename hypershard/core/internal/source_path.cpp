// Why: see source_path.h. The root is read off this file's own path, which the compiler was given
// in the same form as every other.
#include "hypershard/core/internal/source_path.h"

namespace hypershard::internal {

std::string_view repo_relative(std::string_view file) {
  constexpr std::string_view kThis = __FILE__;
  constexpr std::string_view kThisInRepo = "hypershard/core/internal/source_path.cpp";
  if (kThis.ends_with(kThisInRepo)) {
    const std::string_view root = kThis.substr(0, kThis.size() - kThisInRepo.size());
    if (file.starts_with(root)) {
      return file.substr(root.size());
    }
  }
  return file;
}

std::string_view module_of(std::string_view file) {
  constexpr std::string_view kLibrary = "hypershard/";
  std::string_view path = repo_relative(file);
  if (path.starts_with(kLibrary)) {
    path.remove_prefix(kLibrary.size());
    return path.substr(0, path.find('/'));
  }
  const std::size_t last = path.rfind('/');
  if (last == std::string_view::npos) {
    return path.substr(0, path.rfind('.'));
  }
  const std::string_view folder = path.substr(0, last);
  const std::size_t before = folder.rfind('/');
  return before == std::string_view::npos ? folder : folder.substr(before + 1);
}

}  // namespace hypershard::internal
