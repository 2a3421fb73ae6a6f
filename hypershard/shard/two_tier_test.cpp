// Two tiers: what crosses between supernodes, how often, from where, and that the pipeline around
// it changes no gradient.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/optim/sgd.h>

#include "hypershard/core/error.h"
#include "hypershard/shard/test_two_tier.h"

namespace hypershard::shard::test {
namespace {

using layout::Strategy;
using testing::RankBackend;

constexpr double kNear = 1e-12;

std::string name_of(const ::testing::TestParamInfo<RankBackend>& info) {
  return testing::to_text(info.param);
}

class TwoTierTest : public ::testing::TestWithParam<RankBackend> {
 protected:
  template <class Body>
  void run(const Tiers& tiers, const Body& body, std::uint64_t seed = 0) const {
    testing::run_ranks(tiers.num_ranks, body, run_options(tiers, GetParam(), seed));
  }
  /// Two supernodes of equally many ranks.
  template <class Body>
  void run(int num_ranks, const Body& body, std::uint64_t seed = 0) const {
    run(Tiers{.num_ranks = num_ranks, .num_supernodes = 2}, body, seed);
  }
};

// A rank sends the gradients of its slice that other supernodes own, and the parameters that it
// owns itself: of S supernodes (S - 1) / S of either, with accumulation or without.
TEST_P(TwoTierTest, HierarchicalSendsEachByteOnceAStep) {
  struct Case {
    Tiers tiers;
    bool bf16_wire = false;
  };
  for (const Case& c :
       {Case{{2, 2}}, Case{{4, 2}}, Case{{4, 4}}, Case{{4, 2}, true}, Case{{4, 4}, true}}) {
    for (const int num_micro : {1, 3}) {
      run(c.tiers, [&](const std::shared_ptr<comm::World>& world) {
        const at::ScalarType dtype = c.bf16_wire ? at::kFloat : at::kDouble;
        Net model;
        model->to(dtype);
        FullyShardOptions options = tier_options(Strategy::kHierarchical);
        if (c.bf16_wire) {
          options.precision.wire = at::kBFloat16;
        }
        ShardedModel sharded =
            fully_shard(*model, make_mesh(world, c.tiers.num_supernodes), options);
        torch::optim::SGD optimizer(sharded.update_tensors(), torch::optim::SGDOptions(0.05));
        std::int64_t slice = 0;
        for (const auto& unit : sharded.engine().units()) {
          for (const auto& group : unit->groups()) {
            slice += group->runtime_range().numel();
          }
        }
        const auto runtime_bytes = static_cast<std::int64_t>(at::elementSize(dtype));
        const std::int64_t wire_bytes = c.bf16_wire ? 2 : runtime_bytes;
        const int others = c.tiers.num_supernodes - 1;
        for (int step = 0; step < 3; ++step) {
          const std::int64_t before = sent_between(sharded);
          for (int micro = 0; micro < num_micro; ++micro) {
            sharded.set_requires_all_reduce(micro + 1 == num_micro);
            const at::Tensor batch = make_inputs(8, 5, step, dtype);
            loss_of(model->forward(rows_of(batch, world->rank(), world->size()))).backward();
          }
          optimizer.step();
          optimizer.zero_grad();
          if (step > 0) {  // the first has nothing to publish
            EXPECT_EQ(
                (sent_between(sharded) - before) * c.tiers.num_supernodes,
                others * slice * (wire_bytes + runtime_bytes)
            ) << to_text(c.tiers)
              << (c.bf16_wire ? " in bf16, " : ", ") << num_micro << " micro-batches, step "
              << step;
          }
        }
        if (sharded.engine().why_not_shared().empty()) {
          EXPECT_EQ(sharded.counters().gathered_bytes, 0);
        }
      });
    }
  }
}

TEST_P(TwoTierTest, BucketsCrossInOneCollectiveEach) {
  struct Size {
    std::int64_t bucket_bytes;
    int crossings;
  };
  // Three blocks and the root; 400 bytes are more than one block's slice puts on the link, on 4
  // ranks, and less than two do.
  for (const Size& size : {Size{layout::kBucketOfOne, 4}, Size{layout::kBucketOfAll, 1}}) {
    run(4, [&](const std::shared_ptr<comm::World>& world) {
      Net oracle;
      Net model;
      ShardedModel sharded = fully_shard(
          *model, make_mesh(world, 2), tier_options(Strategy::kHierarchical, size.bucket_bytes)
      );
      for (int step = 0; step < 3; ++step) {
        const auto before = log_between(sharded).count(comm::Op::kReduceScatter);
        sharded.zero_grad();
        const at::Tensor batch = make_inputs(8, 5, step);
        const auto expected =
            reference_gradients([&] { return loss_of(oracle->forward(batch)); }, *oracle);
        loss_of(model->forward(rows_of(batch, world->rank(), 4))).backward();
        EXPECT_EQ(log_between(sharded).count(comm::Op::kReduceScatter) - before, size.crossings);
        EXPECT_LE(worst_gradient(sharded, expected), kNear);
      }
    });
  }
}

TEST_P(TwoTierTest, NoGradientIsCopiedOnTheWay) {
  for (const Strategy strategy : {Strategy::kHierarchical, Strategy::kHsdp, Strategy::kZero3}) {
    for (const int num_ranks : {2, 4}) {
      run(num_ranks, [&](const std::shared_ptr<comm::World>& world) {
        Net model;
        ShardedModel sharded = fully_shard(*model, make_mesh(world, 2), tier_options(strategy));
        const at::Tensor batch = make_inputs(8, 5, 0);
        // Plain layers: autograd's gradient is moved into the buffer, once, and nothing else is.
        std::int64_t into_buffers = 0;
        for (const auto& unit : sharded.engine().units()) {
          for (const auto& group : unit->groups()) {
            for (const layout::Segment& segment : group->packing().segments) {
              into_buffers += segment.numel * static_cast<std::int64_t>(sizeof(double));
            }
          }
        }
        const std::string what = to_text(strategy) + ", " + std::to_string(num_ranks) + " ranks";
        for (int step = 0; step < 2; ++step) {
          sharded.zero_grad();
          sharded.reset_counters();
          loss_of(model->forward(rows_of(batch, world->rank(), num_ranks))).backward();
          EXPECT_EQ(sharded.counters().copied_bytes, into_buffers) << what;
          EXPECT_EQ(sharded.counters().accumulated_bytes, 0) << what;
        }
        // Peers read gradients where they were written.
        if (GetParam() == RankBackend::kLocal || GetParam() == RankBackend::kShm) {
          const DataAxis& inside = axis_of(sharded, "shard");
          EXPECT_EQ(inside.reduce->stats().staged_bytes, 0) << what;
          EXPECT_EQ(inside.gather->stats().staged_bytes, 0) << what;
        }
      });
    }
  }
}

// By how much the gradients of two blocks differ at least, beside the larger.
double least_difference(const std::map<std::string, at::Tensor>& gradients, int num_blocks) {
  double least = std::numeric_limits<double>::infinity();
  for (const char* parameter : {".a.weight", ".a.bias", ".b.weight", ".b.bias"}) {
    for (int i = 0; i < num_blocks; ++i) {
      for (int j = 0; j < i; ++j) {
        const at::Tensor& x = gradients.at("blocks." + std::to_string(i) + parameter);
        const at::Tensor& y = gradients.at("blocks." + std::to_string(j) + parameter);
        const double size = std::max(x.norm().item<double>(), y.norm().item<double>());
        least = std::min(least, (x - y).norm().item<double>() / size);
      }
    }
  }
  return least;
}

// Six equal layers with clearly different gradients, whatever the depths and whoever is late.
TEST_P(TwoTierTest, EqualLayersKeepTheirOwnGradients) {
  for (const int depth : {1, 2, 4}) {
    for (const std::int64_t bucket :
         {layout::kBucketOfOne, std::int64_t{1000}, layout::kBucketOfAll}) {
      for (const int num_ranks : {2, 4}) {
        run(
            num_ranks,
            [&](const std::shared_ptr<comm::World>& world) {
              const NetOptions shape{.num_blocks = 6};
              Net oracle(shape);
              Net model(shape);
              FullyShardOptions options = tier_options(Strategy::kHierarchical, bucket);
              options.gradient_buffers = depth;
              const ShardedModel sharded = fully_shard(*model, make_mesh(world, 2), options);
              for (int step = 0; step < 4; ++step) {
                sharded.zero_grad();
                const at::Tensor batch = make_inputs(8, 5, step);
                const auto expected =
                    reference_gradients([&] { return loss_of(oracle->forward(batch)); }, *oracle);
                EXPECT_GT(least_difference(expected, shape.num_blocks), 1e-3);
                loss_of(model->forward(rows_of(batch, world->rank(), num_ranks))).backward();
                EXPECT_LE(worst_gradient(sharded, expected), kNear)
                    << "depth " << depth << ", bucket " << bucket;
              }
            },
            static_cast<std::uint64_t>(depth)
        );
      }
    }
  }
}

// A backward that fails leaves buckets that lack a unit; the next one must not wait for it.
TEST_P(TwoTierTest, BucketOfAFailedBackwardIsGivenUp) {
  run(2, [&](const std::shared_ptr<comm::World>& world) {
    Net oracle;
    Net model;
    ShardedModel sharded = fully_shard(
        *model, make_mesh(world, 2), tier_options(Strategy::kHierarchical, layout::kBucketOfAll)
    );
    const at::Tensor batch = make_inputs(8, 5, 0);
    const auto expected =
        reference_gradients([&] { return loss_of(oracle->forward(batch)); }, *oracle);
    for (int attempt = 0; attempt < 3; ++attempt) {
      at::Tensor input = rows_of(batch, world->rank(), 2).clone().requires_grad_();
      const bool fails = attempt == 1;
      const at::Tensor loss = loss_of(model->forward(input));
      // The gradient of the input comes last but one: most units have posted by then.
      input.register_hook([fails](const at::Tensor&) { HS_CHECK(!fails, "a test's failure"); });
      const std::string error = thrown_by([&] { loss.backward(); });
      EXPECT_EQ(error.find("a test's failure") != std::string::npos, fails) << error;
      if (!fails) {
        EXPECT_LE(worst_gradient(sharded, expected), kNear);
      }
      sharded.zero_grad();
    }
  });
}

// A sum in bf16 rounds each rank's gradient, the wire each supernode's sum, either a few times; and
// runs agree to the bit.
void expect_near_in_bf16(
    const std::shared_ptr<comm::World>& world, Strategy strategy, const MixedPrecision& precision
) {
  std::vector<at::Tensor> first;
  for (int attempt = 0; attempt < 2; ++attempt) {
    Net exact_model;
    Net model;
    exact_model->to(at::kFloat);
    model->to(at::kFloat);
    const comm::ProcessMesh mesh = make_mesh(world, 2);
    const ShardedModel exact = fully_shard(*exact_model, mesh, tier_options(strategy));
    FullyShardOptions options = tier_options(strategy, layout::kBucketOfAll);
    options.precision = precision;
    const ShardedModel sharded = fully_shard(*model, mesh, options);
    const at::Tensor batch = rows_of(make_inputs(8, 5, 0, at::kFloat), world->rank(), 4);
    loss_of(exact_model->forward(batch)).backward();
    loss_of(model->forward(batch)).backward();
    double largest_difference = 0;
    std::vector<at::Tensor> found;
    for (const auto& item : model->named_parameters()) {
      const at::Tensor a = exact.full_gradient(item.key());
      const at::Tensor b = sharded.full_gradient(item.key());
      const double scale = a.abs().max().item<double>();
      const double difference = (a - b).abs().max().item<double>();
      EXPECT_LE(difference, scale / 64) << to_text(strategy) << ", " << item.key();
      largest_difference = std::max(largest_difference, difference);
      found.push_back(b.clone());
    }
    EXPECT_GT(largest_difference, 0) << "it did travel in bf16";
    first = attempt == 0 ? found : first;
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(at::equal(first[i], found[i])) << to_text(strategy) << ", parameter " << i;
    }
  }
}

TEST_P(TwoTierTest, GradientsMayTravelInBf16) {
  run(4, [](const std::shared_ptr<comm::World>& world) {
    for (const Strategy strategy : {Strategy::kHierarchical, Strategy::kHsdp, Strategy::kDdp}) {
      expect_near_in_bf16(world, strategy, {.wire = at::kBFloat16});
      expect_near_in_bf16(world, strategy, {.reduce = at::kBFloat16});
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, TwoTierTest, ::testing::ValuesIn(all_backends()), name_of);

}  // namespace
}  // namespace hypershard::shard::test
