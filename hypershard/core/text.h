// Why: error and log messages name values of any type, and the headers that do so must stay cheap.
// `text_of(value)` is the one way from a value to text; a type joins in with a `to_text` of its
// own.
#pragma once

#include <concepts>
#include <cstddef>
#include <iosfwd>
#include <string>
#include <string_view>
#include <type_traits>

namespace hypershard {

namespace internal {

std::string bool_text(bool value);
std::string signed_text(long long value);
std::string unsigned_text(unsigned long long value);
std::string float_text(float value);
std::string double_text(double value);
std::string pointer_text(const void* value);

/// Longest range that is printed whole.
inline constexpr std::size_t kMaxRangeItems = 16;

/// Holds a string stream out of line, so that no header needs <sstream>.
class StreamText {
 public:
  StreamText();
  ~StreamText();
  StreamText(const StreamText&) = delete;
  StreamText& operator=(const StreamText&) = delete;

  std::ostream& stream();
  std::string str() const;

 private:
  struct Impl;
  Impl* impl_;  // owned; a unique_ptr would cost every includer <memory>
};

template <class T>
concept HasToText = requires(const T& value) {
  { to_text(value) } -> std::convertible_to<std::string_view>;
};

template <class T>
concept StringLike = std::is_convertible_v<const T&, std::string_view>;

template <class T>
concept OptionalLike = requires(const T& value) {
  { value.has_value() } -> std::convertible_to<bool>;
  *value;
};

template <class T>
concept PairLike = requires(const T& value) {
  value.first;
  value.second;
};

// A path is a range of paths: the last condition leaves such types to operator<<.
template <class T>
concept RangeLike = requires(const T& value) {
  value.begin() != value.end();
  *value.begin();
} && !std::is_same_v<std::remove_cvref_t<decltype(*std::declval<const T&>().begin())>, T>;

template <class T>
concept Streamable = requires(std::ostream& stream, const T& value) { stream << value; };

template <class>
inline constexpr bool kNoTextForm = false;

template <class T>
std::string range_text(const T& range);
template <class T>
std::string arithmetic_text(T value);

}  // namespace internal

/// Writes `value` as text for a message.
///
/// A type's own `to_text(const T&)`, found in the type's namespace, comes first. Then: numbers with
/// as many digits as tell them apart, strings as they are, ranges as `[1, 2, 3]` (cut after 16
/// items), pairs as `a: b`, an empty optional as `none`, what has an `operator<<`, enumerators by
/// number, pointers as addresses.
template <class T>
std::string text_of(const T& value) {
  if constexpr (std::is_arithmetic_v<T>) {
    return internal::arithmetic_text(value);
  } else if constexpr (std::is_null_pointer_v<T>) {
    return "null";
  } else if constexpr (internal::HasToText<T>) {
    return std::string(to_text(value));
  } else if constexpr (internal::StringLike<T>) {
    if constexpr (std::is_pointer_v<T>) {
      return value == nullptr ? std::string("null") : std::string(value);
    } else {
      return std::string(static_cast<std::string_view>(value));
    }
  } else if constexpr (std::is_pointer_v<T>) {
    return internal::pointer_text(reinterpret_cast<const void*>(value));
  } else if constexpr (internal::OptionalLike<T>) {
    return value.has_value() ? text_of(*value) : std::string("none");
  } else if constexpr (internal::RangeLike<T>) {
    return internal::range_text(value);
  } else if constexpr (internal::PairLike<T>) {
    return text_of(value.first) + ": " + text_of(value.second);
  } else if constexpr (std::is_enum_v<T> && !internal::Streamable<T>) {
    return text_of(static_cast<std::underlying_type_t<T>>(value));
  } else if constexpr (internal::Streamable<T>) {
    internal::StreamText text;
    text.stream() << value;
    return text.str();
  } else {
    static_assert(
        internal::kNoTextForm<T>, "give this type a `to_text(const T&)` in its namespace"
    );
  }
}

namespace internal {

template <class T>
std::string range_text(const T& range) {
  std::string text = "[";
  std::size_t num_items = 0;
  for (auto it = range.begin(); it != range.end(); ++it, ++num_items) {
    if (num_items < kMaxRangeItems) {
      text += num_items == 0 ? "" : ", ";
      if constexpr (std::is_convertible_v<decltype(*it), bool> &&
                    !std::is_reference_v<decltype(*it)> && std::is_class_v<decltype(*it)>) {
        text += bool_text(*it);  // vector<bool> hands out proxies
      } else {
        text += text_of(*it);
      }
    }
  }
  if (num_items > kMaxRangeItems) {
    text += ", ... (" + unsigned_text(num_items) + " in all)";
  }
  return text + "]";
}

template <class T>
std::string arithmetic_text(T value) {
  if constexpr (std::is_same_v<T, bool>) {
    return bool_text(value);
  } else if constexpr (std::is_same_v<T, char>) {
    return std::string(1, value);
  } else if constexpr (std::is_same_v<T, float>) {
    return float_text(value);
  } else if constexpr (std::is_floating_point_v<T>) {
    return double_text(static_cast<double>(value));
  } else if constexpr (std::is_signed_v<T>) {
    return signed_text(value);
  } else {
    return unsigned_text(value);
  }
}

}  // namespace internal

/// Writes all `parts` one after another.
template <class... Parts>
std::string concat_text(const Parts&... parts) {
  std::string text;
  ((text += text_of(parts)), ...);
  return text;
}

}  // namespace hypershard
