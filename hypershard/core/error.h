// Why: every failure carries its cause, its place, its rank and what to do, in one form everywhere.
// The macros cost a branch; text is made only on failure, out of line.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "hypershard/core/compared.h"
#include "hypershard/core/error_context.h"
#include "hypershard/core/text.h"

namespace hypershard {

/// Kinds of failure; the program derives its exit status from them.
enum class ErrorCode {
  kInvalidArgument,  ///< the caller's mistake: a value, a call order, a configuration
  kUnsupported,      ///< valid, but not built in or not implemented here
  kComm,             ///< a peer, a link or a collective failed; the communicator is unusable
  kIo,               ///< a file or device failed
  kInternal,         ///< our bug
};

/// Names a code as messages and metrics write it, e.g. `invalid_argument`.
std::string_view to_text(ErrorCode code);

/// What an error is built from; a plain string is a message alone. The macros fill the rest.
struct ErrorText {
  ErrorText(std::string text) : message(std::move(text)) {}  // NOLINT: implicit on purpose
  ErrorText(std::string_view text) : message(text) {}        // NOLINT: implicit on purpose
  ErrorText(const char* text) : message(text) {}             // NOLINT: implicit on purpose

  std::string message;         ///< subject, what is wrong, values
  std::string hint;            ///< what to do; lines separated by '\n', may be empty
  std::string check;           ///< the failed expression, may be empty
  const char* file = nullptr;  ///< source file or null
  int line = 0;
};

/// Base of everything the library throws.
///
/// The constructor adds the rank (`set_error_rank`) in front and the thread's `ErrorContext`s
/// behind:
/// ```
/// [rank 5/8] layout.mesh: unknown axis 'shrad': the mesh has axes replicate, shard, tp
///   hint: did you mean 'shard'?
///   check: mesh.has_axis(name)   at hypershard/layout/mesh.cpp:88   while: fully_shard > blocks.3
/// ```
/// Copies are cheap enough to keep in a `std::exception_ptr`; nothing here refers to the thrower's
/// stack.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const ErrorText& text);

  ErrorCode code() const noexcept { return code_; }
  /// Returns the message and its hints without check, place, context and stack: what a user reads
  /// first.
  std::string what_brief() const { return std::string(what(), brief_length_); }

 private:
  struct Composed;
  Error(ErrorCode code, const Composed& composed);

  ErrorCode code_;
  std::size_t brief_length_;
};

/// The caller's mistake.
class InvalidArgument : public Error {
 public:
  explicit InvalidArgument(const ErrorText& text) : Error(ErrorCode::kInvalidArgument, text) {}
};

/// A valid request that this build or version cannot serve.
class Unsupported : public Error {
 public:
  explicit Unsupported(const ErrorText& text) : Error(ErrorCode::kUnsupported, text) {}
};

/// A failed peer, link or collective.
class CommError : public Error {
 public:
  explicit CommError(const ErrorText& text) : Error(ErrorCode::kComm, text) {}
};

/// A failed file or device.
class IoError : public Error {
 public:
  explicit IoError(const ErrorText& text) : Error(ErrorCode::kIo, text) {}
};

/// A broken invariant of ours; the only type whose text ends with a stack trace.
class InternalError : public Error {
 public:
  explicit InternalError(const ErrorText& text) : Error(ErrorCode::kInternal, text) {}
};

/// Describes an errno value: `No such file or directory (errno 2)`.
std::string errno_text(int error_number);

/// A part that becomes a line of its own: `  hint: ...`.
struct Hint {
  std::string text;
};

/// Makes a hint part; `HS_HINT` is the same.
template <class... Parts>
Hint hs_hint(const Parts&... parts) {
  return Hint{concat_text(parts...)};
}

namespace internal {

void add_hint(ErrorText& text, const Hint& hint);

template <class Part>
void add_part(ErrorText& text, const Part& part) {
  if constexpr (std::is_same_v<Part, Hint>) {
    add_hint(text, part);
  } else {
    text.message += text_of(part);
  }
}

template <class Type, class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void fail(
    const char* file, int line, std::string check, const Parts&... parts
) {
  ErrorText text{std::string()};
  text.check = std::move(check);
  text.file = file;
  text.line = line;
  (add_part(text, parts), ...);
  throw Type(text);  // raw-throw: the one place behind every macro
}

}  // namespace internal
}  // namespace hypershard

/// Throws `type` with `parts`. A type of your own must be constructible from `ErrorText`.
#define HS_FAIL(type, ...) ::hypershard::internal::fail<type>(__FILE__, __LINE__, {}, __VA_ARGS__)

#define HS_HINT(...) ::hypershard::hs_hint(__VA_ARGS__)

#define HS_INTERNAL_CHECK(type, condition, expression, ...)         \
  do {                                                              \
    if (!(condition)) [[unlikely]] {                                \
      ::hypershard::internal::fail<::hypershard::type>(             \
          __FILE__, __LINE__, expression __VA_OPT__(, ) __VA_ARGS__ \
      );                                                            \
    }                                                               \
  } while (false)

#define HS_INTERNAL_COMPARE(holds, expression, a, b, ...)                                         \
  do {                                                                                            \
    if (const auto& hs_compared =                                                                 \
            ::hypershard::internal::compare<::hypershard::internal::holds>(expression, (a), (b)); \
        hs_compared.failed()) [[unlikely]] {                                                      \
      ::hypershard::internal::fail<::hypershard::InvalidArgument>(                                \
          __FILE__, __LINE__, hs_compared.text() __VA_OPT__(, ) __VA_ARGS__                       \
      );                                                                                          \
    }                                                                                             \
  } while (false)

/// The caller's mistake -> InvalidArgument.
#define HS_CHECK(condition, ...) \
  HS_INTERNAL_CHECK(InvalidArgument, condition, #condition __VA_OPT__(, ) __VA_ARGS__)
/// The same for two values, both printed. Each is evaluated once; integers compare by value.
#define HS_CHECK_EQ(a, b, ...) \
  HS_INTERNAL_COMPARE(Equal, #a " == " #b, a, b __VA_OPT__(, ) __VA_ARGS__)
#define HS_CHECK_NE(a, b, ...) \
  HS_INTERNAL_COMPARE(NotEqual, #a " != " #b, a, b __VA_OPT__(, ) __VA_ARGS__)
#define HS_CHECK_LT(a, b, ...) \
  HS_INTERNAL_COMPARE(Less, #a " < " #b, a, b __VA_OPT__(, ) __VA_ARGS__)
#define HS_CHECK_LE(a, b, ...) \
  HS_INTERNAL_COMPARE(LessEqual, #a " <= " #b, a, b __VA_OPT__(, ) __VA_ARGS__)
#define HS_CHECK_GT(a, b, ...) \
  HS_INTERNAL_COMPARE(Greater, #a " > " #b, a, b __VA_OPT__(, ) __VA_ARGS__)
#define HS_CHECK_GE(a, b, ...) \
  HS_INTERNAL_COMPARE(GreaterEqual, #a " >= " #b, a, b __VA_OPT__(, ) __VA_ARGS__)
/// Not available in this build -> Unsupported.
#define HS_SUPPORTED(condition, ...) \
  HS_INTERNAL_CHECK(Unsupported, condition, #condition __VA_OPT__(, ) __VA_ARGS__)
/// Our own invariant, also in release builds -> InternalError.
#define HS_ASSERT(condition, ...) \
  HS_INTERNAL_CHECK(InternalError, condition, #condition __VA_OPT__(, ) __VA_ARGS__)
/// As HS_ASSERT; compiled but not evaluated when NDEBUG is defined.
#ifdef NDEBUG
#define HS_DCHECK(condition, ...)                      \
  do {                                                 \
    if (false) {                                       \
      HS_ASSERT(condition __VA_OPT__(, ) __VA_ARGS__); \
    }                                                  \
  } while (false)
#else
#define HS_DCHECK(condition, ...) HS_ASSERT(condition __VA_OPT__(, ) __VA_ARGS__)
#endif
