// Two tiers: what crosses between supernodes, how often, from where, and that the pipeline around
// it changes no gradient.
#include <cmath>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/optim/sgd.h>

#include "hypershard/core/error.h"
#include "hypershard/core/trace.h"
#include "hypershard/layout/bucket.h"
#include "hypershard/shard/engine.h"
#include "hypershard/shard/test_models.h"

namespace hypershard::shard::test {
namespace {

using layout::Strategy;
using testing::RankBackend;

constexpr double kNear = 1e-12;

std::string name_of(const ::testing::TestParamInfo<RankBackend>& info) {
  return testing::to_text(info.param);
}

FullyShardOptions options_of(Strategy strategy, std::int64_t bucket_bytes = layout::kBucketOfOne) {
  FullyShardOptions options = block_units();
  options.strategy = strategy;
  options.bucket_bytes = bucket_bytes;
  return options;
}

/// Sums over the axis between supernodes.
std::int64_t sent_between(const ShardedModel& sharded) {
  std::int64_t bytes = 0;
  const DataParallel& parallel = sharded.engine().parallel();
  for (const auto* axes : {&parallel.cuts, &parallel.summed}) {
    for (const DataAxis& axis : *axes) {
      if (axis.name == parallel.replicate_axis) {
        bytes += axis.gather->stats().sent_bytes + axis.reduce->stats().sent_bytes;
      }
    }
  }
  return bytes;
}

comm::CollectiveLog& log_between(const ShardedModel& sharded) {
  for (const DataAxis& axis : sharded.engine().parallel().cuts) {
    if (axis.name == sharded.engine().parallel().replicate_axis) {
      return axis.reduce->log();
    }
  }
  return sharded.engine().parallel().summed.back().reduce->log();
}

class TwoTierTest : public ::testing::TestWithParam<RankBackend> {
 protected:
  /// Two supernodes of equally many ranks.
  template <class Body>
  void run(int num_ranks, const Body& body, std::uint64_t seed = 0) const {
    testing::RunRanksOptions options{.backend = GetParam(), .seed = seed};
    for (int rank = 0; rank < num_ranks; ++rank) {
      options.supernodes.push_back(rank < num_ranks / 2 ? "a" : "b");
    }
    testing::run_ranks(num_ranks, body, options);
  }
};

// A rank sends the gradients of its slice that the other supernode owns, and the parameters that it
// owns itself: half of each, with accumulation or without.
TEST_P(TwoTierTest, HierarchicalSendsEachByteOnceAStep) {
  for (const int num_ranks : {2, 4}) {
    for (const int num_micro : {1, 3}) {
      run(num_ranks, [&](const std::shared_ptr<comm::World>& world) {
        Net model;
        ShardedModel sharded =
            fully_shard(*model, make_mesh(world, 2), options_of(Strategy::kHierarchical));
        torch::optim::SGD optimizer(sharded.update_tensors(), torch::optim::SGDOptions(0.05));
        std::int64_t slice = 0;
        for (const auto& unit : sharded.engine().units()) {
          for (const auto& group : unit->groups()) {
            slice += group->runtime_range().numel() * static_cast<std::int64_t>(sizeof(double));
          }
        }
        for (int step = 0; step < 3; ++step) {
          const std::int64_t before = sent_between(sharded);
          for (int micro = 0; micro < num_micro; ++micro) {
            sharded.set_requires_all_reduce(micro + 1 == num_micro);
            const at::Tensor batch = make_inputs(8, 5, step);
            loss_of(model->forward(rows_of(batch, world->rank(), num_ranks))).backward();
          }
          optimizer.step();
          optimizer.zero_grad();
          const std::int64_t publish =
              step == 0 ? 0 : slice / 2;  // the first has nothing to publish
          if (step > 0) {
            EXPECT_EQ(sent_between(sharded) - before, slice / 2 + publish)
                << num_ranks << " ranks, " << num_micro << " micro-batches, step " << step;
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
          *model, make_mesh(world, 2), options_of(Strategy::kHierarchical, size.bucket_bytes)
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
        ShardedModel sharded = fully_shard(*model, make_mesh(world, 2), options_of(strategy));
        const at::Tensor batch = make_inputs(8, 5, 0);
        const auto step = [&] {
          sharded.zero_grad();
          sharded.reset_counters();
          loss_of(model->forward(rows_of(batch, world->rank(), num_ranks))).backward();
          return sharded.counters().copied_bytes;
        };
        // Plain layers: autograd's gradient is moved into the buffer, once, and nothing else is.
        std::int64_t into_buffers = 0;
        for (const auto& unit : sharded.engine().units()) {
          for (const auto& group : unit->groups()) {
            for (const layout::Segment& segment : group->packing().segments) {
              into_buffers += segment.numel * static_cast<std::int64_t>(sizeof(double));
            }
          }
        }
        EXPECT_EQ(step(), into_buffers) << to_text(strategy) << ", " << num_ranks << " ranks";
        EXPECT_EQ(step(), into_buffers) << to_text(strategy) << ", " << num_ranks << " ranks";
      });
    }
  }
}

// Micro-batches that are summed inside only, or not at all, and then cross.
TEST_P(TwoTierTest, AccumulationModesAgree) {
  for (const Strategy strategy : {Strategy::kHierarchical, Strategy::kHsdp, Strategy::kZero3}) {
    for (const std::int64_t bucket : {layout::kBucketOfOne, layout::kBucketOfAll}) {
      run(4, [&](const std::shared_ptr<comm::World>& world) {
        for (const int mode : {0, 1, 2}) {
          for (const int num_micro : {1, 2, 4}) {
            Net oracle;
            Net model;
            ShardedModel sharded =
                fully_shard(*model, make_mesh(world, 2), options_of(strategy, bucket));
            const at::Tensor batch = make_inputs(16, 5, mode);
            const auto expected =
                reference_gradients([&] { return loss_of(oracle->forward(batch)); }, *oracle);
            const std::int64_t rows = 16 / num_micro;
            for (int micro = 0; micro < num_micro; ++micro) {
              const bool last = micro + 1 == num_micro;
              sharded.set_requires_gradient_sync(mode != 1 || last);
              sharded.set_requires_all_reduce(mode != 2 || last);
              const at::Tensor part = batch.narrow(0, rows * micro, rows);
              (loss_of(model->forward(rows_of(part, world->rank(), 4))) / num_micro).backward();
            }
            EXPECT_LE(worst_gradient(sharded, expected), kNear)
                << to_text(strategy) << ", mode " << mode << ", " << num_micro << " micro-batches";
          }
        }
      });
    }
  }
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
              FullyShardOptions options = options_of(Strategy::kHierarchical, bucket);
              options.gradient_buffers = depth;
              const ShardedModel sharded = fully_shard(*model, make_mesh(world, 2), options);
              for (int step = 0; step < 4; ++step) {
                sharded.zero_grad();
                const at::Tensor batch = make_inputs(8, 5, step);
                const auto expected =
                    reference_gradients([&] { return loss_of(oracle->forward(batch)); }, *oracle);
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
        *model, make_mesh(world, 2), options_of(Strategy::kHierarchical, layout::kBucketOfAll)
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

// The wire rounds each supernode's sum once, and runs agree to the bit.
TEST_P(TwoTierTest, GradientsMayTravelInBf16) {
  run(4, [&](const std::shared_ptr<comm::World>& world) {
    std::vector<at::Tensor> first;
    for (int attempt = 0; attempt < 2; ++attempt) {
      Net exact_model;
      Net model;
      exact_model->to(at::kFloat);
      model->to(at::kFloat);
      ShardedModel exact =
          fully_shard(*exact_model, make_mesh(world, 2), options_of(Strategy::kHierarchical));
      FullyShardOptions options = options_of(Strategy::kHierarchical, layout::kBucketOfAll);
      options.precision.wire = at::kBFloat16;
      ShardedModel sharded = fully_shard(*model, make_mesh(world, 2), options);
      const at::Tensor batch = rows_of(make_inputs(8, 5, 0, at::kFloat), world->rank(), 4);
      loss_of(exact_model->forward(batch)).backward();
      loss_of(model->forward(batch)).backward();
      double largest_difference = 0;
      for (const auto& item : model->named_parameters()) {
        const at::Tensor a = exact.full_gradient(item.key());
        const at::Tensor b = sharded.full_gradient(item.key());
        const double scale = a.abs().max().item<double>();
        const double difference = (a - b).abs().max().item<double>();
        EXPECT_LE(difference, scale / 64) << item.key();
        largest_difference = std::max(largest_difference, difference);
        if (attempt == 0) {
          first.push_back(b.clone());
        } else {
          EXPECT_TRUE(at::equal(first.front(), b)) << item.key();
          first.erase(first.begin());
        }
      }
      EXPECT_GT(largest_difference, 0);  // it did travel in bf16
    }
  });
}

TEST_P(TwoTierTest, TraceShowsWhatIsBetweenSupernodes) {
  if (GetParam() == RankBackend::kShm) {
    GTEST_SKIP() << "the trace is of one process";
  }
  start_trace();
  run(4, [&](const std::shared_ptr<comm::World>& world) {
    Net model;
    const ShardedModel sharded =
        fully_shard(*model, make_mesh(world, 2), options_of(Strategy::kHierarchical));
    const at::Tensor batch = make_inputs(8, 5, 0);
    loss_of(model->forward(rows_of(batch, world->rank(), 4))).backward();
  });
  stop_trace();
  const std::string json = trace_json();
  for (const char* part :
       {"\"between supernodes",
        "backward blocks.1",
        "reduce blocks.1",
        "\"ph\":\"s\"",
        "\"ph\":\"f\""}) {
    EXPECT_NE(json.find(part), std::string::npos) << part;
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, TwoTierTest, ::testing::ValuesIn(all_backends()), name_of);

}  // namespace
}  // namespace hypershard::shard::test
