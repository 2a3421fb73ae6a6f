// What a supernode holds of a gathered unit, and what enters and leaves it: one copy, each byte
// once, whoever is slow.
#include "hypershard/shard/shared_unit_pool.h"

#include <chrono>
#include <cstring>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/optim/sgd.h>

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

class SharedUnitPoolTest : public ::testing::TestWithParam<RankBackend> {
 protected:
  template <class Body>
  void run(int num_ranks, int supernodes, const Body& body) const {
    testing::RunRanksOptions options{.backend = GetParam()};
    for (int rank = 0; rank < num_ranks; ++rank) {
      options.supernodes.push_back(std::to_string(rank / (num_ranks / supernodes)));
    }
    testing::run_ranks(num_ranks, body, options);
  }
};

void sleep_up_to(std::mt19937& random, int most_us) {
  std::this_thread::sleep_for(
      std::chrono::microseconds(std::uniform_int_distribution<int>(0, most_us)(random))
  );
}

// Each rank writes its part of a unit; whoever is behind, all read what all have written.
TEST_P(SharedUnitPoolTest, RanksMeetInOneBufferWhateverTheTiming) {
  constexpr int kRanks = 3;
  run(kRanks, 1, [](const std::shared_ptr<comm::World>& world) {
    const auto ranks = world->communicator("shard", {0, 1, 2});
    Counters counters;
    SharedUnitPool pool(*ranks, {96, 192, 96, 0, 96}, &counters, /*poison=*/true);
    std::mt19937 random(static_cast<unsigned>(world->rank()));
    std::int64_t most = 0;
    for (int turn = 0; turn < 400; ++turn) {
      const int unit = std::vector<int>{0, 1, 2, 4}[static_cast<std::size_t>(turn % 4)];
      const SharedUnitPool::Buffer& buffer = pool.acquire(unit);
      ASSERT_EQ(buffer.write.numel(), unit == 1 ? 192 : 96);
      const std::int64_t part = buffer.write.numel() / kRanks;
      std::memset(
          static_cast<std::byte*>(buffer.write.mutable_data_ptr()) + world->rank() * part,
          turn % 251 + world->rank(),
          static_cast<std::size_t>(part)
      );
      sleep_up_to(random, 50);
      pool.land("unit")->wait();
      const auto* bytes = buffer.read.const_data_ptr<std::uint8_t>();
      for (std::int64_t i = 0; i < buffer.read.numel(); ++i) {
        ASSERT_EQ(bytes[i], turn % 251 + i / part) << "turn " << turn << ", byte " << i;
      }
      sleep_up_to(random, 50);
      pool.release(buffer);
      most = std::max(most, pool.used_bytes());
    }
    // Of each size, one that is read and one that a rank ahead fills; never as many as there are.
    EXPECT_LE(most, 4 * 96 + 2 * 192);
    EXPECT_EQ(counters.live_unsharded_bytes, 0);
    EXPECT_EQ(counters.peak_unsharded_bytes, 192 / kRanks);
  });
}

TEST_P(SharedUnitPoolTest, BuffersInUseAreNotGivenAway) {
  run(2, 1, [](const std::shared_ptr<comm::World>& world) {
    const auto ranks = world->communicator("shard", {0, 1});
    Counters counters;
    SharedUnitPool pool(*ranks, {64, 64, 64}, &counters, /*poison=*/false);
    const SharedUnitPool::Buffer& first = pool.acquire(0);
    const SharedUnitPool::Buffer& second = pool.acquire(1);
    EXPECT_NE(first.slot, second.slot);
    pool.land("first")->wait();
    pool.land("second")->wait();
    if (world->rank() == 0) {
      pool.release(first);  // and rank 1 still reads it
    }
    ranks->barrier("one has released")->wait();
    const SharedUnitPool::Buffer& third = pool.acquire(2);
    EXPECT_NE(third.slot, first.slot);
    EXPECT_NE(third.slot, second.slot);
    pool.land("third")->wait();
    if (world->rank() == 1) {
      pool.release(first);
    }
    ranks->barrier("both have released")->wait();
    EXPECT_EQ(pool.acquire(0).slot, first.slot);
    EXPECT_EQ(pool.used_bytes(), 3 * 64);
  });
}

/// A model trained for some steps: its parameters, and what that moved and held.
struct Trained {
  std::vector<at::Tensor> parameters;
  std::int64_t gathered_bytes = 0;  ///< in the last step, over all ranks
  std::int64_t peak_bytes = 0;      ///< over all ranks
  std::int64_t whole_bytes = 0;     ///< of the model
};

std::int64_t sum_over_ranks(comm::Communicator& ranks, std::int64_t own) {
  const at::Tensor all = at::empty({ranks.size()}, at::kLong);
  ranks.all_gather(all, at::full({1}, own, at::kLong))->wait();
  return all.sum().item<std::int64_t>();
}

Trained train(
    const std::shared_ptr<comm::World>& world, int replicate, FullyShardOptions options, int steps
) {
  Net model;
  options.units = {"blocks.*"};
  ShardedModel sharded = fully_shard(*model, make_mesh(world, replicate), options);
  torch::optim::SGD optimizer(sharded.update_tensors(), torch::optim::SGDOptions(0.05));
  std::mt19937 random(static_cast<unsigned>(world->rank()));
  for (int step = 0; step < steps; ++step) {
    sharded.reset_counters();
    sleep_up_to(random, 300);
    const at::Tensor batch = make_inputs(8, 5, step);
    loss_of(model->forward(rows_of(batch, world->rank(), world->size()))).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  Trained result;
  const auto everyone = world->world_communicator();
  result.gathered_bytes = sum_over_ranks(*everyone, sharded.counters().gathered_bytes);
  result.peak_bytes = sum_over_ranks(*everyone, sharded.counters().peak_unsharded_bytes);
  for (const auto& unit : sharded.engine().units()) {
    for (const auto& group : unit->groups()) {
      result.whole_bytes += group->whole_compute_bytes();
    }
  }
  sharded.visit_full_parameters([&](const std::string&, const at::Tensor& full) {
    result.parameters.push_back(full.clone());
  });
  return result;
}

FullyShardOptions zero3(Share share) {
  FullyShardOptions options;
  options.share = share;
  return options;
}

// From other supernodes each byte enters once, not once a rank; inside nothing moves.
TEST_P(SharedUnitPoolTest, Zero3BringsEachByteIntoASupernodeOnce) {
  run(4, 2, [](const std::shared_ptr<comm::World>& world) {
    const Trained shared = train(world, 2, zero3(Share::kOn), 3);
    const Trained own = train(world, 2, zero3(Share::kOff), 3);
    // The root is gathered in forward only, blocks in backward as well; half of each comes from
    // afar. Without sharing three quarters come from others, to each of the four ranks.
    EXPECT_EQ(own.gathered_bytes, 3 * shared.gathered_bytes);
    EXPECT_GT(shared.gathered_bytes, shared.whole_bytes);
    EXPECT_LT(shared.gathered_bytes, 2 * shared.whole_bytes);
    // One copy a supernode, where each rank would hold one.
    EXPECT_EQ(own.peak_bytes, 2 * shared.peak_bytes);
    for (std::size_t i = 0; i < own.parameters.size(); ++i) {
      EXPECT_TRUE(shared.parameters[i].equal(own.parameters[i])) << i;
    }
  });
}

/// Bytes that this rank has sent along both axes of its mesh.
struct Sent {
  std::int64_t gathers_inside = 0;
  std::int64_t sums_inside = 0;
  std::int64_t gathers_between = 0;
  std::int64_t sums_between = 0;
  bool operator==(const Sent&) const = default;
};
Sent operator-(const Sent& a, const Sent& b) {
  return {
      a.gathers_inside - b.gathers_inside,
      a.sums_inside - b.sums_inside,
      a.gathers_between - b.gathers_between,
      a.sums_between - b.sums_between,
  };
}
void PrintTo(const Sent& sent, std::ostream* out) {
  *out << "inside gathers " << sent.gathers_inside << ", sums " << sent.sums_inside
       << "; between gathers " << sent.gathers_between << ", sums " << sent.sums_between;
}

Sent sent_by(const ShardedModel& sharded) {
  const std::vector<DataAxis>& axes = sharded.engine().parallel().cuts;
  EXPECT_EQ(axes.at(0).name, "shard");
  EXPECT_EQ(axes.at(1).name, "replicate");
  return {
      .gathers_inside = axes[0].gather->stats().sent_bytes,
      .sums_inside = axes[0].reduce->stats().sent_bytes,
      .gathers_between = axes[1].gather->stats().sent_bytes,
      .sums_between = axes[1].reduce->stats().sent_bytes,
  };
}

// By hand. Parameters begin at multiples of 16 elements, matrices first: a block of Net takes 48 +
// 48 (of 7 x 6 each) + 16 (of 7) + 16 (of 6) = 128 elements, the root 32 (of 6 x 5) + 32 (of 3 x 6)
// + 16 (of 6) + 16 (of 3) = 96. Four ranks own a quarter each, of the root in 16s: 128 as well.
constexpr std::int64_t kItem = sizeof(double);
constexpr std::int64_t kQuarter = 128 / 4 * kItem;
constexpr std::int64_t kHalf = 2 * kQuarter;
constexpr std::int64_t kUnits = 4;
// A backward reduces each unit once: a half goes to the other rank of the supernode, and of the
// half that stays a quarter to the other supernode.
constexpr Sent kReduced{.sums_inside = kUnits * kHalf, .sums_between = kUnits * kQuarter};

struct StepTraffic {
  Strategy strategy;
  Share share;
  Sent sent;
  std::int64_t gathered_bytes;  ///< received by unshards
};

const std::vector<StepTraffic>& all_step_traffic() {
  // The blocks are made whole in forward and in backward, the root once.
  constexpr std::int64_t kUnshards = 2 * kUnits - 1;
  static const std::vector<StepTraffic> all = [] {
    // A rank fetches the quarter that makes its half complete, and sends its own for it.
    Sent shared = kReduced;
    shared.gathers_between = kUnshards * kQuarter;
    // On top of that it sends its half to the other rank of the supernode.
    Sent alone = shared;
    alone.gathers_inside = kUnshards * kHalf;
    // What was updated goes to all, once: a quarter to the other supernode, a half inside.
    Sent published = kReduced;
    published.gathers_between = kUnits * kQuarter;
    published.gathers_inside = kUnits * kHalf;
    return std::vector<StepTraffic>{
        {Strategy::kZero3, Share::kOn, shared, kUnshards * kQuarter},
        {Strategy::kZero3, Share::kOff, alone, kUnshards * (kQuarter + kHalf)},
        {Strategy::kZero2, Share::kAuto, published, 0},
    };
  }();
  return all;
}

TEST_P(SharedUnitPoolTest, AStepMovesTheBytesThatAreCountedByHand) {
  run(4, 2, [](const std::shared_ptr<comm::World>& world) {
    for (const StepTraffic& expected : all_step_traffic()) {
      Net model;
      FullyShardOptions options = block_units();
      options.strategy = expected.strategy;
      options.share = expected.share;
      const ShardedModel sharded = fully_shard(*model, make_mesh(world, 2), options);
      torch::optim::SGD optimizer(sharded.update_tensors(), torch::optim::SGDOptions(0.05));
      for (int step = 0; step < 3; ++step) {
        sharded.reset_counters();
        const Sent before = sent_by(sharded);
        loss_of(model->forward(rows_of(make_inputs(8, 5, step), world->rank(), 4))).backward();
        optimizer.step();
        optimizer.zero_grad();
        if (step > 0) {  // the first has nothing to publish
          EXPECT_EQ(sent_by(sharded) - before, expected.sent) << to_text(expected.strategy);
          EXPECT_EQ(sharded.counters().gathered_bytes, expected.gathered_bytes)
              << to_text(expected.strategy);
        }
      }
    }
  });
}

TEST_P(SharedUnitPoolTest, UnitsThatStayOrAreSkippedFindTheirBuffers) {
  run(4, 2, [](const std::shared_ptr<comm::World>& world) {
    for (const bool reshards : {true, false}) {
      for (const int prefetch : {0, 1, 3}) {
        FullyShardOptions options = zero3(Share::kOn);
        options.reshard_after_forward = reshards;
        options.forward_prefetch = prefetch;
        options.backward_prefetch = prefetch;
        Net oracle(NetOptions{.num_blocks = 5, .recompute = true});
        Net model(NetOptions{.num_blocks = 5, .recompute = true});
        options.units = {"blocks.*"};
        ShardedModel sharded = fully_shard(*model, make_mesh(world, 2), options);
        for (int step = 0; step < 4; ++step) {
          // One rank skips a block, which the others run.
          model->skip_block = step == 3 && world->rank() == 1 ? 2 : -1;
          sharded.zero_grad();
          const at::Tensor batch = make_inputs(8, 5, step);
          const auto expected =
              reference_gradients([&] { return loss_of(oracle->forward(batch)); }, *oracle);
          loss_of(model->forward(rows_of(batch, world->rank(), 4))).backward();
          if (step < 3) {
            EXPECT_LE(worst_gradient(sharded, expected), kNear);
          }
        }
        EXPECT_EQ(sharded.counters().live_unsharded_bytes, 0);
      }
    }
  });
}

// The mean over all ranks, whole on each, crosses once a supernode: each rank takes half of it.
TEST_P(SharedUnitPoolTest, WholeSumsCrossOnceASupernode) {
  run(4, 2, [](const std::shared_ptr<comm::World>& world) {
    for (const Strategy strategy : {Strategy::kDdp, Strategy::kZero1}) {
      for (const int num_micro : {1, 2}) {
        Net oracle;
        Net model;
        FullyShardOptions options = block_units();
        options.strategy = strategy;
        ShardedModel sharded = fully_shard(*model, make_mesh(world, 2), options);
        std::int64_t whole = 0;
        for (const auto& unit : sharded.engine().units()) {
          for (const auto& group : unit->groups()) {
            whole += group->packing().numel * static_cast<std::int64_t>(sizeof(double));
          }
        }
        const comm::Communicator* between = nullptr;
        for (const DataAxis& axis : sharded.engine().parallel().summed) {
          between = axis.name == "replicate" ? axis.reduce.get() : between;
        }
        ASSERT_NE(between, nullptr);
        for (int step = 0; step < 2; ++step) {
          sharded.zero_grad();
          sharded.reset_counters();
          const std::int64_t before = between->stats().sent_bytes;
          std::map<std::string, at::Tensor> expected;
          for (int micro = 0; micro < num_micro; ++micro) {
            sharded.set_requires_all_reduce(micro + 1 == num_micro);
            const at::Tensor batch = make_inputs(8, 5, 10 * step + micro);
            const auto part =
                reference_gradients([&] { return loss_of(oracle->forward(batch)); }, *oracle);
            for (const auto& [name, gradient] : part) {
              expected[name] = expected.count(name) > 0 ? expected[name] + gradient : gradient;
            }
            loss_of(model->forward(rows_of(batch, world->rank(), 4))).backward();
          }
          EXPECT_LE(worst_gradient(sharded, expected), kNear);
          EXPECT_EQ(
              sum_over_ranks(*world->world_communicator(), between->stats().sent_bytes - before),
              2 * whole
          );
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Backends, SharedUnitPoolTest, ::testing::Values(RankBackend::kLocal, RankBackend::kShm), name_of
);

}  // namespace
}  // namespace hypershard::shard::test
