// Why: composing an error's text (rank, hints, check, place, context, stack) happens once, here, so
// that throwing sites stay small. Nothing in this file runs unless something failed.
#include "hypershard/core/error.h"

#include <cstdlib>
#include <cstring>
#include <cxxabi.h>
#include <execinfo.h>

#include "hypershard/core/internal/source_path.h"

namespace hypershard {
namespace {

constexpr int kMaxFrames = 48;

/// Turns glibc's `object(mangled+0x12) [0xabc]` into `function+0x12 in object`; other forms stay as
/// they are.
std::string readable_frame(std::string_view frame) {
  const std::size_t open = frame.find('(');
  const std::size_t plus = frame.find('+', open);
  if (open == std::string_view::npos || plus == std::string_view::npos || plus == open + 1) {
    return std::string(frame);
  }
  const std::size_t close = frame.find(')', plus);
  const std::string mangled(frame.substr(open + 1, plus - open - 1));
  int status = 0;
  char* demangled = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  std::string text = status == 0 ? demangled : mangled;
  std::free(demangled);
  text += std::string(frame.substr(plus, close - plus)) + " in ";
  const std::size_t slash = frame.substr(0, open).rfind('/');
  const std::size_t begin = slash == std::string_view::npos ? 0 : slash + 1;
  return text + std::string(frame.substr(begin, open - begin));
}

std::string stack_text() {
  void* frames[kMaxFrames];
  const int num_frames = backtrace(frames, kMaxFrames);
  char** symbols = backtrace_symbols(frames, num_frames);
  if (symbols == nullptr) {
    return "";
  }
  std::string text = "\n  stack:";
  for (int i = 2; i < num_frames; ++i) {  // the first two are this function and the constructor
    text += "\n    #" + std::to_string(i - 2) + " " + readable_frame(symbols[i]);
  }
  std::free(symbols);
  return text;
}

std::string rank_prefix(std::string_view message) {
  const ErrorRank rank = error_rank();
  // An error that passes on another's text already names the rank that failed.
  if (rank.rank < 0 || message.starts_with("[rank ")) {
    return "";
  }
  return "[rank " + std::to_string(rank.rank) + "/" + std::to_string(rank.world_size) + "] ";
}

void append_hints(std::string& text, std::string_view hints) {
  while (!hints.empty()) {
    const std::size_t end = hints.find('\n');
    text += "\n  hint: ";
    text += hints.substr(0, end);
    hints = end == std::string_view::npos ? std::string_view() : hints.substr(end + 1);
  }
}

/// Writes `check: ...   at file:line   while: a > b`, of which any part may be missing.
std::string detail_line(const ErrorText& text) {
  std::string line;
  const auto add = [&line](std::string_view label, std::string_view value) {
    line += line.empty() ? "\n  " : "   ";
    line += label;
    line += value;
  };
  if (!text.check.empty()) {
    add("check: ", text.check);
  }
  if (text.file != nullptr) {
    add("at ", std::string(internal::repo_relative(text.file)) + ":" + std::to_string(text.line));
  }
  if (const std::string context = error_context(); !context.empty()) {
    add("while: ", context);
  }
  return line;
}

}  // namespace

std::string_view to_text(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return "invalid_argument";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kComm:
      return "comm";
    case ErrorCode::kIo:
      return "io";
    case ErrorCode::kInternal:
      return "internal";
  }
  return "unknown";
}

struct Error::Composed {
  std::string what;
  std::size_t brief_length = 0;
};

Error::Error(ErrorCode code, const ErrorText& text)
    : Error(code, [&] {
        Composed composed;
        composed.what = rank_prefix(text.message) + text.message;
        append_hints(composed.what, text.hint);
        composed.brief_length = composed.what.size();
        composed.what += detail_line(text);
        if (code == ErrorCode::kInternal) {
          composed.what += stack_text();
        }
        return composed;
      }()) {}

Error::Error(ErrorCode code, const Composed& composed)
    : std::runtime_error(composed.what), code_(code), brief_length_(composed.brief_length) {}

std::string errno_text(int error_number) {
  char buffer[256];
  // The GNU form, which returns the text and may ignore the buffer.
  const char* text = strerror_r(error_number, buffer, sizeof(buffer));
  return std::string(text) + " (errno " + std::to_string(error_number) + ")";
}

namespace internal {

void add_hint(ErrorText& text, const Hint& hint) {
  text.hint += text.hint.empty() ? "" : "\n";
  text.hint += hint.text;
}

}  // namespace internal
}  // namespace hypershard
