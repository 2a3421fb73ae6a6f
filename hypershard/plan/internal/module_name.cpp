// See module_name.h.
#include "hypershard/plan/internal/module_name.h"

#include <cstddef>

namespace hypershard::plan::internal {

bool names_module(const std::string& text, const std::string& module) {
  for (std::size_t at = text.find(module); at != std::string::npos;
       at = text.find(module, at + 1)) {
    const std::size_t end = at + module.size();
    const bool begins = at == 0 || text[at - 1] == ' ';
    const bool ends = end == text.size() || text[end] == ' ' || text[end] == '.';
    if (begins && ends) {
      return true;
    }
  }
  return false;
}

}  // namespace hypershard::plan::internal
