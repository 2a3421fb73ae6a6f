// The forms met: `[/path/pair.cc:553] Connection closed by peer [127.0.0.1]:3995. This is typically
// …` (Gloo) and `message\nException raised from …` (c10).
#include "hypershard/comm/c10d/internal/backend_text.h"

#include <algorithm>

#include <c10/util/Exception.h>

namespace hypershard::comm::internal {

std::string backend_text(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  std::string text = torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
  text = text.substr(0, text.find('\n'));
  if (text.starts_with("[/")) {
    const std::size_t end = text.find("] ");
    text = end == std::string::npos ? text : text.substr(end + 2);
  }
  return text.substr(0, text.find(". This is typically"));
}

}  // namespace hypershard::comm::internal
