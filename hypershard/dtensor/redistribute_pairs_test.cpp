// Tests that every pair of layouts gives the right values and gradients, against references
// computed from whole tensors, on all back ends. What takes long is in the Sweep tests.
#include <random>

#include <gtest/gtest.h>

#include "hypershard/core/text.h"
#include "hypershard/dtensor/redistribute.h"
#include "hypershard/dtensor/test_layouts.h"
#include "hypershard/testing/run_ranks.h"
#include "hypershard/testing/tensor_matchers.h"

namespace hypershard::dtensor {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace): the vocabulary of these tests
using hypershard::testing::RankBackend;
using hypershard::testing::run_ranks;
using hypershard::testing::RunRanksOptions;

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

int product(const std::vector<int>& sizes) {
  int result = 1;
  for (const int size : sizes) {
    result *= size;
  }
  return result;
}

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

void expect_all_pairs(
    const std::vector<int>& sizes, const Shape& shape, const RunRanksOptions& options = {}
) {
  Slots slots(product(sizes));
  run_ranks(
      product(sizes),
      [&](const std::shared_ptr<comm::World>& world) {
        const auto mesh = process_mesh(world, sizes);
        const auto layouts = all_layouts(all_placements(shape.size()), sizes.size());
        for (const Layout& from : layouts) {
          for (const Layout& to : layouts) {
            expect_pair(slots, mesh, shape, from, to);
          }
        }
      },
      options
  );
}

/// Draws layouts in an order that all ranks share.
class LayoutDraw {
 public:
  LayoutDraw(std::size_t num_axes, std::size_t num_dims, unsigned seed)
      : num_axes_(num_axes), placements_(all_placements(num_dims)), random_(seed) {}

  Layout operator()() {
    Layout made;
    for (std::size_t axis = 0; axis < num_axes_; ++axis) {
      made.placements.push_back(placements_[random_() % placements_.size()]);
      made.cut_order.push_back(static_cast<int>(axis));
    }
    for (std::size_t axis = 0; axis < num_axes_; ++axis) {
      std::swap(made.cut_order[axis], made.cut_order[random_() % num_axes_]);
    }
    return made;
  }

 private:
  std::size_t num_axes_;
  std::vector<Placement> placements_;
  std::mt19937 random_;
};

void expect_sampled_pairs(
    const std::vector<int>& sizes,
    const Shape& shape,
    int count,
    const RunRanksOptions& options = {}
) {
  Slots slots(product(sizes));
  run_ranks(
      product(sizes),
      [&](const std::shared_ptr<comm::World>& world) {
        const auto mesh = process_mesh(world, sizes);
        LayoutDraw draw(sizes.size(), shape.size(), static_cast<unsigned>(count));
        for (int i = 0; i < count; ++i) {
          const Layout from = draw();
          expect_pair(slots, mesh, shape, from, draw());
        }
      },
      options
  );
}

/// As expect_pair where ranks share no memory: targets without Partial, each rank for itself.
void expect_own_parts(const std::shared_ptr<const comm::ProcessMesh>& mesh, const Shape& shape) {
  const layout::DeviceMesh& devices = mesh->mesh();
  const auto coordinates = devices.coordinates(mesh->rank());
  const std::size_t num_axes = devices.axes().size();
  const std::vector<Placement> targets = {
      Placement::replicate(), Placement::shard(0), Placement::shard(1)
  };
  for (const Layout& from : all_layouts(all_placements(shape.size()), num_axes)) {
    for (const Layout& to : all_layouts(targets, num_axes)) {
      at::Tensor local = local_tensor({shape, from}, devices, mesh->rank());
      local.requires_grad_(is_linear(from));
      const at::Tensor result = redistribute(local, {shape, from}, to, mesh);
      const at::Tensor value = value_of({shape, from}, devices);
      EXPECT_TENSORS_CLOSE(result.detach(), part_of(value, to, devices, coordinates), 1e-12, 1e-12);
      if (is_linear(from)) {
        result.backward(part_of(numbers(shape, 5), to, devices, coordinates));
        const at::Tensor gradient = numbers(shape, 5) / averaged(from, devices);
        EXPECT_TENSORS_CLOSE(
            local.grad(),
            part_of(gradient, layout::gradient_layout(from), devices, coordinates),
            1e-12,
            1e-12
        );
      }
      ASSERT_FALSE(::testing::Test::HasFailure())
          << to_text(from, devices) << " -> " << to_text(to, devices);
    }
  }
}

TEST(RedistributePairsTest, AllPairsOnOneAxis) {
  for (const int size : {1, 2, 3, 4}) {
    expect_all_pairs({size}, {5, 3});
    expect_all_pairs({size}, {2, 1, 4});
    expect_all_pairs({size}, {});
    expect_all_pairs({size}, {0, 2});
  }
}

TEST(RedistributePairsTest, AllPairsOnTwoAxes) {
  expect_all_pairs({2, 2}, {5, 3});
  expect_all_pairs({3, 1}, {4});
  expect_all_pairs({2, 2}, {});
}

TEST(RedistributePairsTest, SampledPairsOnMoreAxes) {
  expect_sampled_pairs({2, 3}, {7, 4}, 200);
  expect_sampled_pairs({2, 1, 3}, {7, 3, 2}, 150);
  expect_sampled_pairs({2, 2, 2}, {6, 5}, 150);
  expect_sampled_pairs({2, 2, 1, 2}, {5, 4, 3, 2}, 100);
}

TEST(RedistributePairsTest, PlansForSlowLinksGiveTheSame) {
  expect_sampled_pairs({2, 2}, {5, 4}, 300, {.supernodes = {"x", "x", "y", "y"}});
  expect_sampled_pairs(
      {2, 2, 2}, {4, 4, 3}, 100, {.supernodes = {"x", "x", "x", "x", "y", "y", "y", "y"}}
  );
}

TEST(RedistributePairsTest, WorksWhereWorksCompleteLate) {
  expect_sampled_pairs({2, 2}, {5, 3}, 60, {.backend = RankBackend::kDelayed});
}

TEST(RedistributePairsTest, WorksBetweenProcessesAndOverGloo) {
  for (const RankBackend backend : {RankBackend::kShm, RankBackend::kGloo}) {
    run_ranks(
        4,
        [](const std::shared_ptr<comm::World>& world) {
          expect_own_parts(process_mesh(world, {2, 2}), {5, 3});
        },
        {.backend = backend}
    );
  }
}

TEST(RedistributePairsSweepTest, AllPairsOnMeshesOfTwoAxes) {
  expect_all_pairs({2, 2}, {5, 3, 2}, {.deadline_s = 300});
  expect_all_pairs({3, 2}, {7, 5}, {.deadline_s = 300});
  expect_all_pairs({2, 2}, {8, 4}, {.supernodes = {"x", "x", "y", "y"}, .deadline_s = 300});
}

TEST(RedistributePairsSweepTest, EverySizeOnTwoAxes) {
  for (std::int64_t size = 0; size <= 17; ++size) {
    expect_all_pairs({2, 2}, {size}, {.deadline_s = 300});
    expect_all_pairs({1, 4}, {size}, {.deadline_s = 300});
    expect_all_pairs({3, 1}, {size}, {.deadline_s = 300});
  }
}

TEST(RedistributePairsSweepTest, ManyPairsOnMoreAxes) {
  expect_sampled_pairs({2, 2, 2}, {5, 3, 2}, 8000, {.deadline_s = 600});
  expect_sampled_pairs({2, 1, 2, 2}, {5, 4, 3, 2}, 4000, {.deadline_s = 600});
}

}  // namespace
}  // namespace hypershard::dtensor
