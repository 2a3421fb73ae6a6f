// Why: the expensive half of text.h (number formatting, string streams), compiled once.
// Numbers are written in the shortest form that reads back as the same value.
#include "hypershard/core/text.h"

#include <charconv>
#include <sstream>

namespace hypershard::internal {
namespace {

template <class T>
std::string shortest(T value) {
  char buffer[64];
  const auto result = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return std::string(buffer, result.ptr);
}

}  // namespace

std::string bool_text(bool value) {
  return value ? "true" : "false";
}
std::string signed_text(long long value) {
  return shortest(value);
}
std::string unsigned_text(unsigned long long value) {
  return shortest(value);
}
std::string float_text(float value) {
  return shortest(value);
}
std::string double_text(double value) {
  return shortest(value);
}

std::string pointer_text(const void* value) {
  if (value == nullptr) {
    return "null";
  }
  char buffer[2 + 2 * sizeof(value)] = {'0', 'x'};
  const auto result = std::to_chars(
      buffer + 2, buffer + sizeof(buffer), reinterpret_cast<unsigned long long>(value), 16
  );
  return std::string(buffer, result.ptr);
}

struct StreamText::Impl {
  std::ostringstream stream;
};

StreamText::StreamText() : impl_(new Impl) {}
StreamText::~StreamText() {
  delete impl_;
}
std::ostream& StreamText::stream() {
  return impl_->stream;
}
std::string StreamText::str() const {
  return impl_->stream.str();
}

}  // namespace hypershard::internal
