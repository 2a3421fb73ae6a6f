// Tests what redistributions promise beside right values: stated gradients, second gradients,
// dtypes, untouched inputs, few copies, equal orders on all ranks, and messages.
#include "hypershard/dtensor/redistribute.h"

#include <gtest/gtest.h>

#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>

#include "hypershard/comm/fake/fake_world.h"
#include "hypershard/core/error.h"
#include "hypershard/dtensor/test_layouts.h"
#include "hypershard/testing/run_ranks.h"
#include "hypershard/testing/tensor_matchers.h"

namespace hypershard::dtensor {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace): the vocabulary of these tests
using hypershard::testing::run_ranks;

TEST(RedistributeTest, AStatedGradientMakesAnIdentityAnAllReduce) {
  run_ranks(2, [](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, {2});
    const Layout whole = {{Placement::replicate()}};
    const Redistribution move(
        {{2, 2}, whole}, whole, mesh, {.output = Layout{{Placement::partial()}}}
    );
    EXPECT_TRUE(move.steps().empty());
    ASSERT_EQ(move.backward_steps().size(), 1U);
    EXPECT_EQ(move.backward_steps()[0].kind, layout::RedistributionStep::Kind::kAllReduce);
    at::Tensor x = at::ones({2, 2}, at::kDouble).requires_grad_();
    (move(x) * (1 + world->rank())).sum().backward();
    EXPECT_TENSORS_EQUAL(x.grad(), at::full({2, 2}, 3.0, at::kDouble));
  });
}

TEST(RedistributeTest, BackwardCanBeDifferentiatedAgain) {
  run_ranks(2, [](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, {2});
    const Layout rows = {{Placement::shard(0)}};
    const at::Tensor whole = numbers({3, 2});
    const auto coordinates = mesh->mesh().coordinates(world->rank());
    at::Tensor x = part_of(whole, rows, mesh->mesh(), coordinates).clone().requires_grad_();
    const at::Tensor y = redistribute(x, {{3, 2}, rows}, {{Placement::replicate()}}, mesh);
    // The whole loss is sum(y^3): its gradient 3 x^2, and that of sum(v * 3 x^2) is 6 x v.
    const auto first = torch::autograd::grad({y.pow(3).sum()}, {x}, {}, true, true);
    const at::Tensor v = part_of(numbers({3, 2}, 4), rows, mesh->mesh(), coordinates);
    const auto second = torch::autograd::grad({(first[0] * v).sum()}, {x});
    EXPECT_TENSORS_EQUAL(first[0].detach(), (3 * x * x).detach());
    EXPECT_TENSORS_EQUAL(second[0], (6 * x * v).detach());
  });
}

TEST(RedistributeTest, TakesTensorsThatAreNotContiguousAndOtherDtypes) {
  run_ranks(2, [](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, {2});
    const Layout rows = {{Placement::shard(0)}};
    const Layout columns = {{Placement::shard(1)}};
    const Layout whole = {{Placement::replicate()}};
    const at::Tensor value = numbers({4, 6});
    for (const auto dtype :
         {at::kLong, at::kByte, at::kBool, at::kHalf, at::kBFloat16, at::kFloat}) {
      const at::Tensor typed = value.to(dtype);
      const at::Tensor local =
          typed.narrow(0, 2 * world->rank(), 2).t().contiguous().t();  // strides of a transposed
      EXPECT_TENSORS_EQUAL(redistribute(local, {{4, 6}, rows}, whole, mesh), typed);
      EXPECT_TENSORS_EQUAL(
          redistribute(local, {{4, 6}, rows}, columns, mesh),
          typed.narrow(1, 3 * world->rank(), 3).contiguous()
      );
    }
  });
}

TEST(RedistributeTest, LeavesItsInputAlone) {
  run_ranks(2, [](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, {2});
    const auto layouts = all_layouts(all_placements(1), 1);
    for (const Layout& from : layouts) {
      for (const Layout& to : layouts) {
        const at::Tensor local = local_tensor({{5}, from}, mesh->mesh(), world->rank());
        const at::Tensor before = local.clone();
        const at::NoGradGuard no_grad;
        const at::Tensor result = redistribute(local, {{5}, from}, to, mesh);
        EXPECT_TENSORS_EQUAL(local, before);
        EXPECT_FALSE(result.requires_grad());
      }
    }
  });
}

TEST(RedistributeTest, NoGradientWhereNoneIsAskedFor) {
  run_ranks(2, [](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, {2});
    const Redistribution move(
        {{4}, {{Placement::partial(Reduce::kMax)}}}, {{Placement::replicate()}}, mesh
    );
    EXPECT_FALSE(move(at::ones({4})).requires_grad());
    const at::Tensor leaf = at::ones({4}).requires_grad_();
    {
      const at::NoGradGuard no_grad;
      EXPECT_FALSE(move(leaf).requires_grad());
    }
    try {
      move(leaf);
      ADD_FAILURE() << "a maximum has no gradient";
    } catch (const Unsupported& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("Partial(max) on axis 'a'"), std::string::npos) << text;
      EXPECT_NE(text.find("hint: detach"), std::string::npos) << text;
    }
  });
}

TEST(RedistributeTest, NamesALocalTensorThatDoesNotFit) {
  run_ranks(2, [](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, {2});
    const Redistribution move(
        {{5, 2}, {{Placement::shard(0)}}}, {{Placement::replicate()}}, mesh, {}, "blocks.3 input"
    );
    try {
      move(at::ones({4, 2}));
      ADD_FAILURE() << "accepted a wrong shape";
    } catch (const InvalidArgument& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("'blocks.3 input'"), std::string::npos) << text;
      EXPECT_NE(text.find("of shape [4, 2]"), std::string::npos) << text;
      EXPECT_NE(text.find("a: Shard(0)"), std::string::npos) << text;
      EXPECT_NE(
          text.find(world->rank() == 0 ? "expected [3, 2]" : "expected [2, 2]"), std::string::npos
      ) << text;
    }
    EXPECT_THROW(
        Redistribution(
            {{5}, {{Placement::shard(0)}}}, {{Placement::shard(0)}}, mesh, {.input = Layout{}}
        ),
        InvalidArgument
    );
  });
}

/// Runs `action` and counts the copies between tensors that it makes on this thread.
template <class Action>
int num_copies(Action action) {
  static thread_local int copies = 0;
  copies = 0;
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
        copies += std::string(function.name()) == "aten::copy_" ? 1 : 0;
        return nullptr;
      }
  ));
  action();
  at::removeCallback(handle);
  return copies;
}

TEST(RedistributeTest, CopiesOnlyWherePiecesAreNotRuns) {
  run_ranks(2, [](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, {2});
    const auto copies = [&](const Placement& from, const Placement& to) {
      const at::Tensor local = local_tensor({{4, 6}, {{from}}}, mesh->mesh(), world->rank());
      const Redistribution move({{4, 6}, {{from}}}, {{to}}, mesh);
      return num_copies([&] { move(local); });
    };
    const Placement rows = Placement::shard(0);
    const Placement columns = Placement::shard(1);
    EXPECT_EQ(copies(rows, Placement::replicate()), 0);
    EXPECT_EQ(copies(Placement::partial(), rows), 0);
    EXPECT_EQ(copies(Placement::replicate(), rows), 0);
    // One a piece, on one side.
    EXPECT_EQ(copies(columns, Placement::replicate()), 2);
    EXPECT_EQ(copies(Placement::partial(), columns), 2);
    EXPECT_EQ(copies(rows, columns), 2);
    EXPECT_EQ(copies(columns, rows), 2);
    EXPECT_EQ(copies(Placement::partial(), Placement::replicate()), 1);  // the input is kept
  });
}

TEST(RedistributeTest, EveryRankStartsTheSameCollectivesInTheSameOrder) {
  std::vector<std::string> lists(4);
  run_ranks(4, [&](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, {2, 2});
    std::vector<std::shared_ptr<comm::Communicator>> groups;
    for (const std::vector<std::string>& names :
         {std::vector<std::string>{"a"}, {"b"}, {"a", "b"}}) {
      groups.push_back(mesh->axes(names));
      groups.back()->log().keep_all(true);
    }
    std::string& list = lists[static_cast<std::size_t>(world->rank())];
    const auto layouts =
        all_layouts({Placement::shard(0), Placement::partial(), Placement::shard(1)}, 2);
    for (const Layout& from : layouts) {
      for (const Layout& to : layouts) {
        const Redistribution move({{4, 4}, from}, to, mesh);
        at::Tensor local =
            local_tensor({{4, 4}, from}, mesh->mesh(), world->rank()).requires_grad_();
        move(local).sum().backward();
        for (const auto& step : move.steps()) {
          list += to_text(step, mesh->mesh()) + "\n";
        }
      }
    }
    for (const auto& group : groups) {
      for (const comm::LogEntry& entry : group->log().entries()) {
        list += to_text(entry) + "\n";
      }
    }
  });
  EXPECT_GT(lists[0].size(), 1000U);
  for (const std::string& list : lists) {
    EXPECT_EQ(list, lists[0]);
  }
}

TEST(RedistributeTest, ATensorMayBeWrittenRightAfterwards) {
  run_ranks(2, [](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, {2});
    const Layout rows = {{Placement::shard(0)}};
    const Redistribution gather({{4096, 8}, rows}, {{Placement::replicate()}}, mesh);
    const at::Tensor local = at::ones({2048, 8}, at::kDouble);
    for (int i = 0; i < 100; ++i) {
      const at::Tensor whole = gather(local.fill_(i));
      local.fill_(-1);  // a peer may still be gathering
      ASSERT_EQ(whole.min().item<double>(), i);
    }
  });
}

TEST(RedistributeTest, BigMeshesNeedNoRanks) {
  const auto world = comm::make_fake_world(777, layout::Topology::single_supernode(1024));
  const auto mesh = process_mesh(world, {4, 16, 4, 4});
  const auto meta = at::TensorOptions().device(at::kMeta).dtype(at::kBFloat16);
  const Shape shape = {64, 130, 8};
  const Layout from = {
      {Placement::shard(0), Placement::shard(0), Placement::partial(), Placement::shard(1)}
  };
  const Layout to = {
      {Placement::shard(1), Placement::replicate(), Placement::shard(2), Placement::shard(1)}
  };
  const Redistribution move({shape, from}, to, mesh);
  const at::Tensor local = at::empty(layout::local_shape({shape, from}, mesh->mesh(), 777), meta);
  EXPECT_EQ(move(local).sizes().vec(), layout::local_shape({shape, to}, mesh->mesh(), 777));
}

}  // namespace
}  // namespace hypershard::dtensor
