// Tests that a recomputed segment trains exactly like the plain one, and what happens at its edges.
#include "hypershard/nn/recompute.h"

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "hypershard/core/error.h"
#include "hypershard/nn/test_support.h"

namespace hypershard::nn {
namespace {

using testing::random_tensor;
using testing::same_bits;
using Tensors = std::vector<at::Tensor>;

at::Tensor parameter(at::IntArrayRef sizes, std::uint64_t seed) {
  return random_tensor(sizes, at::kFloat, seed).requires_grad_(true);
}

/// Two layers with dropout between them; counts how often it runs.
struct Net {
  at::Tensor w1 = parameter({8, 6}, 1);
  at::Tensor w2 = parameter({6, 8}, 2);
  double dropout = 0.5;
  int runs = 0;

  at::Tensor operator()(const at::Tensor& x) {
    ++runs;
    const auto hidden = at::dropout(at::tanh(at::linear(x, w1)), dropout, /*train=*/true);
    return x + at::linear(hidden, w2);
  }
  void zero_grad() {
    w1.mutable_grad() = at::Tensor();
    w2.mutable_grad() = at::Tensor();
  }
};

struct Gradients {
  at::Tensor loss, x, w1, w2;
};

Gradients run(Net& net, bool recomputed) {
  at::manual_seed(5);
  net.zero_grad();
  const auto x = parameter({4, 6}, 3);
  const auto segment = [&net](const at::Tensor& input) { return net(input); };
  auto y = recomputed ? recompute(segment, recompute(segment, x)) : segment(segment(x));
  const auto loss = y.square().sum();
  loss.backward();
  return {loss, x.grad(), net.w1.grad(), net.w2.grad()};
}

TEST(RecomputeTest, GradientsEqualThePlainRunBitForBitWithDropout) {
  Net net;
  const auto plain = run(net, false);
  EXPECT_EQ(net.runs, 2);
  const auto again = run(net, true);
  EXPECT_EQ(net.runs, 6);
  EXPECT_TRUE(same_bits(again.loss, plain.loss));
  EXPECT_TRUE(same_bits(again.x, plain.x));
  EXPECT_TRUE(same_bits(again.w1, plain.w1));
  EXPECT_TRUE(same_bits(again.w2, plain.w2));
}

TEST(RecomputeTest, LeavesTheGeneratorWhereThePlainRunLeavesIt) {
  Net net;
  run(net, false);
  const auto plain = at::rand({4});
  run(net, true);
  EXPECT_TRUE(same_bits(at::rand({4}), plain));
}

TEST(RecomputeTest, NestsToAnyDepthWithEqualGradients) {
  Net net;
  const auto plain = run(net, false);
  net.runs = 0;
  at::manual_seed(5);
  net.zero_grad();
  const auto x = parameter({4, 6}, 3);
  const auto inner = [&net](const at::Tensor& input) { return net(input); };
  const auto middle = [&](const at::Tensor& input) {
    return recompute(inner, recompute(inner, input));
  };
  const auto outer = [&](const at::Tensor& input) { return recompute(middle, input); };
  recompute(outer, x).square().sum().backward();
  EXPECT_EQ(net.runs, 2 + 2 + 2 + 2) << "once a level of nesting, and once for the gradients";
  EXPECT_TRUE(same_bits(x.grad(), plain.x));
  EXPECT_TRUE(same_bits(net.w1.grad(), plain.w1));
  EXPECT_TRUE(same_bits(net.w2.grad(), plain.w2));
}

TEST(RecomputeTest, WithoutGradModeItJustRuns) {
  Net net;
  const at::NoGradGuard no_grad;
  RecomputeSegment* seen = nullptr;
  const auto y = recompute(
      [&](const at::Tensor& x) {
        seen = current_recompute_segment();
        return net(x);
      },
      random_tensor({4, 6}, at::kFloat, 3)
  );
  EXPECT_EQ(net.runs, 1);
  EXPECT_EQ(seen, nullptr);
  EXPECT_FALSE(y.requires_grad());
}

TEST(RecomputeTest, ParametersLearnWhenNoInputRequiresAGradient) {
  Net net;
  net.dropout = 0;
  const auto x = random_tensor({4, 6}, at::kFloat, 3);
  recompute([&](const at::Tensor& input) { return net(input); }, x).sum().backward();
  const auto w1 = net.w1.grad();
  net.zero_grad();
  net(x).sum().backward();
  EXPECT_TRUE(same_bits(w1, net.w1.grad()));
  EXPECT_FALSE(x.requires_grad());
  EXPECT_FALSE(x.grad().defined());
}

TEST(RecomputeTest, TakesUndefinedAndIntegerInputsAndGivesIntegerAndDetachedOutputs) {
  const auto table = parameter({10, 3}, 1);
  const auto x = parameter({4, 3}, 2);
  const auto tokens = at::arange(4, at::kLong);
  const auto outputs = recompute(
      TensorsFn([&](const Tensors& in) {
        EXPECT_FALSE(in[1].defined());
        const auto y = in[0] + at::embedding(table, in[2]);
        return Tensors{y, y.argmax(-1), y.detach() * 2, at::Tensor()};
      }),
      {x, at::Tensor(), tokens}
  );
  ASSERT_EQ(outputs.size(), 4);
  EXPECT_EQ(outputs[1].scalar_type(), at::kLong);
  EXPECT_FALSE(outputs[1].requires_grad());
  EXPECT_FALSE(outputs[3].defined());
  (outputs[0].sum() + outputs[2].sum()).backward();
  EXPECT_TRUE(same_bits(x.grad(), at::ones({4, 3}))) << "the detached output passes no gradient on";
  EXPECT_EQ(table.grad().sum().item<double>(), 12);
}

TEST(RecomputeTest, OutputsThatGetNoGradientCostNothingAndUnusedSegmentsDoNotRunAgain) {
  const auto x = parameter({4}, 1);
  int runs = 0;
  const auto outputs = recompute(
      TensorsFn([&](const Tensors& in) {
        ++runs;
        return Tensors{in[0] * 2, in[0] * 3};
      }),
      {x}
  );
  outputs[1].sum().backward();
  EXPECT_EQ(runs, 2);
  EXPECT_TRUE(same_bits(x.grad(), at::full({4}, 3.0F)));
}

TEST(RecomputeTest, AnInputThatIsReturnedKeepsItsGradient) {
  const auto x = parameter({4}, 1);
  const auto y = recompute([](const at::Tensor& in) { return in; }, x);
  EXPECT_NE(y.unsafeGetTensorImpl(), x.unsafeGetTensorImpl());
  (y * 3).sum().backward();
  EXPECT_TRUE(same_bits(x.grad(), at::full({4}, 3.0F)));
}

TEST(RecomputeTest, AnInputChangedBetweenForwardAndBackwardIsAnError) {
  const auto x = parameter({4}, 1);
  const auto noise = at::ones({4});
  const auto y =
      recompute(TensorsFn([](const Tensors& in) { return Tensors{in[0] * in[1]}; }), {x, noise})[0];
  noise.add_(1);
  HS_EXPECT_THROWN(c10::Error, y.sum().backward(), "modified by an inplace operation");
}

TEST(RecomputeTest, AnInputChangedInsideTheSegmentIsAnError) {
  const auto x = at::ones({4});
  HS_EXPECT_THROWN(
      InvalidArgument,
      recompute(TensorsFn([](const Tensors& in) { return Tensors{in[0].add_(1)}; }), {x}),
      "changes its input 0 in place"
  );
}

TEST(RecomputeTest, ASecondRunThatDiffersIsAnErrorThatNamesTheOutput) {
  const auto x = parameter({4}, 1);
  int runs = 0;
  const auto shapes = recompute(
      TensorsFn([&](const Tensors& in) {
        return Tensors{in[0], runs++ == 0 ? in[0] : in[0].narrow(0, 0, 2)};
      }),
      {x}
  );
  HS_EXPECT_THROWN(
      InvalidArgument,
      (shapes[0] + shapes[1]).sum().backward(),
      "another output 1: Float[2] (expected Float[4]"
  );
  runs = 0;
  const auto counts = recompute(
      TensorsFn([&](const Tensors& in) { return Tensors(runs++ == 0 ? 2 : 3, in[0] * 1); }), {x}
  );
  HS_EXPECT_THROWN(
      InvalidArgument, counts[0].sum().backward(), "another number of outputs: 3 (expected 2"
  );
}

TEST(RecomputeTest, AnExceptionInsideLeavesTheThreadClean) {
  const auto x = parameter({4}, 1);
  HS_EXPECT_THROWN(
      std::runtime_error,
      recompute([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("first"); }, x),
      "first"
  );
  EXPECT_EQ(current_recompute_segment(), nullptr);

  int runs = 0;
  const auto y = recompute(
      [&](const at::Tensor& in) {
        at::rand({7});
        if (runs++ == 1) {
          throw std::runtime_error("second");
        }
        return in * 2;
      },
      x
  );
  at::manual_seed(9);
  HS_EXPECT_THROWN(std::runtime_error, y.sum().backward(), "second");
  EXPECT_FALSE(in_second_forward());
  EXPECT_EQ(current_recompute_segment(), nullptr);
  const auto after = at::rand({3});
  at::manual_seed(9);
  EXPECT_TRUE(same_bits(after, at::rand({3}))) << "the generator must be put back";
}

TEST(RecomputeTest, RetainedGraphsRunAgain) {
  Net net;
  const auto x = parameter({4, 6}, 3);
  const auto loss = recompute([&](const at::Tensor& in) { return net(in); }, x).sum();
  loss.backward({}, /*retain_graph=*/true);
  const auto once = x.grad().clone();
  loss.backward();
  EXPECT_EQ(net.runs, 3);
  EXPECT_TRUE(same_bits(x.grad(), once + once));
  HS_EXPECT_THROWN(c10::Error, loss.backward(), "second time");
}

TEST(RecomputeTest, SecondDerivativesAndGradFunctionsAreRefused) {
  const auto x = parameter({4}, 1);
  const auto square = [](const at::Tensor& in) { return in * in; };
  HS_EXPECT_THROWN(
      Unsupported,
      recompute(square, x).sum().backward({}, true, /*create_graph=*/true),
      "create_graph"
  );
  HS_EXPECT_THROWN(
      Unsupported, torch::autograd::grad({recompute(square, x).sum()}, {x}), "autograd::grad()"
  );
}

TEST(RecomputeTest, SegmentAndSecondForwardAreVisibleInside) {
  const auto x = parameter({4}, 1);
  std::vector<std::pair<bool, bool>> seen;  // segment, second forward
  const auto look = [&] {
    seen.emplace_back(current_recompute_segment() != nullptr, in_second_forward());
  };
  const auto inner = [&](const at::Tensor& in) {
    look();
    return in * 2;
  };
  const auto y = recompute(
      [&](const at::Tensor& in) {
        look();
        return recompute(inner, in * 3);
      },
      x
  );
  look();
  y.sum().backward();
  look();
  const std::vector<std::pair<bool, bool>> expected = {
      {true, false},   // outer, first
      {true, false},   // inner, run plainly inside the outer's first forward
      {false, false},  // between
      {false, true},   // outer, second
      {true, true},    // inner, first, inside the outer's second forward
      {false, true},   // inner, second
      {false, false},
  };
  EXPECT_EQ(seen, expected);
}

/// Notes what happens when, and in which graph task.
class LoggedObserver : public RecomputeObserver {
 public:
  LoggedObserver(std::string name, std::vector<std::string>& log)
      : name_(std::move(name)), log_(log) {}
  void before_recompute() override {
    log_.push_back(name_ + ".before");
    task = torch::autograd::get_current_graph_task_id();
    if (throws) {
      throw std::runtime_error(name_);
    }
    if (queues) {
      torch::autograd::Engine::get_default_engine().queue_callback([this] {
        log_.push_back(name_ + ".end of backward");
      });
    }
  }
  void after_recompute() noexcept override {
    log_.push_back(name_ + ".after");
    EXPECT_EQ(torch::autograd::get_current_graph_task_id(), task);
  }
  int task = -1;
  bool throws = false;
  bool queues = false;

 private:
  std::string name_;
  std::vector<std::string>& log_;
};

TEST(RecomputeTest, ObserversRunInTheOuterGraphTask) {
  const auto x = parameter({4}, 1);
  std::vector<std::string> log;
  const auto a = std::make_shared<LoggedObserver>("a", log);
  const auto b = std::make_shared<LoggedObserver>("b", log);
  a->queues = true;
  int inner_task = -1;
  const auto y = recompute(
      [&](const at::Tensor& in) {
        if (auto* segment = current_recompute_segment()) {
          segment->add_observer(a);
          segment->add_observer(b);
          segment->add_observer(a);
        }
        log.push_back("run");
        const auto out = in * 2;
        if (out.requires_grad()) {
          out.register_hook([&](const at::Tensor&) {
            inner_task = torch::autograd::get_current_graph_task_id();
            log.push_back("inner backward");
          });
        }
        return out;
      },
      x
  );
  const auto z = y * 1;
  int outer_task = -1;
  z.register_hook([&](const at::Tensor&) {
    outer_task = torch::autograd::get_current_graph_task_id();
  });
  z.sum().backward();
  EXPECT_EQ(
      log,
      std::vector<std::string>(
          {"run",
           "a.before",
           "b.before",
           "run",
           "inner backward",
           "b.after",
           "a.after",
           "a.end of backward"}
      )
  );
  EXPECT_EQ(a->task, outer_task);
  EXPECT_NE(inner_task, outer_task);
}

TEST(RecomputeTest, ObserversEndWhenTheSegmentOrAnotherObserverThrows) {
  const auto x = parameter({4}, 1);
  std::vector<std::string> log;
  const auto a = std::make_shared<LoggedObserver>("a", log);
  const auto b = std::make_shared<LoggedObserver>("b", log);
  int runs = 0;
  const auto segment = [&](const at::Tensor& in) {
    if (auto* open = current_recompute_segment()) {
      open->add_observer(a);
      open->add_observer(b);
    }
    if (runs++ == 1) {
      throw std::runtime_error("second run");
    }
    return in * 2;
  };
  const auto y = recompute(segment, x);
  HS_EXPECT_THROWN(std::runtime_error, y.sum().backward(), "second run");
  EXPECT_EQ(log, std::vector<std::string>({"a.before", "b.before", "b.after", "a.after"}));
  log.clear();
  b->throws = true;
  const auto z = recompute(segment, x);
  HS_EXPECT_THROWN(std::runtime_error, z.sum().backward(), "b");
  EXPECT_EQ(log, std::vector<std::string>({"a.before", "b.before", "a.after"}));
}

TEST(RecomputeTest, KeepsNoActivations) {
  const auto x = parameter({4}, 1);
  c10::weak_intrusive_ptr<at::TensorImpl> hidden(x.getIntrusivePtr());
  const auto y = recompute(
      [&](const at::Tensor& in) {
        const auto inner = in.exp();
        hidden = c10::weak_intrusive_ptr<at::TensorImpl>(inner.getIntrusivePtr());
        return inner * inner;
      },
      x
  );
  EXPECT_TRUE(hidden.expired());
  y.sum().backward();
  EXPECT_TRUE(hidden.expired());
}

}  // namespace
}  // namespace hypershard::nn
