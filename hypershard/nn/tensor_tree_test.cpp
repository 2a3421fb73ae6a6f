// Tests that tensors are found in every kind of container and that everything else is left alone.
#include "hypershard/nn/tensor_tree.h"

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/ordered_dict.h>

namespace routing {

struct Routed {
  at::Tensor tokens;
  std::vector<at::Tensor> by_expert;
  int dropped = 0;
};

template <class F>
void for_each_tensor(Routed& routed, const F& f) {
  f(routed.tokens);
  hypershard::nn::visit_tensors(routed.by_expert, f);
}

}  // namespace routing

namespace hypershard::nn {
namespace {

at::Tensor number(double value) {
  return at::scalar_tensor(value, at::kDouble);
}

// The values of the tensors in the order of the visit; undefined ones count as -1.
template <class T>
std::vector<double> values_of(T& tree) {
  std::vector<double> values;
  visit_tensors(tree, [&](at::Tensor& tensor) {
    values.push_back(tensor.defined() ? tensor.item<double>() : -1);
  });
  return values;
}

using Values = std::vector<double>;

TEST(TensorTreeTest, VisitsATensorItself) {
  auto tree = number(7);
  EXPECT_EQ(values_of(tree), Values({7}));
}

TEST(TensorTreeTest, VisitsUndefinedTensorsSoThatTheyCanBeReplaced) {
  at::Tensor tree;
  EXPECT_EQ(values_of(tree), Values({-1}));
  visit_tensors(tree, [](at::Tensor& tensor) { tensor = number(3); });
  EXPECT_EQ(tree.item<double>(), 3);
}

TEST(TensorTreeTest, VisitsContainersInOrder) {
  std::vector<at::Tensor> vector = {number(1), number(2)};
  EXPECT_EQ(values_of(vector), Values({1, 2}));
  std::array<at::Tensor, 2> array = {number(3), number(4)};
  EXPECT_EQ(values_of(array), Values({3, 4}));
  std::pair<at::Tensor, at::Tensor> pair = {number(5), number(6)};
  EXPECT_EQ(values_of(pair), Values({5, 6}));
  std::tuple<at::Tensor, int, at::Tensor> tuple = {number(7), 0, number(8)};
  EXPECT_EQ(values_of(tuple), Values({7, 8}));
  std::map<std::string, at::Tensor> map = {{"b", number(2)}, {"a", number(1)}};
  EXPECT_EQ(values_of(map), Values({1, 2}));
  torch::OrderedDict<std::string, at::Tensor> dict;
  dict.insert("z", number(1));
  dict.insert("a", number(2));
  EXPECT_EQ(values_of(dict), Values({1, 2}));
}

TEST(TensorTreeTest, VisitsHashTablesInTheOrderOfTheirKeys) {
  std::unordered_map<std::string, at::Tensor> map;
  for (int i = 0; i < 50; ++i) {
    map.emplace(std::string(1, static_cast<char>('A' + i)), number(i));
  }
  Values expected;
  for (int i = 0; i < 50; ++i) {
    expected.push_back(i);
  }
  EXPECT_EQ(values_of(map), expected);
}

TEST(TensorTreeTest, VisitsWhatAnOptionalOrVariantHoldsNow) {
  std::optional<at::Tensor> optional;
  EXPECT_EQ(values_of(optional), Values());
  optional = number(1);
  EXPECT_EQ(values_of(optional), Values({1}));
  std::variant<int, at::Tensor> variant = 3;
  EXPECT_EQ(values_of(variant), Values());
  variant = number(2);
  EXPECT_EQ(values_of(variant), Values({2}));
}

TEST(TensorTreeTest, VisitsNestedContainersAndReplacesInPlace) {
  using Tree = std::map<
      std::string,
      std::vector<std::tuple<at::Tensor, std::optional<std::pair<at::Tensor, double>>>>>;
  Tree tree;
  tree["x"].push_back({number(1), std::pair(number(2), 0.5)});
  tree["x"].push_back({number(3), std::nullopt});
  tree["y"].push_back({number(4), std::pair(number(5), 1.5)});
  EXPECT_EQ(values_of(tree), Values({1, 2, 3, 4, 5}));
  visit_tensors(tree, [](at::Tensor& tensor) { tensor = tensor * 10; });
  EXPECT_EQ(values_of(tree), Values({10, 20, 30, 40, 50}));
}

TEST(TensorTreeTest, VisitsStructsThroughTheirHookAlsoInsideContainers) {
  std::vector<routing::Routed> tree(2);
  tree[0] = {number(1), {number(2), number(3)}, 4};
  tree[1] = {number(5), {}, 6};
  EXPECT_EQ(values_of(tree), Values({1, 2, 3, 5}));
}

TEST(TensorTreeTest, LeavesEverythingElseAlone) {
  EXPECT_TRUE(kHoldsTensors<at::Tensor>);
  EXPECT_TRUE(kHoldsTensors<std::vector<routing::Routed>>);
  EXPECT_FALSE(kHoldsTensors<int>);
  EXPECT_FALSE(kHoldsTensors<std::string>);
  EXPECT_FALSE(kHoldsTensors<std::vector<bool>>);
  EXPECT_FALSE(kHoldsTensors<at::Tensor*>);
  EXPECT_FALSE(kHoldsTensors<std::shared_ptr<at::Tensor>>);
  EXPECT_FALSE((kHoldsTensors<std::tuple<int, std::map<std::string, double>>>));
  EXPECT_FALSE((kHoldsTensors<std::vector<std::unique_ptr<int>>>));
}

}  // namespace
}  // namespace hypershard::nn
