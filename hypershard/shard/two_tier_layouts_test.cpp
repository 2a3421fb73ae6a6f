// Layouts over two tiers: every triple that can be stated trains as the unsharded model or says why
// not, on every mesh, and what is frozen puts nothing on the slow link.
#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "hypershard/core/error.h"
#include "hypershard/layout/placement.h"
#include "hypershard/shard/test_two_tier.h"

namespace hypershard::shard::test {
namespace {

using layout::Strategy;
using testing::RankBackend;

std::string name_of(const ::testing::TestParamInfo<RankBackend>& info) {
  return testing::to_text(info.param);
}

class TwoTierLayoutsTest : public ::testing::TestWithParam<RankBackend> {
 protected:
  template <class Body>
  void run(const Tiers& tiers, const Body& body) const {
    testing::run_ranks(tiers.num_ranks, body, run_options(tiers, GetParam()));
  }
};
INSTANTIATE_TEST_SUITE_P(
    Backends, TwoTierLayoutsTest, ::testing::ValuesIn(all_backends()), name_of
);

/// Which planes lie Flat along an axis, the others being whole.
struct Split {
  bool runtime = false;
  bool gradient = false;
  bool update = false;
};
struct Triple {
  Split replicate;
  Split shard;
};

std::string to_text(const Triple& triple) {
  std::string text;
  for (const Split& split : {triple.replicate, triple.shard}) {
    for (const bool flat : {split.runtime, split.gradient, split.update}) {
      text += flat ? "F" : "R";
    }
    text += " ";
  }
  return text;
}

std::vector<Triple> all_triples() {
  const auto split_of = [](int bits) {
    return Split{(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0};
  };
  std::vector<Triple> triples;
  for (int bits = 0; bits < 64; ++bits) {
    triples.push_back({split_of(bits % 8), split_of(bits / 8)});
  }
  return triples;
}

layout::PlaneLayouts layouts_of(const Triple& triple) {
  const auto lay_out = [](bool replicate, bool shard) {
    const auto flat_if = [](bool flat) {
      return flat ? layout::Placement::flat() : layout::Placement::replicate();
    };
    return layout::Layout{.placements = {flat_if(replicate), flat_if(shard)}};
  };
  return {
      .runtime = lay_out(triple.replicate.runtime, triple.shard.runtime),
      .gradient = lay_out(triple.replicate.gradient, triple.shard.gradient),
      .update = lay_out(triple.replicate.update, triple.shard.update),
  };
}

/// The axes on which planes do not lie one inside the other, as NOTE [nested cuts] wants.
std::vector<std::string> broken_axes(const Triple& triple) {
  const auto nests = [](const Split& split) {
    return (!split.runtime || split.gradient) && (!split.gradient || split.update);
  };
  const bool cuts_both = triple.replicate.update && triple.shard.update;
  const bool outer_only = (triple.replicate.runtime && !triple.shard.runtime) ||
                          (triple.replicate.gradient && !triple.shard.gradient);
  std::vector<std::string> broken;
  if (!nests(triple.replicate) || (cuts_both && outer_only)) {
    broken.emplace_back("replicate");
  }
  if (!nests(triple.shard)) {
    broken.emplace_back("shard");
  }
  return broken;
}

TEST_P(TwoTierLayoutsTest, EveryTripleThatNestsTrainsAsOneRank) {
  int num_valid = 0;
  for (const Triple& triple : all_triples()) {
    if (!broken_axes(triple).empty()) {
      continue;
    }
    ++num_valid;
    const auto train = [&](const std::shared_ptr<comm::World>& world) {
      FullyShardOptions options = tier_options(Strategy::kZero3);
      options.layouts = layouts_of(triple);
      expect_same_training<Net>(world, make_mesh(world, 2), options, 2, 1e-12, to_text(triple));
    };
    EXPECT_NO_THROW(run({4, 2}, train)) << to_text(triple);
  }
  EXPECT_EQ(num_valid, 13);
}

TEST_P(TwoTierLayoutsTest, EveryOtherTripleNamesTheAxisThatItBreaks) {
  run({4, 2}, [](const std::shared_ptr<comm::World>& world) {
    for (const Triple& triple : all_triples()) {
      const std::vector<std::string> broken = broken_axes(triple);
      if (broken.empty()) {
        continue;
      }
      FullyShardOptions options = tier_options(Strategy::kZero3);
      options.layouts = layouts_of(triple);
      std::string error = "nothing was thrown";
      try {
        Net model;
        fully_shard(*model, make_mesh(world, 2), options);
      } catch (const InvalidArgument& invalid) {
        error = invalid.what();
      }
      EXPECT_TRUE(std::any_of(
          broken.begin(),
          broken.end(),
          [&](const std::string& axis) { return error.find("'" + axis + "'") != std::string::npos; }
      )) << to_text(triple)
         << ": " << error;
    }
  });
}

TEST_P(TwoTierLayoutsTest, EveryStrategyTrainsAsOneRankOnEveryMesh) {
  for (const Tiers& tiers : kMeshes) {
    run(tiers, [&](const std::shared_ptr<comm::World>& world) {
      const comm::ProcessMesh mesh = make_mesh(world, tiers.num_supernodes, /*has_both=*/true);
      for (const Strategy strategy : kAllStrategies) {
        expect_same_training<Net>(
            world, mesh, tier_options(strategy), 3, 1e-10, to_text(strategy) + " " + to_text(tiers)
        );
      }
    });
  }
}

// fp32 keeps 24 bits: what is summed in another order is off by a few of its last.
TEST_P(TwoTierLayoutsTest, FirstStepsInFp32AreTheUnshardedModels) {
  constexpr double kNear = 1e-6;
  for (const Tiers& tiers : kMeshes) {
    run(tiers, [&](const std::shared_ptr<comm::World>& world) {
      const comm::ProcessMesh mesh = make_mesh(world, tiers.num_supernodes, /*has_both=*/true);
      for (const Strategy strategy : kAllStrategies) {
        const FullyShardOptions options = tier_options(strategy);
        const std::string what = to_text(strategy) + " " + to_text(tiers);
        expect_same_training<Net>(world, mesh, options, 3, kNear, what, at::kFloat);
        expect_same_training<OddNet>(world, mesh, options, 3, kNear, "odd, " + what, at::kFloat);
      }
    });
  }
}

TEST_P(TwoTierLayoutsTest, OddUnitsTrainAsOnOneRank) {
  for (const Tiers& tiers : kMeshes) {
    if (GetParam() != RankBackend::kLocal && tiers.num_supernodes != 2) {
      continue;  // what is cut how does not depend on the back end
    }
    run(tiers, [&](const std::shared_ptr<comm::World>& world) {
      const comm::ProcessMesh mesh = make_mesh(world, tiers.num_supernodes, /*has_both=*/true);
      for (const Strategy strategy : kAllStrategies) {
        for (const std::int64_t bucket_bytes : bucket_sizes(tiers)) {
          expect_same_training<OddNet>(
              world,
              mesh,
              tier_options(strategy, bucket_bytes),
              3,
              1e-12,
              to_text(strategy) + " " + to_text(tiers) + ", buckets of " +
                  std::to_string(bucket_bytes)
          );
        }
      }
    });
  }
}

// Of hsdp's update parameters and optimizer state a rank has one part a supernode: within what one
// cut is rounded to.
TEST_P(TwoTierLayoutsTest, HierarchicalUpdatesAPartOfWhatHsdpDoes) {
  constexpr std::int64_t kRounding = 16;
  for (const Tiers& tiers : {Tiers{4, 2}, Tiers{4, 4}}) {
    run(tiers, [&](const std::shared_ptr<comm::World>& world) {
      const comm::ProcessMesh mesh = make_mesh(world, tiers.num_supernodes);
      Net whole_model;
      Net model;
      const ShardedModel whole = fully_shard(*whole_model, mesh, tier_options(Strategy::kHsdp));
      const ShardedModel part = fully_shard(*model, mesh, tier_options(Strategy::kHierarchical));
      for (std::size_t u = 0; u < part.engine().units().size(); ++u) {
        const auto numel_of = [u](const ShardedModel& sharded) {
          std::int64_t numel = 0;
          for (const auto& group : sharded.engine().units()[u]->groups()) {
            numel += group->update_range().numel();
          }
          return numel;
        };
        const std::int64_t off = numel_of(part) * tiers.num_supernodes - numel_of(whole);
        EXPECT_LE(std::abs(off), kRounding * tiers.num_supernodes)
            << to_text(tiers) << ", unit " << u;
        EXPECT_GT(numel_of(part), 0) << to_text(tiers) << ", unit " << u;
      }
    });
  }
}

/// What is reduced, and what is put between supernodes, by this rank so far.
struct Traffic {
  std::int64_t reduced_bytes = 0;
  std::int64_t crossing_bytes = 0;
  std::uint64_t num_between = 0;
};

Traffic traffic_of(const ShardedModel& sharded) {
  const DataAxis& between = axis_of(sharded, "replicate");
  comm::CollectiveLog& sums = between.reduce->log();
  return {
      .reduced_bytes = sharded.counters().reduced_bytes,
      .crossing_bytes = sums.bytes(comm::Op::kReduceScatter) + sums.bytes(comm::Op::kAllReduce),
      .num_between = sums.size() + between.gather->log().size(),
  };
}

void train_only(torch::nn::Module& model, const std::string& prefix) {
  for (auto& item : model.named_parameters()) {
    item.value().requires_grad_(item.key().rfind(prefix, 0) == 0);
  }
}

TEST_P(TwoTierLayoutsTest, FrozenUnitsPutNothingOnTheLink) {
  run({4, 2}, [](const std::shared_ptr<comm::World>& world) {
    for (const Strategy strategy : kAllStrategies) {
      Net oracle;
      Net model;
      const ShardedModel sharded = fully_shard(*model, make_mesh(world, 2), tier_options(strategy));
      const at::Tensor batch = make_inputs(8, 5, 0);
      const auto expected =
          reference_gradients([&] { return loss_of(oracle->forward(batch)); }, *oracle);
      const auto backward = [&](const std::string& trained) {
        train_only(*model, trained);
        sharded.zero_grad();
        const at::Tensor input = rows_of(batch, world->rank(), 4).clone().requires_grad_();
        const at::Tensor loss = loss_of(model->forward(input));
        const Traffic before = traffic_of(sharded);
        loss.backward();
        const Traffic after = traffic_of(sharded);
        return Traffic{
            after.reduced_bytes - before.reduced_bytes,
            after.crossing_bytes - before.crossing_bytes,
            after.num_between - before.num_between,
        };
      };
      const ParamGroup& kept = *sharded.engine().units()[2]->groups().front();
      constexpr std::int64_t kItem = sizeof(double);
      for (int step = 0; step < 2; ++step) {
        const Traffic one = backward("blocks.1.");
        EXPECT_EQ(one.reduced_bytes, kept.packing().numel * kItem) << to_text(strategy);
        EXPECT_EQ(one.crossing_bytes, kept.crossing_range().numel() * kItem) << to_text(strategy);
        for (const auto& [name, gradient] : expected) {
          const at::Tensor found = sharded.full_gradient(name);
          const bool is_kept = name.rfind("blocks.1.", 0) == 0;
          ASSERT_EQ(found.defined(), is_kept) << to_text(strategy) << ", " << name;
          EXPECT_LE(is_kept ? (found - gradient).abs().max().item<double>() : 0, 1e-12) << name;
        }
      }
      const Traffic none = backward("nothing");
      EXPECT_EQ(none.reduced_bytes, 0) << to_text(strategy);
      EXPECT_EQ(none.crossing_bytes, 0) << to_text(strategy);
      if (strategy != Strategy::kZero3) {  // whose parameters come from other supernodes
        EXPECT_EQ(none.num_between, 0U) << to_text(strategy);
      }
      backward("");  // all
      EXPECT_LE(worst_gradient(sharded, expected), 1e-12) << to_text(strategy);
    }
  });
}

}  // namespace
}  // namespace hypershard::shard::test
