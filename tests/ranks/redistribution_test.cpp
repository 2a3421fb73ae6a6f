// Redistributions inside what other modules do with autograd: recomputed segments, and every back
// end that ranks can talk through.
#include <memory>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "hypershard/dtensor/dtensor.h"
#include "hypershard/nn/recompute.h"
#include "hypershard/testing/run_ranks.h"
#include "hypershard/testing/tensor_matchers.h"

namespace hypershard {
namespace {

using layout::Layout;
using layout::Placement;
using testing::RankBackend;
using testing::run_ranks;

at::Tensor formula(at::IntArrayRef shape, double shift) {
  return at::sin(at::arange(c10::multiply_integers(shape), at::kDouble) + shift).view(shape);
}

/// A column-parallel linear, gelu, and a row-parallel one, as a plan would run them.
struct ShardedMlp {
  explicit ShardedMlp(const std::shared_ptr<const comm::ProcessMesh>& mesh)
      : enter({{5, 4}, kWhole}, kWhole, mesh, {.output = kPartial}, "enter"),
        leave({{5, 4}, kPartial}, kWhole, mesh, {}, "leave"),
        up(dtensor::distribute(formula({6, 4}, 1), {{Placement::shard(0)}}, mesh).to_local()),
        down(dtensor::distribute(formula({4, 6}, 2), {{Placement::shard(1)}}, mesh).to_local()) {
    up.requires_grad_();
    down.requires_grad_();
  }

  at::Tensor forward(const at::Tensor& x) const {
    return leave(at::matmul(at::gelu(at::matmul(enter(x), up.t())), down.t()));
  }

  inline static const Layout kWhole = {{Placement::replicate()}};
  inline static const Layout kPartial = {{Placement::partial()}};
  dtensor::Redistribution enter;
  dtensor::Redistribution leave;
  at::Tensor up;
  at::Tensor down;
};

struct Gradients {
  at::Tensor y, x, up, down;
};

/// The same in one process.
Gradients reference() {
  at::Tensor x = formula({5, 4}, 0).requires_grad_();
  at::Tensor up = formula({6, 4}, 1).requires_grad_();
  at::Tensor down = formula({4, 6}, 2).requires_grad_();
  const at::Tensor y = at::matmul(at::gelu(at::matmul(x, up.t())), down.t());
  y.pow(2).sum().backward();
  return {y.detach(), x.grad(), up.grad(), down.grad()};
}

void expect_equal_to_reference(const std::shared_ptr<comm::World>& world, bool recomputes) {
  const auto mesh = std::make_shared<comm::ProcessMesh>(
      world, layout::DeviceMesh({{"tp", world->size()}}, world->topology())
  );
  const ShardedMlp mlp(mesh);
  at::Tensor x = formula({5, 4}, 0).requires_grad_();
  const auto forward = [&](const at::Tensor& input) { return mlp.forward(input); };
  const at::Tensor y = recomputes ? nn::recompute(forward, x) : forward(x);
  y.pow(2).sum().backward();
  const auto whole = [&](const at::Tensor& local, int dim) {
    return dtensor::from_local(local, {{Placement::shard(dim)}}, mesh).full_tensor();
  };
  const Gradients expected = reference();
  EXPECT_TENSORS_CLOSE(y.detach(), expected.y, 1e-12, 1e-13);
  EXPECT_TENSORS_CLOSE(x.grad(), expected.x, 1e-12, 1e-13);
  EXPECT_TENSORS_CLOSE(whole(mlp.up.grad(), 0), expected.up, 1e-12, 1e-13);
  EXPECT_TENSORS_CLOSE(whole(mlp.down.grad(), 1), expected.down, 1e-12, 1e-13);
}

class RedistributionBackendTest : public ::testing::TestWithParam<RankBackend> {};
INSTANTIATE_TEST_SUITE_P(
    Backends,
    RedistributionBackendTest,
    ::testing::Values(
        RankBackend::kLocal, RankBackend::kDelayed, RankBackend::kShm, RankBackend::kGloo
    ),
    [](const auto& backend) { return to_text(backend.param); }
);

TEST_P(RedistributionBackendTest, ATensorParallelMlpEqualsThePlainOne) {
  run_ranks(
      4,
      [](const std::shared_ptr<comm::World>& world) {
        expect_equal_to_reference(world, /*recomputes=*/false);
      },
      {.backend = GetParam()}
  );
}

TEST_P(RedistributionBackendTest, RecomputedSegmentsRunTheirBoundariesAgain) {
  run_ranks(
      3,
      [](const std::shared_ptr<comm::World>& world) {
        expect_equal_to_reference(world, /*recomputes=*/true);
        const auto entries = world->communicator("tp", {0, 1, 2})->log().entries();
        int leaves = 0;
        for (const comm::LogEntry& entry : entries) {
          leaves += entry.unit == "leave" ? 1 : 0;
        }
        EXPECT_EQ(leaves, 2);
      },
      {.backend = GetParam()}
  );
}

}  // namespace
}  // namespace hypershard
