// Finds the tensors inside a module's arguments and results, however they are nested, so that
// forward hooks can see and replace them without knowing the module.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch {
template <typename Key, typename Value>
class OrderedDict;
}

namespace hypershard::nn {

/// NOTE [tensor trees]: a tree is a tensor or an optional, pair, tuple, array, vector, variant,
/// map, unordered_map or torch::OrderedDict of trees, or a struct of the author's that says where
/// its tensors are by a free function in its own namespace, found by argument-dependent lookup:
///
///   template <class F>
///   void for_each_tensor(RoutedTokens& routed, const F& f) {
///     f(routed.tokens);                                    // a tensor: call f
///     hypershard::nn::visit_tensors(routed.by_expert, f);  // a tree: visit it
///   }
///
/// Everything else (numbers, strings, pointers, modules) is a leaf that nobody looks into, and so
/// is a const element inside a container: a hook could not replace it.

namespace internal {

struct TensorProbe {
  void operator()(at::Tensor& tensor) const;
};

template <class T>
concept HasTensorHook = std::is_class_v<T> && requires(T& value, const TensorProbe& probe) {
  for_each_tensor(value, probe);
};

template <class T>
struct TreeOf {
  static constexpr bool kHoldsTensors = HasTensorHook<T>;
  template <class F>
  static void visit(T& value, const F& f) {
    for_each_tensor(value, f);
  }
};

template <class T>
struct TreeOf<const T> {
  static constexpr bool kHoldsTensors = false;
};

template <>
struct TreeOf<at::Tensor> {
  static constexpr bool kHoldsTensors = true;
  template <class F>
  static void visit(at::Tensor& value, const F& f) {
    f(value);
  }
};

template <class T, class F>
void visit_tree(T& value, const F& f) {
  if constexpr (TreeOf<T>::kHoldsTensors) {
    TreeOf<T>::visit(value, f);
  }
}

template <class T>
struct TreeOf<std::optional<T>> {
  static constexpr bool kHoldsTensors = TreeOf<T>::kHoldsTensors;
  template <class F>
  static void visit(std::optional<T>& value, const F& f) {
    if (value.has_value()) {
      visit_tree(*value, f);
    }
  }
};

template <class Range, class Element>
struct RangeTree {
  static constexpr bool kHoldsTensors = TreeOf<Element>::kHoldsTensors;
  template <class F>
  static void visit(Range& range, const F& f) {
    for (Element& element : range) {
      visit_tree(element, f);
    }
  }
};

template <class T, class Allocator>
struct TreeOf<std::vector<T, Allocator>> : RangeTree<std::vector<T, Allocator>, T> {};

template <class T, std::size_t N>
struct TreeOf<std::array<T, N>> : RangeTree<std::array<T, N>, T> {};

template <class Tuple, class... Elements>
struct TupleTree {
  static constexpr bool kHoldsTensors = (TreeOf<Elements>::kHoldsTensors || ...);
  template <class F>
  static void visit(Tuple& tuple, const F& f) {
    std::apply([&f](auto&... elements) { (visit_tree(elements, f), ...); }, tuple);
  }
};

template <class... Elements>
struct TreeOf<std::tuple<Elements...>> : TupleTree<std::tuple<Elements...>, Elements...> {};

template <class First, class Second>
struct TreeOf<std::pair<First, Second>> : TupleTree<std::pair<First, Second>, First, Second> {};

template <class... Alternatives>
struct TreeOf<std::variant<Alternatives...>> {
  static constexpr bool kHoldsTensors = (TreeOf<Alternatives>::kHoldsTensors || ...);
  template <class F>
  static void visit(std::variant<Alternatives...>& value, const F& f) {
    std::visit([&f](auto& alternative) { visit_tree(alternative, f); }, value);
  }
};

template <class Key, class Value, class... Rest>
struct TreeOf<std::map<Key, Value, Rest...>> {
  static constexpr bool kHoldsTensors = TreeOf<Value>::kHoldsTensors;
  template <class F>
  static void visit(std::map<Key, Value, Rest...>& map, const F& f) {
    for (auto& [key, value] : map) {
      visit_tree(value, f);
    }
  }
};

// In the order of the keys: the order of a hash table may differ between ranks.
template <class Key, class Value, class... Rest>
struct TreeOf<std::unordered_map<Key, Value, Rest...>> {
  static constexpr bool kHoldsTensors = TreeOf<Value>::kHoldsTensors;
  template <class F>
  static void visit(std::unordered_map<Key, Value, Rest...>& map, const F& f) {
    std::vector<std::pair<const Key, Value>*> entries;
    for (auto& entry : map) {
      entries.push_back(&entry);
    }
    std::sort(entries.begin(), entries.end(), [](const auto* a, const auto* b) {
      return a->first < b->first;
    });
    for (auto* entry : entries) {
      visit_tree(entry->second, f);
    }
  }
};

template <class Key, class Value>
struct TreeOf<torch::OrderedDict<Key, Value>> {
  static constexpr bool kHoldsTensors = TreeOf<Value>::kHoldsTensors;
  template <class F>
  static void visit(torch::OrderedDict<Key, Value>& dict, const F& f) {
    for (auto& item : dict) {
      visit_tree(item.value(), f);
    }
  }
};

}  // namespace internal

/// Tells whether a value of type `T` may hold tensors that visit_tensors() reaches.
template <class T>
inline constexpr bool kHoldsTensors = internal::TreeOf<T>::kHoldsTensors;

/// Calls `f(at::Tensor&)` for every tensor of `tree`, undefined ones too, in a fixed order (see
/// NOTE [tensor trees]).
template <class T, class F>
void visit_tensors(T& tree, const F& f) {
  internal::visit_tree(tree, f);
}

}  // namespace hypershard::nn
