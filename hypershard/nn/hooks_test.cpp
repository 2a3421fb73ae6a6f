// Tests that hooks run, in order and balanced, however a module is called and whatever it takes and
// returns.
#include "hypershard/nn/hooks.h"

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "hypershard/core/error.h"
#include "hypershard/nn/test_support.h"

namespace hypershard::nn {
namespace {

using Log = std::vector<std::string>;

/// Writes "name.pre 2" (number of tensors) and the like into a shared log; may replace or throw.
class LoggedHooks : public ForwardHooks {
 public:
  LoggedHooks(std::string name, Log& log) : name_(std::move(name)), log_(log) {}

  void pre_forward(std::span<at::Tensor* const> inputs) override {
    log_.push_back(name_ + ".pre " + std::to_string(inputs.size()));
    if (on_pre) {
      on_pre(inputs);
    }
  }
  void post_forward(std::span<at::Tensor* const> outputs) override {
    log_.push_back(name_ + ".post " + std::to_string(outputs.size()));
    if (on_post) {
      on_post(outputs);
    }
  }
  void forward_failed() noexcept override { log_.push_back(name_ + ".failed"); }

  std::function<void(std::span<at::Tensor* const>)> on_pre;
  std::function<void(std::span<at::Tensor* const>)> on_post;

 private:
  std::string name_;
  Log& log_;
};

std::shared_ptr<LoggedHooks> add_hooks(
    torch::nn::Module& module, const std::string& name, Log& log
) {
  auto hooks = std::make_shared<LoggedHooks>(name, log);
  dynamic_cast<HookPoint&>(module).add_forward_hooks(hooks);
  return hooks;
}

struct DoubleImpl : Hookable<DoubleImpl, at::Tensor(at::Tensor)> {
  explicit DoubleImpl(double start = 1) : start_(start) { reset(); }
  void reset() override { factor = register_parameter("factor", at::full({}, 2 * start_)); }
  at::Tensor forward_impl(at::Tensor x) { return x * factor; }

  at::Tensor factor;

 private:
  double start_;
};
TORCH_MODULE(Double);

// Two inputs, two outputs, a number that is passed through.
struct SumDifferenceImpl
    : Hookable<
          SumDifferenceImpl,
          std::tuple<at::Tensor, at::Tensor>(at::Tensor, const at::Tensor&, double)> {
  std::tuple<at::Tensor, at::Tensor> forward_impl(at::Tensor a, const at::Tensor& b, double scale) {
    return {(a + b) * scale, (a - b) * scale};
  }
};
TORCH_MODULE(SumDifference);

TEST(HooksTest, RunsPreInOrderAndPostInReverse) {
  Log log;
  Double module;
  add_hooks(*module, "a", log);
  add_hooks(*module, "b", log);
  EXPECT_EQ(module->forward(at::ones({2})).sum().item<double>(), 4);
  EXPECT_EQ(log, Log({"a.pre 1", "b.pre 1", "b.post 1", "a.post 1"}));
}

TEST(HooksTest, RemovedHooksRunNoMore) {
  Log log;
  Double module;
  const auto a = add_hooks(*module, "a", log);
  add_hooks(*module, "b", log);
  module->remove_forward_hooks(a.get());
  module->forward(at::ones({2}));
  EXPECT_EQ(log, Log({"b.pre 1", "b.post 1"}));
  EXPECT_TRUE(module->has_forward_hooks());
}

TEST(HooksTest, HolderSequentialAnyModuleAndModuleListMeetTheHooks) {
  Log log;
  Double module;
  add_hooks(*module, "m", log);
  torch::nn::Sequential sequential(Double(2), module);
  torch::nn::AnyModule any(module);
  torch::nn::ModuleList list(module);
  EXPECT_EQ(module(at::ones({})).item<double>(), 2);
  EXPECT_EQ(sequential->forward(at::ones({})).item<double>(), 8);
  EXPECT_EQ(any.forward(at::ones({})).item<double>(), 2);
  EXPECT_EQ(list[0]->as<Double>()->forward(at::ones({})).item<double>(), 2);
  EXPECT_EQ(log.size(), 8);
}

TEST(HooksTest, NestedModulesNestTheirHooks) {
  Log log;
  Double inner;
  torch::nn::Sequential middle(inner);
  struct OuterImpl : Hookable<OuterImpl, at::Tensor(at::Tensor)> {
    explicit OuterImpl(torch::nn::Sequential child)
        : child_(register_module("child", std::move(child))) {}
    at::Tensor forward_impl(at::Tensor x) { return child_->forward(std::move(x)); }
    torch::nn::Sequential child_;
  };
  OuterImpl outer(middle);
  add_hooks(*inner, "inner", log);
  add_hooks(outer, "outer", log);
  outer.forward(at::ones({}));
  EXPECT_EQ(log, Log({"outer.pre 1", "inner.pre 1", "inner.post 1", "outer.post 1"}));
}

TEST(HooksTest, SequentialPassesSeveralInputsAndAnyModuleReturnsTuples) {
  Log log;
  SumDifference module;
  add_hooks(*module, "m", log);
  torch::nn::Sequential sequential(module);
  const auto [sum, difference] = sequential->forward<std::tuple<at::Tensor, at::Tensor>>(
      at::full({}, 5.0), at::full({}, 3.0), 10.0
  );
  EXPECT_EQ(sum.item<double>(), 80);
  EXPECT_EQ(difference.item<double>(), 20);
  EXPECT_EQ(log, Log({"m.pre 2", "m.post 2"}));
}

TEST(HooksTest, AHookReplacesInputsAndOutputs) {
  Log log;
  SumDifference module;
  const auto hooks = add_hooks(*module, "m", log);
  hooks->on_pre = [](auto inputs) {
    *inputs[0] = at::full({}, 100.0);
    *inputs[1] = at::full({}, 1.0);
  };
  hooks->on_post = [](auto outputs) { *outputs[1] = *outputs[1] + 0.5; };
  const auto a = at::full({}, 5.0);
  const auto b = at::full({}, 3.0);
  const auto [sum, difference] = module->forward(a, b, 1.0);
  EXPECT_EQ(sum.item<double>(), 101);
  EXPECT_EQ(difference.item<double>(), 99.5);
  EXPECT_EQ(a.item<double>(), 5) << "the caller's own handle must not change";
  EXPECT_EQ(b.item<double>(), 3) << "the caller's own handle must not change";
}

TEST(HooksTest, NonConstReferenceIsChangedForTheCallerToo) {
  struct InPlaceImpl : Hookable<InPlaceImpl, void(at::Tensor&), torch::nn::Module> {
    void forward_impl(at::Tensor& x) { x = x + 1; }
  };
  Log log;
  InPlaceImpl module;
  const auto hooks = add_hooks(module, "m", log);
  hooks->on_pre = [](auto inputs) { *inputs[0] = at::full({}, 10.0); };
  auto x = at::zeros({});
  module.forward(x);
  EXPECT_EQ(x.item<double>(), 11);
  EXPECT_EQ(log, Log({"m.pre 1", "m.post 0"}));
}

TEST(HooksTest, MoveOnlyAndMovedInArgumentsArrive) {
  struct TakesImpl
      : Hookable<
            TakesImpl,
            std::vector<
                at::Tensor>(std::unique_ptr<int>, std::vector<at::Tensor>&&, const std::string&),
            torch::nn::Module> {
    std::vector<at::Tensor> forward_impl(
        std::unique_ptr<int> n, std::vector<at::Tensor>&& xs, const std::string& text
    ) {
      auto kept = std::move(xs);
      kept.push_back(at::full({}, static_cast<double>(*n) + static_cast<double>(text.size())));
      return kept;
    }
  };
  Log log;
  TakesImpl module;
  const auto run = [&] {
    std::vector<at::Tensor> xs = {at::ones({}), at::ones({})};
    const auto* storage = xs.data();
    auto out = module.forward(std::make_unique<int>(40), std::move(xs), "ab");
    // NOLINTNEXTLINE(bugprone-use-after-move): that it is empty is what is tested
    EXPECT_TRUE(xs.empty()) << "the vector must be moved, not copied";
    EXPECT_NE(storage, nullptr);
    EXPECT_EQ(out.at(2).item<double>(), 42);
  };
  run();
  add_hooks(module, "m", log);
  run();
  EXPECT_EQ(log, Log({"m.pre 2", "m.post 3"}));
}

TEST(HooksTest, AMovedInTensorHasOneOwnerInsideForward) {
  struct CountsImpl : Hookable<CountsImpl, int(at::Tensor), torch::nn::Module> {
    int forward_impl(at::Tensor x) { return static_cast<int>(x.use_count()); }
  };
  Log log;
  CountsImpl module;
  EXPECT_EQ(module.forward(at::ones({})), 1);
  add_hooks(module, "m", log);
  EXPECT_EQ(module.forward(at::ones({})), 1);
  EXPECT_EQ(log, Log({"m.pre 1", "m.post 0"}));
}

TEST(HooksTest, TensorListsAndNestedDictsAreSeenThrough) {
  using Dict = std::map<std::string, std::vector<std::pair<at::Tensor, int>>>;
  struct ListsImpl : Hookable<ListsImpl, Dict(at::TensorList, const Dict&), torch::nn::Module> {
    Dict forward_impl(at::TensorList list, const Dict& dict) {
      Dict result = dict;
      result["list"].push_back({at::stack(list).sum(), 0});
      return result;
    }
  };
  Log log;
  ListsImpl module;
  const auto hooks = add_hooks(module, "m", log);
  hooks->on_pre = [](auto inputs) {
    for (auto* input : inputs) {
      *input = *input * 10;
    }
  };
  const std::vector<at::Tensor> list = {at::ones({}), at::ones({})};
  const Dict dict = {{"a", {{at::ones({}), 1}, {at::ones({}), 2}}}};
  const auto out = module.forward(list, dict);
  EXPECT_EQ(out.at("list")[0].first.item<double>(), 20);
  EXPECT_EQ(out.at("a")[1].first.item<double>(), 10);
  EXPECT_EQ(dict.at("a")[1].first.item<double>(), 1);
  EXPECT_EQ(log, Log({"m.pre 4", "m.post 3"}));
}

TEST(HooksTest, AFailedForwardTellsTheHooksInReverse) {
  struct ThrowsImpl : Hookable<ThrowsImpl, at::Tensor(at::Tensor)> {
    at::Tensor forward_impl(at::Tensor) { throw std::runtime_error("no luck"); }
  };
  Log log;
  ThrowsImpl module;
  add_hooks(module, "a", log);
  add_hooks(module, "b", log);
  HS_EXPECT_THROWN(std::runtime_error, module.forward(at::ones({})), "no luck");
  EXPECT_EQ(log, Log({"a.pre 1", "b.pre 1", "b.failed", "a.failed"}));
}

TEST(HooksTest, AThrowingPreHookFailsOnlyThoseBeforeIt) {
  Log log;
  Double module;
  add_hooks(*module, "a", log);
  add_hooks(*module, "b", log)->on_pre = [](auto) { throw std::runtime_error("pre"); };
  add_hooks(*module, "c", log);
  HS_EXPECT_THROWN(std::runtime_error, module->forward(at::ones({})), "pre");
  EXPECT_EQ(log, Log({"a.pre 1", "b.pre 1", "a.failed"}));
}

TEST(HooksTest, AThrowingPostHookFailsThoseStillOpen) {
  Log log;
  Double module;
  add_hooks(*module, "a", log);
  add_hooks(*module, "b", log)->on_post = [](auto) { throw std::runtime_error("post"); };
  add_hooks(*module, "c", log);
  HS_EXPECT_THROWN(std::runtime_error, module->forward(at::ones({})), "post");
  EXPECT_EQ(log, Log({"a.pre 1", "b.pre 1", "c.pre 1", "c.post 1", "b.post 1", "a.failed"}));
}

TEST(HooksTest, HooksChangedDuringForwardCountFromTheNextOne) {
  Log log;
  Double module;
  const auto a = add_hooks(*module, "a", log);
  a->on_pre = [&](auto) {
    module->remove_forward_hooks(a.get());
    add_hooks(*module, "b", log);
  };
  module->forward(at::ones({}));
  EXPECT_EQ(log, Log({"a.pre 1", "a.post 1"}));
  log.clear();
  module->forward(at::ones({}));
  EXPECT_EQ(log, Log({"b.pre 1", "b.post 1"}));
}

TEST(HooksTest, ACloneHasItsOwnParametersAndNoHooks) {
  Log log;
  Double module;
  add_hooks(*module, "m", log);
  const auto copy = std::dynamic_pointer_cast<DoubleImpl>(module->clone());
  ASSERT_NE(copy, nullptr);
  EXPECT_FALSE(copy->has_forward_hooks());
  EXPECT_TRUE(module->has_forward_hooks());
  EXPECT_NE(copy->factor.data_ptr(), module->factor.data_ptr());
  EXPECT_EQ(copy->forward(at::ones({})).item<double>(), 2);
  EXPECT_TRUE(log.empty());
}

TEST(HooksTest, CloningWithoutResetSaysWhatToDo) {
  SumDifferenceImpl module;
  HS_EXPECT_THROWN(Unsupported, module.clone(), "override reset()");
}

TEST(HooksTest, WithoutHooksArgumentsAreNotCopied) {
  struct AddressImpl
      : Hookable<AddressImpl, const void*(const std::vector<at::Tensor>&), torch::nn::Module> {
    const void* forward_impl(const std::vector<at::Tensor>& xs) { return &xs; }
  };
  AddressImpl module;
  const std::vector<at::Tensor> xs = {at::ones({})};
  EXPECT_EQ(module.forward(xs), &xs);
}

using HookedLinear = torch::nn::ModuleHolder<Hooked<torch::nn::LinearImpl>>;

TEST(HooksTest, HookedMakesAnExistingImplHookable) {
  Log log;
  HookedLinear linear(torch::nn::LinearOptions(3, 2).bias(false));
  add_hooks(*linear, "linear", log);
  torch::nn::Sequential sequential(linear);
  const auto x = at::ones({4, 3});
  EXPECT_TRUE(testing::same_bits(sequential->forward(x), at::linear(x, linear->weight)));
  EXPECT_EQ(sequential->at<Hooked<torch::nn::LinearImpl>>(0).options.out_features(), 2);
  EXPECT_EQ(log, Log({"linear.pre 1", "linear.post 1"}));
}

TEST(HooksTest, HookedClonesToItsOwnTypeAlsoInsideAParent) {
  struct ParentImpl : torch::nn::Cloneable<ParentImpl> {
    ParentImpl() { reset(); }
    void reset() override { linear = register_module("linear", HookedLinear(3, 2)); }
    HookedLinear linear{nullptr};
  };
  Log log;
  ParentImpl parent;
  add_hooks(*parent.linear, "linear", log);
  const auto copy = std::dynamic_pointer_cast<ParentImpl>(parent.clone());
  ASSERT_NE(copy, nullptr);
  const auto child =
      std::dynamic_pointer_cast<Hooked<torch::nn::LinearImpl>>(copy->named_children()["linear"]);
  ASSERT_NE(child, nullptr);
  EXPECT_FALSE(child->has_forward_hooks());
  EXPECT_TRUE(testing::same_bits(child->weight, parent.linear->weight));
  EXPECT_NE(child->weight.data_ptr(), parent.linear->weight.data_ptr());
  add_hooks(*copy->linear, "copy", log);
  copy->linear->forward(at::ones({3}));
  EXPECT_EQ(log, Log({"copy.pre 1", "copy.post 1"}));

  const auto alone =
      std::dynamic_pointer_cast<Hooked<torch::nn::LinearImpl>>(parent.linear->clone());
  ASSERT_NE(alone, nullptr);
  EXPECT_NE(alone->weight.data_ptr(), parent.linear->weight.data_ptr());
}

struct OverloadedImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) const { return x + 1; }
  at::Tensor forward(const at::Tensor& x, int times) { return x * times; }
};

TEST(HooksTest, HookedTakesTheSignatureOfAnOverloadedForward) {
  Log log;
  Hooked<OverloadedImpl, at::Tensor(const at::Tensor&, int)> times;
  Hooked<OverloadedImpl, at::Tensor(const at::Tensor&)> plus;
  add_hooks(times, "times", log);
  add_hooks(plus, "plus", log);
  EXPECT_EQ(times.forward(at::full({}, 5.0), 3).item<double>(), 15);
  EXPECT_EQ(plus.forward(at::full({}, 5.0)).item<double>(), 6);
  EXPECT_EQ(log, Log({"times.pre 1", "times.post 1", "plus.pre 1", "plus.post 1"}));
}

struct ConstForwardImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x) const noexcept { return x; }
};

TEST(HooksTest, HookedDeducesAConstForwardAndFitsAnyModule) {
  Log log;
  auto module = std::make_shared<Hooked<ConstForwardImpl>>();
  add_hooks(*module, "m", log);
  torch::nn::AnyModule any(module);
  EXPECT_EQ(any.forward(at::ones({})).item<double>(), 1);
  EXPECT_EQ(any.get<Hooked<ConstForwardImpl>>().has_forward_hooks(), true);
  EXPECT_EQ(log, Log({"m.pre 1", "m.post 1"}));
}

TEST(HooksTest, SequentialFillsDefaultArgumentsOfAHookedImpl) {
  Log log;
  using HookedTransposed = Hooked<torch::nn::ConvTranspose1dImpl>;
  auto module = std::make_shared<HookedTransposed>(torch::nn::ConvTranspose1dOptions(1, 1, 2));
  add_hooks(*module, "m", log);
  torch::nn::Sequential sequential(module);
  EXPECT_EQ(sequential->forward(at::ones({1, 1, 4})).sizes(), at::IntArrayRef({1, 1, 5}));
  EXPECT_EQ(log, Log({"m.pre 1", "m.post 1"}));
}

TEST(HooksTest, GradientsFlowThroughReplacedTensors) {
  Log log;
  Double module;
  const auto hooks = add_hooks(*module, "m", log);
  hooks->on_pre = [](auto inputs) { *inputs[0] = *inputs[0] * 3; };
  hooks->on_post = [](auto outputs) { *outputs[0] = *outputs[0] * 5; };
  const auto x = at::ones({}).requires_grad_(true);
  module->forward(x).backward();
  EXPECT_EQ(x.grad().item<double>(), 30);
  EXPECT_EQ(module->factor.grad().item<double>(), 15);
}

}  // namespace
}  // namespace hypershard::nn
