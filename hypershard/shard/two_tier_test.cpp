// Two tiers: what crosses between supernodes, how often, from where, and that the pipeline around
// it changes no gradient.
#include <algorithm>
#include <cstdlib>
#include <optional>
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
  void run(const Tiers& tiers, const Body& body) const {
    testing::run_ranks(tiers.num_ranks, body, run_options(tiers, GetParam()));
  }
  /// Two supernodes of equally many ranks.
  template <class Body>
  void run(int num_ranks, const Body& body) const {
    run(Tiers{.num_ranks = num_ranks, .num_supernodes = 2}, body);
  }
};

struct SendingCase {
  Tiers tiers;
  bool bf16_wire = false;
};

// A rank sends the gradients of its slice that other supernodes own, and the parameters that it
// owns itself: of S supernodes (S - 1) / S of either, with accumulation or without.
void expect_each_byte_once(
    const std::shared_ptr<comm::World>& world,
    const ShardedModel& sharded,
    NetImpl& model,
    const SendingCase& c,
    int num_micro
) {
  const at::ScalarType dtype = c.bf16_wire ? at::kFloat : at::kDouble;
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
      loss_of(model.forward(rows_of(batch, world->rank(), world->size()))).backward();
    }
    optimizer.step();
    optimizer.zero_grad();
    if (step > 0) {  // the first has nothing to publish
      EXPECT_EQ(
          (sent_between(sharded) - before) * c.tiers.num_supernodes,
          others * slice * (wire_bytes + runtime_bytes)
      ) << to_text(c.tiers)
        << (c.bf16_wire ? " in bf16, " : ", ") << num_micro << " micro-batches, step " << step;
    }
  }
}

TEST_P(TwoTierTest, HierarchicalSendsEachByteOnceAStep) {
  const bool maps_memory = GetParam() == RankBackend::kLocal || GetParam() == RankBackend::kShm;
  for (const SendingCase& c :
       {SendingCase{{2, 2}},
        SendingCase{{4, 2}},
        SendingCase{{4, 4}},
        SendingCase{{4, 2}, true},
        SendingCase{{4, 4}, true}}) {
    run(c.tiers, [&](const std::shared_ptr<comm::World>& world) {
      for (const int num_micro : {1, 3}) {
        Net model;
        model->to(c.bf16_wire ? at::kFloat : at::kDouble);
        FullyShardOptions options = tier_options(Strategy::kHierarchical);
        if (c.bf16_wire) {
          options.precision.wire = at::kBFloat16;
        }
        const ShardedModel sharded =
            fully_shard(*model, make_mesh(world, c.tiers.num_supernodes), options);
        expect_each_byte_once(world, sharded, *model, c, num_micro);
        // Of a supernode of one rank nothing is split, and nothing is there to be shared.
        const bool is_whole = c.tiers.num_ranks == c.tiers.num_supernodes;
        const std::string& why = sharded.engine().why_not_shared();
        EXPECT_EQ(why.empty(), maps_memory && !is_whole) << to_text(c.tiers) << ": " << why;
        EXPECT_EQ(sharded.counters().gathered_bytes == 0, maps_memory || is_whole)
            << to_text(c.tiers) << ": " << sharded.counters().gathered_bytes;
      }
    });
  }
}

// Four blocks and the root: in a supernode of two each puts 512 bytes on the link.
TEST_P(TwoTierTest, BucketsCrossInOneCollectiveEach) {
  struct Size {
    std::int64_t bucket_bytes;
    std::vector<std::string> buckets;
  };
  const std::vector<Size> sizes{
      {layout::kBucketOfOne, {"blocks.3", "blocks.2", "blocks.1", "blocks.0", "root"}},
      {1000, {"blocks.2 … blocks.3", "blocks.0 … blocks.1", "root"}},
      {1500, {"blocks.1 … blocks.3", "root … blocks.0"}},
      {layout::kBucketOfAll, {"root … blocks.3"}},
  };
  run(4, [&](const std::shared_ptr<comm::World>& world) {
    for (const Size& size : sizes) {
      const NetOptions shape{.num_blocks = 4};
      Net oracle(shape);
      Net model(shape);
      const ShardedModel sharded = fully_shard(
          *model, make_mesh(world, 2), tier_options(Strategy::kHierarchical, size.bucket_bytes)
      );
      for (int step = 0; step < 3; ++step) {
        sharded.zero_grad();
        const at::Tensor batch = make_inputs(8, 5, step);
        const auto expected =
            reference_gradients([&] { return loss_of(oracle->forward(batch)); }, *oracle);
        log_between(sharded).clear();
        loss_of(model->forward(rows_of(batch, world->rank(), 4))).backward();
        std::vector<std::string> crossed;
        for (const comm::LogEntry& entry : log_between(sharded).entries()) {
          EXPECT_EQ(entry.op, comm::Op::kReduceScatter);
          crossed.push_back(entry.unit);
        }
        EXPECT_EQ(crossed, size.buckets) << "buckets of " << size.bucket_bytes;
        EXPECT_LE(worst_gradient(sharded, expected), kNear);
      }
    }
  });
}

// Inside the supernode peers read gradients where they were written. What comes in messages:
// parameters lie where they arrive, gradients beside the rank's own, once, to be summed; but for
// all-reduces, of which small ones send a copy.
void expect_staged_bytes(
    const ShardedModel& sharded, const comm::CommStats& before, RankBackend ranks, bool scatters
) {
  const bool maps_memory = ranks == RankBackend::kLocal || ranks == RankBackend::kShm;
  const DataAxis& inside = axis_of(sharded, "shard");
  const DataAxis& between = axis_of(sharded, "replicate");
  if (maps_memory) {
    EXPECT_EQ(inside.reduce->stats().staged_bytes, 0);
    EXPECT_EQ(inside.gather->stats().staged_bytes, 0);
  }
  EXPECT_EQ(between.gather->stats().staged_bytes, 0);
  const bool has_messages = ranks == RankBackend::kGloo || ranks == RankBackend::kShm;
  EXPECT_EQ(between.reduce->backend() == "c10d:gloo", has_messages) << between.reduce->backend();
  if (scatters) {
    const comm::CommStats after = between.reduce->stats();
    const std::int64_t received = after.received_bytes - before.received_bytes;
    EXPECT_GT(received, 0);
    EXPECT_EQ(after.staged_bytes - before.staged_bytes, has_messages ? received : 0);
  }
}

TEST_P(TwoTierTest, NoGradientIsCopiedOnTheWay) {
  for (const int num_ranks : {2, 4}) {
    run(num_ranks, [&](const std::shared_ptr<comm::World>& world) {
      for (const Strategy strategy : {Strategy::kHierarchical, Strategy::kHsdp, Strategy::kZero3}) {
        SCOPED_TRACE(to_text(strategy) + ", " + std::to_string(num_ranks) + " ranks");
        Net model;
        const ShardedModel sharded =
            fully_shard(*model, make_mesh(world, 2), tier_options(strategy));
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
        const comm::CommStats before = axis_of(sharded, "replicate").reduce->stats();
        for (int step = 0; step < 2; ++step) {
          sharded.zero_grad();
          sharded.reset_counters();
          loss_of(model->forward(rows_of(batch, world->rank(), num_ranks))).backward();
          EXPECT_EQ(sharded.counters().copied_bytes, into_buffers);
          EXPECT_EQ(sharded.counters().accumulated_bytes, 0);
        }
        expect_staged_bytes(sharded, before, GetParam(), strategy != Strategy::kHsdp);
      }
    });
  }
}

// Six equal layers with clearly different gradients, whatever the depths and whoever is late.
TEST_P(TwoTierTest, EqualLayersKeepTheirOwnGradients) {
  struct Size {
    std::int64_t bucket_bytes;
    int on_two;  ///< buckets, of seven units
    int on_four;
  };
  // A block puts 1024 bytes on the link from a supernode of one rank, 512 from each of two; the
  // root no more.
  constexpr Size kSizes[] = {
      {layout::kBucketOfOne, 7, 7}, {kSomeUnits, 4, 3}, {layout::kBucketOfAll, 1, 1}
  };
  const auto train = [](const std::shared_ptr<comm::World>& world,
                        const FullyShardOptions& options,
                        int num_expected_buckets,
                        const std::string& what) {
    const NetOptions shape{.num_blocks = 6};
    Net oracle(shape);
    Net model(shape);
    const ShardedModel sharded = fully_shard(*model, make_mesh(world, 2), options);
    EXPECT_EQ(num_buckets(sharded), num_expected_buckets) << what;
    for (int step = 0; step < 2; ++step) {  // in the order of declaration, in that of the forward
      sharded.zero_grad();
      const at::Tensor batch = make_inputs(8, 5, step);
      const auto expected =
          reference_gradients([&] { return loss_of(oracle->forward(batch)); }, *oracle);
      EXPECT_GT(least_difference(expected, shape.num_blocks), 1e-3);
      loss_of(model->forward(rows_of(batch, world->rank(), world->size()))).backward();
      EXPECT_LE(worst_gradient(sharded, expected), kNear) << what << ", step " << step;
    }
  };
  for (const int num_ranks : {2, 4}) {
    run(num_ranks, [&](const std::shared_ptr<comm::World>& world) {
      for (const Strategy strategy : {Strategy::kHierarchical, Strategy::kHsdp, Strategy::kZero3}) {
        for (const int depth : {1, 2, 4}) {
          for (const Size& size : kSizes) {
            FullyShardOptions options = tier_options(strategy, size.bucket_bytes);
            options.gradient_buffers = depth;
            const std::string what = to_text(strategy) + ", depth " + std::to_string(depth) +
                                     ", buckets of " + std::to_string(size.bucket_bytes);
            train(world, options, num_ranks == 2 ? size.on_two : size.on_four, what);
          }
        }
      }
    });
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
    double largest = 0;
    std::vector<at::Tensor> found;
    for (const auto& item : model->named_parameters()) {
      const at::Tensor a = exact.full_gradient(item.key());
      const at::Tensor b = sharded.full_gradient(item.key());
      const double scale = a.abs().max().item<double>();
      const double difference = (a - b).abs().max().item<double>();
      EXPECT_LE(difference, scale / 64) << to_text(strategy) << ", " << item.key();
      largest = std::max(largest, difference);
      found.push_back(b.clone());
    }
    EXPECT_GT(largest, 0) << "it did travel in bf16";
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

/// Sets an environment variable as long as it lives.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~ScopedVariable() { ::unsetenv(name_); }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  const char* name_;
};

/// Expects that on all ranks the same units begin a bucket. Collective: all ranks.
void expect_equal_buckets(const std::shared_ptr<comm::World>& world, const ShardedModel& sharded) {
  std::vector<std::int64_t> begins;
  std::string last;
  for (const auto& unit : sharded.engine().units()) {
    const std::string& name = sharded.engine().buckets().name_of(unit->index());
    begins.push_back(name == last ? 0 : 1);
    last = name;
  }
  const at::Tensor mine = at::tensor(begins, at::kLong);
  const at::Tensor all = at::empty({world->size(), mine.numel()}, at::kLong);
  world->world_communicator()->all_gather(all.view({-1}), mine)->wait_released();
  EXPECT_TRUE(at::equal(all, mine.expand_as(all))) << all;
}

ShardedModel shard_measured(const std::shared_ptr<comm::World>& world, NetImpl& model) {
  FullyShardOptions options = tier_options(Strategy::kHierarchical);
  options.bucket_bytes = std::nullopt;
  return fully_shard(model, make_mesh(world, 2), options);
}

// Each link between two ranks is measured by itself, and no two measurements are alike.
TEST(MeasuredBucketsTest, AreTheSameOnAllRanks) {
  for (const RankBackend backend : {RankBackend::kGloo, RankBackend::kShm}) {
    testing::run_ranks(
        4,
        [](const std::shared_ptr<comm::World>& world) {
          for (int attempt = 0; attempt < 3; ++attempt) {
            Net model(NetOptions{.dim = 64, .hidden = 128, .num_blocks = 48});
            expect_equal_buckets(world, shard_measured(world, *model));
          }
        },
        run_options({4, 2}, backend)
    );
  }
}

TEST(MeasuredBucketsTest, AreOfOneUnitWhereThereIsNoLink) {
  testing::run_ranks(
      4,
      [](const std::shared_ptr<comm::World>& world) {
        Net model;
        EXPECT_EQ(num_buckets(shard_measured(world, *model)), 4);
      },
      run_options({4, 2}, RankBackend::kLocal)
  );
}

void expect_one_bucket(const char* delay_us, int num_blocks) {
  const ScopedVariable delay("HS_LINK_DELAY_US", delay_us);  // which processes inherit
  testing::run_ranks(
      4,
      [&](const std::shared_ptr<comm::World>& world) {
        Net model(NetOptions{.dim = 64, .hidden = 128, .num_blocks = num_blocks});
        const ShardedModel sharded = shard_measured(world, *model);
        expect_equal_buckets(world, sharded);
        EXPECT_EQ(num_buckets(sharded), 1) << "at " << delay_us << " us";
      },
      run_options({4, 2}, RankBackend::kShm)
  );
}

// Half a megabyte takes any network less than nine times ten milliseconds.
TEST(MeasuredBucketsTest, AreOfAllUnitsOnALinkThatAnswersLate) {
  expect_one_bucket("10000", /*num_blocks=*/8);
}

// The later it answers, the more must go at once: three megabytes here.
TEST(MeasuredBucketsTest, AreOfNoFewerUnitsOnALinkThatAnswersLater) {
  expect_one_bucket("30000", /*num_blocks=*/48);
}

}  // namespace
}  // namespace hypershard::shard::test
