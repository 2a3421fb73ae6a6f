// Why: the comparing half of HS_CHECK_EQ and its kin: compares as a reader expects and keeps both
// values. Not for direct use; error.h includes it.
#pragma once

#include <string>
#include <type_traits>
#include <utility>

#include "hypershard/core/text.h"

namespace hypershard::internal {

template <class T>
concept PlainInteger =
    std::is_integral_v<T> && !std::is_same_v<T, bool> && !std::is_same_v<T, char>;

// Integers of mixed sign compare by value: -1 is not equal to SIZE_MAX. `<=` is not `!(b < a)`,
// since a NaN must fail every check.
struct Equal {
  template <class A, class B>
  constexpr bool operator()(const A& a, const B& b) const {
    if constexpr (PlainInteger<A> && PlainInteger<B>) {
      return std::cmp_equal(a, b);
    } else {
      return a == b;
    }
  }
};

struct NotEqual {
  template <class A, class B>
  constexpr bool operator()(const A& a, const B& b) const {
    return !Equal()(a, b);
  }
};

struct Less {
  template <class A, class B>
  constexpr bool operator()(const A& a, const B& b) const {
    if constexpr (PlainInteger<A> && PlainInteger<B>) {
      return std::cmp_less(a, b);
    } else {
      return a < b;
    }
  }
};

struct LessEqual {
  template <class A, class B>
  constexpr bool operator()(const A& a, const B& b) const {
    if constexpr (PlainInteger<A> && PlainInteger<B>) {
      return std::cmp_less_equal(a, b);
    } else {
      return a <= b;
    }
  }
};

struct Greater {
  template <class A, class B>
  constexpr bool operator()(const A& a, const B& b) const {
    return Less()(b, a);
  }
};

struct GreaterEqual {
  template <class A, class B>
  constexpr bool operator()(const A& a, const B& b) const {
    return LessEqual()(b, a);
  }
};

/// The text of a comparison that does not hold, or nothing.
class Compared {
 public:
  Compared() = default;
  explicit Compared(std::string text) : text_(new std::string(std::move(text))) {}
  ~Compared() { delete text_; }
  Compared(const Compared&) = delete;
  Compared& operator=(const Compared&) = delete;

  bool failed() const { return text_ != nullptr; }
  const std::string& text() const { return *text_; }

 private:
  std::string* text_ = nullptr;  // owned; one pointer, so that success costs a null test
};

template <class A, class B>
[[gnu::cold, gnu::noinline]] Compared compared_text(
    const char* expression, const A& a, const B& b
) {
  return Compared(concat_text(expression, " (", a, " vs. ", b, ")"));
}

// A function, so that temporaries in the operands live until both are compared and printed.
template <class Holds, class A, class B>
Compared compare(const char* expression, const A& a, const B& b) {
  if (Holds()(a, b)) [[likely]] {
    return Compared();
  }
  return compared_text(expression, a, b);
}

}  // namespace hypershard::internal
