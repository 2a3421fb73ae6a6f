// Tests DTensor, distribute and from_local: round trips over sizes, meshes and orders, pieces of
// any size, and the texts of what is refused.
#include "hypershard/dtensor/dtensor.h"

#include <gtest/gtest.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include "hypershard/core/error.h"
#include "hypershard/dtensor/op_rules.h"
#include "hypershard/dtensor/test_layouts.h"
#include "hypershard/testing/run_ranks.h"
#include "hypershard/testing/tensor_matchers.h"

namespace hypershard::dtensor {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace): the vocabulary of these tests
using hypershard::testing::run_ranks;

const Placement kRows = Placement::shard(0);
const Placement kWhole = Placement::replicate();

int product(const std::vector<int>& sizes) {
  int result = 1;
  for (const int size : sizes) {
    result *= size;
  }
  return result;
}

class RoundTripTest : public ::testing::TestWithParam<std::vector<int>> {};
INSTANTIATE_TEST_SUITE_P(
    Meshes,
    RoundTripTest,
    ::testing::Values(
        std::vector<int>{2},
        std::vector<int>{4},
        std::vector<int>{2, 2},
        std::vector<int>{3, 1},
        std::vector<int>{1, 4}
    ),
    [](const auto& sizes) {
      std::string name = "mesh";
      for (const int size : sizes.param) {
        name += "_" + std::to_string(size);
      }
      return name;
    }
);

TEST_P(RoundTripTest, DistributeThenGatherIsTheIdentity) {
  run_ranks(product(GetParam()), [](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, GetParam());
    const auto layouts = all_layouts(all_placements(2), GetParam().size());
    for (std::int64_t size = 0; size <= 17; ++size) {
      const at::Tensor whole = numbers({size, 3});
      for (const Layout& layout : layouts) {
        const DTensor tensor = distribute(whole, layout, mesh);
        // Sums of three equal thirds are not exact; everything else is.
        EXPECT_TENSORS_CLOSE(tensor.full_tensor(), whole, 1e-15, 0);
        ASSERT_FALSE(HasFailure()) << size << " rows, " << to_text(layout, mesh->mesh());
      }
    }
  });
}

TEST_P(RoundTripTest, GradientsOfTheWholeComeBackWhole) {
  run_ranks(product(GetParam()), [](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, GetParam());
    for (const Layout& layout :
         all_layouts({kWhole, kRows, Placement::shard(1)}, GetParam().size())) {
      at::Tensor whole = numbers({5, 3}).requires_grad_();
      const DTensor tensor = distribute(whole, layout, mesh);
      const DTensor doubled(tensor.to_local() * 2, tensor.spec(), mesh);
      doubled.full_tensor().mul(numbers({5, 3}, 3)).sum().backward();
      EXPECT_TENSORS_EQUAL(whole.grad(), 2 * numbers({5, 3}, 3));
    }
  });
}

TEST(DTensorTest, APartDoesNotKeepTheWholeAlive) {
  run_ranks(2, [](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, {2});
    const at::Tensor whole = numbers({4, 2});
    EXPECT_FALSE(distribute(whole, {{kRows}}, mesh).to_local().is_alias_of(whole));
    EXPECT_TRUE(distribute(whole, {{kWhole}}, mesh).to_local().is_same(whole));
  });
}

TEST(DTensorTest, BroadcastTakesTheFirstRanksValuesAndKeepsTheCallersTensor) {
  run_ranks(3, [](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, {3});
    const at::Tensor mine = at::full({4}, double(world->rank()), at::kDouble);
    const DTensor tensor = distribute(mine, {{kRows}}, mesh, {.broadcast = true});
    EXPECT_TENSORS_EQUAL(tensor.full_tensor(), at::zeros({4}, at::kDouble));
    EXPECT_EQ(mine[0].item<double>(), world->rank());
  });
}

TEST(DTensorTest, AMeshWithoutAxesIsOneRank) {
  run_ranks(1, [](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, {});
    EXPECT_TENSORS_EQUAL(distribute(numbers({3}), {}, mesh).full_tensor(), numbers({3}));
    EXPECT_EQ(from_local(numbers({3}), {}, mesh).shape(), Shape{3});
  });
}

TEST(DTensorTest, PrintsWhatItIs) {
  run_ranks(2, [](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, {2});
    const DTensor tensor = distribute(numbers({4, 2}), {{kRows}}, mesh);
    EXPECT_EQ(to_text(tensor), "DTensor [4, 2] Double on mesh(a=2): a: Shard(0)");
    EXPECT_EQ(tensor.shape(), (Shape{4, 2}));
  });
}

/// Every rank gives rows [begin, end) of a whole tensor and expects the standard cut of all of it.
void expect_pieces(
    const std::vector<int>& sizes, const Layout& layout, const std::vector<std::int64_t>& rows
) {
  run_ranks(product(sizes), [&](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, sizes);
    // rows[i] of piece i in cut order.
    int piece = 0;
    const auto coordinates = mesh->mesh().coordinates(world->rank());
    for (const int axis : layout.cut_axes(0)) {
      const auto i = static_cast<std::size_t>(axis);
      piece = piece * sizes[i] + coordinates[i];
    }
    std::int64_t begin = 0;
    std::int64_t total = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      begin += static_cast<int>(i) < piece ? rows[i] : 0;
      total += rows[i];
    }
    const at::Tensor whole = numbers({total, 2});
    at::Tensor local =
        whole.narrow(0, begin, rows[static_cast<std::size_t>(piece)]).clone().requires_grad_();
    const DTensor tensor = from_local(local, layout, mesh);
    EXPECT_EQ(tensor.shape(), (Shape{total, 2}));
    EXPECT_TENSORS_EQUAL(tensor.full_tensor().detach(), whole);
    tensor.full_tensor().mul(numbers({total, 2}, 3)).sum().backward();
    EXPECT_TENSORS_EQUAL(local.grad(), numbers({total, 2}, 3).narrow(0, begin, local.size(0)));
  });
}

TEST(FromLocalTest, PiecesOfAnySizeGiveTheSameShapeOnEveryRank) {
  expect_pieces({4}, {{kRows}}, {3, 0, 5, 1});
  expect_pieces({4}, {{kRows}}, {0, 0, 0, 7});
  expect_pieces({3}, {{kRows}}, {2, 2, 1});  // the standard cut: nothing moves
  expect_pieces({3}, {{kRows}}, {0, 0, 0});
  expect_pieces({2, 2}, {{kRows, kRows}}, {1, 4, 0, 2});
  expect_pieces({2, 2}, {{kRows, kRows}, {1, 0}}, {1, 4, 0, 2});
  expect_pieces({2, 2}, {{kWhole, kRows}}, {1, 4});
  expect_pieces({2, 2}, {{kRows, kWhole}}, {5, 2});
  expect_pieces({3, 1}, {{kRows, kWhole}}, {4, 0, 2});
  expect_pieces({3, 1}, {{kRows, kRows}}, {1, 5, 3});
  expect_pieces({3, 1}, {{kRows, kRows}, {1, 0}}, {1, 5, 3});
  expect_pieces({3, 1}, {{kWhole, kRows}}, {6});
  expect_pieces({1, 4}, {{kWhole, kRows}}, {3, 0, 5, 1});
  expect_pieces({1, 4}, {{kRows, kRows}}, {0, 2, 0, 7});
  expect_pieces({1, 4}, {{kRows, kRows}, {1, 0}}, {0, 2, 0, 7});
  expect_pieces({1, 4}, {{kRows, kWhole}}, {5});
}

TEST(FromLocalTest, SizesOfTwoDimensionsAreFoundTogether) {
  run_ranks(4, [](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, {2, 2});
    const at::Tensor whole = numbers({5, 7});
    const std::int64_t row = world->rank() / 2 == 0 ? 0 : 1;     // rows 1 + 4
    const std::int64_t column = world->rank() % 2 == 0 ? 0 : 6;  // columns 6 + 1
    const at::Tensor local =
        whole.narrow(0, row, row == 0 ? 1 : 4).narrow(1, column, column == 0 ? 6 : 1);
    const DTensor tensor = from_local(local, {{kRows, Placement::shard(1)}}, mesh);
    EXPECT_EQ(tensor.shape(), (Shape{5, 7}));
    EXPECT_TENSORS_EQUAL(tensor.full_tensor(), whole);
  });
}

TEST(FromLocalTest, AStatedShapeNeedsNoExchange) {
  run_ranks(2, [](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, {2});
    const auto group = mesh->axis("a");
    const std::uint64_t before = group->log().size();
    const DTensor tensor = from_local(at::ones({3 - world->rank()}), {{kRows}}, mesh, Shape{5});
    EXPECT_EQ(group->log().size(), before);
    EXPECT_EQ(tensor.full_tensor().size(0), 5);
    try {
      from_local(at::ones({1}), {{kRows}}, mesh, Shape{5});
      ADD_FAILURE() << "accepted a piece that is not the standard one";
    } catch (const InvalidArgument& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("of shape [1]"), std::string::npos) << text;
      EXPECT_NE(text.find("without a shape"), std::string::npos) << text;
    }
  });
}

std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "(threw no InvalidArgument)";
}

TEST(FromLocalTest, AllRanksRefuseSizesThatDisagree) {
  run_ranks(2, [](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, {2});
    const int rank = world->rank();
    const std::string sizes =
        refusal([&] { from_local(at::ones({2, 3 + rank}), {{kRows}}, mesh); });
    EXPECT_NE(sizes.find("ranks 0 and 1"), std::string::npos) << sizes;
    EXPECT_NE(sizes.find("dimension 1"), std::string::npos) << sizes;
    EXPECT_NE(sizes.find("3 and 4"), std::string::npos) << sizes;
    const std::string dtypes = refusal([&] {
      from_local(at::ones({2}, rank == 0 ? at::kFloat : at::kHalf), {{kRows}}, mesh);
    });
    EXPECT_NE(dtypes.find("rank 1"), std::string::npos) << dtypes;
    EXPECT_NE(dtypes.find("Half"), std::string::npos) << dtypes;
    const std::string dims =
        refusal([&] { from_local(rank == 0 ? at::ones({2}) : at::ones({2, 1}), {{kRows}}, mesh); });
    EXPECT_NE(dims.find("2 dimensions"), std::string::npos) << dims;
    const std::string layout =
        refusal([&] { from_local(at::ones({2}), {{Placement::shard(1)}}, mesh); });
    EXPECT_NE(layout.find("Shard(1)"), std::string::npos) << layout;
  });
}

TEST(DTensorTest, ChangingShapesMakeNoNewCommunicators) {
  run_ranks(4, [](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, {2, 2});
    const auto text_size = [&] { return world->last_collectives().size(); };
    std::size_t settled = 0;
    for (std::int64_t step = 0; step < 200; ++step) {
      const at::Tensor whole = numbers({1 + step, 3}, step);
      const DTensor tensor = distribute(whole, {{kRows, kRows}}, mesh);
      const DTensor moved = tensor.redistribute({{Placement::shard(1), kWhole}});
      EXPECT_TENSORS_EQUAL(moved.full_tensor(), whole);
      // One entry a communicator: grows by digits only.
      if (step == 20) {
        settled = text_size();
      }
    }
    EXPECT_LT(text_size(), settled + 64);
  });
}

// Layouts do not depend on numbers, so nothing is kept for one.
TEST(DTensorTest, ChangingScalarsLeaveNothingBehind) {
  run_ranks(4, [](const std::shared_ptr<comm::World>& world) {
    const auto mesh = process_mesh(world, {2, 2});
    const auto clamp = c10::Dispatcher::singleton().findSchemaOrThrow("aten::clamp", "");
    const at::Tensor whole = numbers({6, 3});
    const DTensor tensor = distribute(whole, {{kRows, kRows}}, mesh);
    const std::vector<TensorSpec> specs = {tensor.spec()};
    const std::size_t num_rules = ruled_operators().size();
    const auto both = mesh->axes(std::vector<std::string>{"a", "b"});
    const auto num_collectives = [&] {
      return mesh->axis("a")->log().size() + mesh->axis("b")->log().size() + both->log().size();
    };
    const std::uint64_t before = num_collectives();
    std::uint64_t per_step = 0;
    std::size_t settled = 0;
    for (int step = 1; step <= 200; ++step) {
      const double bound = 0.05 * step;
      const std::vector<c10::IValue> arguments = {tensor.to_local(), -bound, bound};
      const Verdict verdict = propagate({clamp, arguments, specs}, mesh->mesh());
      ASSERT_FALSE(verdict.refusal.has_value()) << step;
      EXPECT_EQ(verdict.outputs, specs);
      const DTensor clamped(
          at::clamp(tensor.to_local() * (0.1 * step), -bound, bound), tensor.spec(), mesh
      );
      const DTensor moved = clamped.redistribute({{Placement::shard(1), kWhole}});
      EXPECT_TENSORS_EQUAL(moved.full_tensor(), at::clamp(whole * (0.1 * step), -bound, bound));
      if (step == 1) {
        per_step = num_collectives() - before;
      }
      if (step == 20) {
        settled = world->last_collectives().size();
      }
      // No step does less than the first because of it.
      ASSERT_EQ(num_collectives() - before, per_step * static_cast<std::uint64_t>(step));
    }
    EXPECT_EQ(ruled_operators().size(), num_rules);
    EXPECT_LT(world->last_collectives().size(), settled + 64);
  });
}

}  // namespace
}  // namespace hypershard::dtensor
