// Tests that every pair of layouts gives the right values and gradients, against references
// computed from whole tensors; and what else backward promises.
#include "hypershard/dtensor/redistribute.h"

#include <random>

#include <gtest/gtest.h>

#include <torch/csrc/autograd/autograd.h>

#include "hypershard/comm/fake/fake_world.h"
#include "hypershard/core/error.h"
#include "hypershard/dtensor/test_layouts.h"
#include "hypershard/testing/run_ranks.h"
#include "hypershard/testing/tensor_matchers.h"

namespace hypershard::dtensor {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace): the vocabulary of these tests
using hypershard::testing::RankBackend;
using hypershard::testing::run_ranks;

/// Whether a gradient exists: maxima and minima have none.
bool is_linear(const Layout& layout) {
  for (const Placement& placement : layout.placements) {
    if (placement == Placement::partial(Reduce::kMax) ||
        placement == Placement::partial(Reduce::kMin)) {
      return false;
    }
  }
  return true;
}

double averaged(const Layout& layout, const layout::DeviceMesh& mesh) {
  double product = 1;
  for (std::size_t axis = 0; axis < layout.placements.size(); ++axis) {
    product *=
        layout.placements[axis] == Placement::partial(Reduce::kAvg) ? mesh.axes()[axis].size : 1;
  }
  return product;
}

/// Local tensors of all ranks, which are threads.
struct Slots {
  explicit Slots(int num_ranks) : locals(static_cast<std::size_t>(num_ranks)) {}
  std::vector<at::Tensor> locals;
};

/// Leaves `local` in its slot and returns the joined value on rank 0, an undefined tensor
/// elsewhere.
at::Tensor join(
    Slots& slots,
    const at::Tensor& local,
    const TensorSpec& spec,
    const comm::ProcessMesh& mesh,
    int& differ
) {
  const auto world = mesh.world().world_communicator();
  slots.locals[static_cast<std::size_t>(mesh.rank())] = local.detach();
  world->barrier()->wait();
  at::Tensor value;
  if (mesh.rank() == 0) {
    value = assembled(slots.locals, spec, mesh.mesh(), differ);
  }
  world->barrier()->wait();
  return value;
}

void expect_pair(
    Slots& slots,
    const std::shared_ptr<const comm::ProcessMesh>& mesh,
    const Shape& shape,
    const Layout& from,
    const Layout& to
) {
  const layout::DeviceMesh& devices = mesh->mesh();
  const std::string subject = concat_text(
      shape, " on ", devices, ": ", to_text(from, devices), " -> ", to_text(to, devices)
  );
  const Redistribution move({shape, from}, to, mesh);
  at::Tensor local = local_tensor({shape, from}, devices, mesh->rank());
  const bool differentiable = is_linear(from) && is_linear(to);
  local.requires_grad_(differentiable);
  const at::Tensor result = move(local);
  int differ = 0;
  const at::Tensor value = join(slots, result, move.target(), *mesh, differ);
  if (value.defined()) {
    EXPECT_EQ(differ, 0) << subject;
    EXPECT_TENSORS_CLOSE(value, value_of({shape, from}, devices), 1e-12, 1e-12);
  }
  if (differentiable) {
    const auto coordinates = devices.coordinates(mesh->rank());
    const at::Tensor gradient = numbers(shape, 5);
    result.backward(part_of(gradient, layout::gradient_layout(to), devices, coordinates));
    const double scale = averaged(to, devices) / averaged(from, devices);
    const at::Tensor expected =
        part_of(gradient * scale, layout::gradient_layout(from), devices, coordinates);
    EXPECT_TENSORS_CLOSE(local.grad(), expected, 1e-12, 1e-12);
  }
  ASSERT_FALSE(::testing::Test::HasFailure()) << subject;
}

void expect_all_pairs(const std::vector<int>& sizes, const Shape& shape) {
  int num_ranks = 1;
  for (const int size : sizes) {
    num_ranks *= size;
  }
  Slots slots(num_ranks);
  run_ranks(num_ranks, [&](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, sizes);
    const auto layouts = all_layouts(all_placements(shape.size()), sizes.size());
    for (const Layout& from : layouts) {
      for (const Layout& to : layouts) {
        expect_pair(slots, mesh, shape, from, to);
      }
    }
  });
}

TEST(RedistributeTest, AllPairsOnOneAxis) {
  for (const int size : {1, 2, 3, 4}) {
    expect_all_pairs({size}, {5, 3});
    expect_all_pairs({size}, {2, 1, 4});
    expect_all_pairs({size}, {});
    expect_all_pairs({size}, {0, 2});
  }
}

TEST(RedistributeTest, AllPairsOnTwoAxes) {
  expect_all_pairs({2, 2}, {5, 3});
  expect_all_pairs({3, 1}, {4});
  expect_all_pairs({2, 2}, {});
}

/// Pairs chosen by a seed that all ranks share, on more axes than can be tried in full.
void expect_sampled_pairs(const std::vector<int>& sizes, const Shape& shape, int count, int seed) {
  int num_ranks = 1;
  for (const int size : sizes) {
    num_ranks *= size;
  }
  Slots slots(num_ranks);
  run_ranks(num_ranks, [&](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, sizes);
    const auto placements = all_placements(shape.size());
    std::mt19937 random(static_cast<unsigned>(seed));
    const auto layout = [&] {
      Layout made;
      for (std::size_t axis = 0; axis < sizes.size(); ++axis) {
        made.placements.push_back(placements[random() % placements.size()]);
        made.cut_order.push_back(static_cast<int>(axis));
      }
      std::swap(made.cut_order.front(), made.cut_order[random() % sizes.size()]);
      return made;
    };
    for (int i = 0; i < count; ++i) {
      const Layout from = layout();
      const Layout to = layout();
      expect_pair(slots, mesh, shape, from, to);
    }
  });
}

TEST(RedistributeTest, SampledPairsOnThreeAndFourAxes) {
  expect_sampled_pairs({2, 3}, {7, 4}, 200, 1);
  expect_sampled_pairs({2, 1, 3}, {7, 3, 2}, 150, 2);
  expect_sampled_pairs({2, 2, 2}, {6, 5}, 150, 3);
  expect_sampled_pairs({2, 2, 1, 2}, {5, 4, 3, 2}, 100, 4);
}

TEST(RedistributeTest, WorksWhereWorksCompleteLate) {
  Slots slots(4);
  run_ranks(
      4,
      [&](const std::shared_ptr<comm::World>& world) {
        const auto mesh = process_mesh(world, {2, 2});
        const Layout rows = {{Placement::shard(0), Placement::shard(0)}};
        const Layout columns = {{Placement::shard(1), Placement::partial()}};
        expect_pair(slots, mesh, {5, 3}, rows, columns);
        expect_pair(slots, mesh, {5, 3}, columns, rows);
        expect_pair(slots, mesh, {5, 3}, columns, layout::replicated_layout(mesh->mesh()));
      },
      {.backend = RankBackend::kDelayed}
  );
}

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
