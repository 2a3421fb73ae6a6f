// Tests buckets and their cuts over many random units: no cut inside an atom, no rank with more
// than an atom above the mean, and the same answer everywhere.
#include "hypershard/layout/bucket.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

#include "hypershard/core/clock.h"
#include "hypershard/core/text.h"
#include "hypershard/layout/thrown_text.h"

namespace hypershard::layout {
namespace {

using Bytes = std::vector<std::int64_t>;

/// Returns [begin, end) of every bucket, e.g. `[2,4) [0,2)`.
std::string ranges(const std::vector<Bucket>& buckets) {
  std::string text;
  for (const Bucket& bucket : buckets) {
    text += concat_text(text.empty() ? "" : " ", "[", bucket.begin, ",", bucket.end, ")");
  }
  return text;
}

TEST(MakeBucketsTest, FillFromTheLastUnitToTheFirst) {
  EXPECT_EQ(ranges(make_buckets(Bytes{5, 10, 10, 10, 10}, 20)), "[3,5) [1,3) [0,1)");
  EXPECT_EQ(ranges(make_buckets(Bytes{10, 10, 10}, 21)), "[0,3)");
  EXPECT_EQ(ranges(make_buckets(Bytes{10, 100, 1}, 20)), "[1,3) [0,1)");
  EXPECT_EQ(make_buckets(Bytes{10, 100, 1}, 20)[0].bytes, 101);
}

TEST(MakeBucketsTest, ReachFromOneUnitToAll) {
  EXPECT_EQ(ranges(make_buckets(Bytes{10, 10, 10}, kBucketOfOne)), "[2,3) [1,2) [0,1)");
  EXPECT_EQ(ranges(make_buckets(Bytes{10, 10, 10}, kBucketOfAll)), "[0,3)");
  EXPECT_EQ(ranges(make_buckets({}, 5)), "");
}

TEST(MakeBucketsTest, UnitsOfNothingJoinANeighbour) {
  EXPECT_EQ(ranges(make_buckets(Bytes{0, 10, 0, 10, 0}, kBucketOfOne)), "[3,5) [0,3)");
  EXPECT_EQ(ranges(make_buckets(Bytes{0, 0}, kBucketOfOne)), "[0,2)");
  HS_EXPECT_INVALID(make_buckets(Bytes{3, -1}, 0), "bytes of unit 1");
}

TEST(SmallestBucketBytesTest, HidesLatencyInTheStatedShare) {
  // 100 us are 5 % of 2 ms; 1.9 ms at 1 GB/s are 1.9 MB from each of two ranks, of 3.8 MB.
  EXPECT_NEAR(static_cast<double>(smallest_bucket_bytes(100e-6, 1e9, 2, 0.05)), 3.8e6, 1);
  EXPECT_NEAR(static_cast<double>(smallest_bucket_bytes(100e-6, 1e9, 4, 0.05)), 1.9e6 * 4 / 3, 1);
  EXPECT_EQ(smallest_bucket_bytes(0, 1e9, 2, 0.05), kBucketOfOne);
  EXPECT_EQ(smallest_bucket_bytes(1e-4, 1e9, 1, 0.05), kBucketOfOne);
  EXPECT_EQ(
      smallest_bucket_bytes(1e-4, std::numeric_limits<double>::infinity(), 2, 0.05), kBucketOfAll
  );
  HS_EXPECT_INVALID(smallest_bucket_bytes(1, 1, 2, 1.5), "latency share 1.5");
  HS_EXPECT_INVALID(smallest_bucket_bytes(1, 0, 2, 0.1), "0 bytes/s");
}

struct Case {
  std::vector<GroupPacking> packings;
  std::vector<BucketGroup> groups;
  std::vector<int> cut_sizes;
  int level = 0;
};

class CaseMaker {
 public:
  explicit CaseMaker(unsigned seed) : engine_(seed) {}

  std::int64_t below(std::int64_t bound) {
    return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(bound));
  }

  Case make() {
    static const std::vector<std::vector<int>> kCuts = {
        {2}, {1, 2}, {2, 3}, {4, 1}, {1, 5}, {3, 2, 2}, {2, 8}, {7}
    };
    Case made;
    made.cut_sizes = kCuts[static_cast<std::size_t>(below(std::ssize(kCuts)))];
    made.level = static_cast<int>(below(std::ssize(made.cut_sizes)));
    const std::int64_t alignment = std::int64_t{1} << below(5);
    const std::int64_t num_groups = 1 + below(8);
    for (std::int64_t i = 0; i < num_groups; ++i) {
      made.packings.push_back(
          pack_group(requests(), {.cut_sizes = made.cut_sizes, .alignment = alignment})
      );
    }
    for (GroupPacking& packing : made.packings) {
      made.groups.push_back({.packing = &packing, .element_bytes = below(2) == 0 ? 2 : 4});
    }
    return made;
  }

 private:
  std::vector<PackRequest> requests() {
    std::vector<PackRequest> made;
    const std::int64_t num_requests = below(6);
    const bool has_atoms = below(3) > 0;
    for (std::int64_t i = 0; i < num_requests; ++i) {
      const std::int64_t rows = below(10);
      const std::int64_t columns = 1 + below(30);
      const std::int64_t atoms[] = {1, columns, std::max<std::int64_t>(1, rows * columns)};
      made.push_back(
          {.name = "p" + std::to_string(i),
           .shape = {rows, columns},
           .atom_numel = has_atoms ? atoms[below(3)] : 1}
      );
    }
    return made;
  }

  std::mt19937 engine_;
};

/// The most bytes of the group that no cut can split.
std::int64_t largest_atom_bytes(const BucketGroup& group) {
  const GroupPacking& packing = *group.packing;
  std::int64_t atom = packing.alignment;
  for (const Segment& segment : packing.segments) {
    if (segment.numel > 0) {
      // With the padding behind it.
      atom = std::max(atom, segment.atom_numel + packing.alignment - 1);
    }
  }
  return atom * group.element_bytes;
}

void expect_cuts_between_atoms(const GroupPacking& packing) {
  ASSERT_EQ(packing.cuts.front(), 0);
  ASSERT_EQ(packing.cuts.back(), packing.numel);
  ASSERT_TRUE(std::is_sorted(packing.cuts.begin(), packing.cuts.end()));
  for (const std::int64_t cut : packing.cuts) {
    for (const Segment& segment : packing.segments) {
      if (cut > segment.offset && cut < segment.offset + segment.numel) {
        ASSERT_EQ((cut - segment.offset) % segment.atom_numel, 0) << "cut " << cut;
      }
    }
  }
}

/// Returns every rank's bytes of the level inside the outer piece `parent`.
std::vector<std::int64_t> loads(const Case& tested, std::vector<int> parent) {
  std::vector<std::int64_t> sums;
  for (const BucketGroup& group : tested.groups) {
    const std::vector<std::int64_t> counts = group.packing->counts(parent);
    sums.resize(counts.size());
    for (std::size_t rank = 0; rank < counts.size(); ++rank) {
      sums[rank] += counts[rank] * group.element_bytes;
    }
  }
  return sums;
}

/// Calls `body` with the coordinates of every outer piece of the level.
template <class Body>
void for_each_parent(const Case& tested, Body body) {
  std::vector<int> parent(static_cast<std::size_t>(tested.level));
  while (true) {
    body(parent);
    int at = tested.level - 1;
    for (; at >= 0; --at) {
      auto& coordinate = parent[static_cast<std::size_t>(at)];
      if (++coordinate < tested.cut_sizes[static_cast<std::size_t>(at)]) {
        break;
      }
      coordinate = 0;
    }
    if (at < 0) {
      return;
    }
  }
}

class BalanceCutsTest : public testing::TestWithParam<unsigned> {};

TEST_P(BalanceCutsTest, KeepsItsPromises) {
  CaseMaker maker(GetParam());
  for (int i = 0; i < 300; ++i) {
    Case tested = maker.make();
    const std::vector<GroupPacking> before = tested.packings;
    balance_cuts(tested.groups, tested.level);
    std::int64_t atom = 0;
    std::string text = concat_text("level ", tested.level, " of ", tested.cut_sizes);
    for (std::size_t g = 0; g < tested.groups.size(); ++g) {
      SCOPED_TRACE(text);
      atom = std::max(atom, largest_atom_bytes(tested.groups[g]));
      expect_cuts_between_atoms(tested.packings[g]);
      text += concat_text(", cuts ", tested.packings[g].cuts);
      for_each_parent(tested, [&](const std::vector<int>& parent) {
        ASSERT_EQ(tested.packings[g].range(parent), before[g].range(parent));
      });
    }
    SCOPED_TRACE(text);
    for_each_parent(tested, [&](const std::vector<int>& parent) {
      const std::vector<std::int64_t> sums = loads(tested, parent);
      const std::int64_t total = std::accumulate(sums.begin(), sums.end(), std::int64_t{0});
      const double mean = static_cast<double>(total) / static_cast<double>(sums.size());
      const auto largest = static_cast<double>(*std::max_element(sums.begin(), sums.end()));
      ASSERT_LE(largest, mean + static_cast<double>(atom)) << concat_text("parent ", parent);
    });
    if (HasFatalFailure()) {
      return;
    }
    // Again, from the same start: the same cuts.
    std::vector<GroupPacking> again = before;
    std::vector<BucketGroup> groups = tested.groups;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      groups[g].packing = &again[g];
    }
    balance_cuts(groups, tested.level);
    for (std::size_t g = 0; g < groups.size(); ++g) {
      ASSERT_EQ(again[g].cuts, tested.packings[g].cuts);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, BalanceCutsTest, testing::Range(1U, 9U));

GroupPacking whole_matrices(int num_matrices, std::int64_t numel, std::vector<int> cut_sizes) {
  std::vector<PackRequest> requests;
  for (int i = 0; i < num_matrices; ++i) {
    requests.push_back({.name = "w" + std::to_string(i), .shape = {numel}, .atom_numel = numel});
  }
  return pack_group(requests, {.cut_sizes = std::move(cut_sizes), .alignment = 1});
}

// Three matrices cannot be shared evenly by two ranks; those of six units can.
TEST(BalanceCutsTest, UnitsEvenOutWhatOneLeavesUneven) {
  std::vector<GroupPacking> units(6, whole_matrices(3, 100, {1, 2}));
  ASSERT_EQ(units[0].counts(std::vector<int>{0}), (Bytes{100, 200}));
  std::vector<BucketGroup> groups;
  for (GroupPacking& unit : units) {
    groups.push_back({.packing = &unit});
  }
  balance_cuts(groups, 1);
  Bytes sums(2);
  for (const GroupPacking& unit : units) {
    const Bytes counts = unit.counts(std::vector<int>{0});
    sums[0] += counts[0];
    sums[1] += counts[1];
  }
  EXPECT_EQ(sums, (Bytes{900, 900}));
}

// Small atoms fill up what large ones leave, to within one small atom.
TEST(BalanceCutsTest, SmallAtomsEvenOutLargeOnes) {
  GroupPacking matrices = whole_matrices(3, 1000, {1, 2});
  const std::vector<PackRequest> vectors = {{.name = "v", .shape = {5000}}};
  GroupPacking rest = pack_group(vectors, {.cut_sizes = {1, 2}, .alignment = 8});
  balance_cuts(std::vector<BucketGroup>{{&rest}, {&matrices}}, 1);
  const Bytes whole = matrices.counts(std::vector<int>{0});
  const Bytes filled = rest.counts(std::vector<int>{0});
  EXPECT_LE(std::abs(whole[0] + filled[0] - whole[1] - filled[1]), 2 * 8) << concat_text(filled);
}

TEST(BalanceCutsTest, EvenCutsStay) {
  const std::vector<PackRequest> requests = {{.name = "w", .shape = {1000}}};
  GroupPacking packing = pack_group(requests, {.cut_sizes = {2, 3}, .alignment = 16});
  const std::vector<std::int64_t> before = packing.cuts;
  GroupPacking other = packing;
  balance_cuts(std::vector<BucketGroup>{{&packing}, {&other}}, 1);
  EXPECT_EQ(packing.cuts, before);
  EXPECT_EQ(other.cuts, before);
}

TEST(BalanceCutsTest, RefusesGroupsOfDifferentMeshes) {
  GroupPacking two = whole_matrices(3, 10, {1, 2});
  GroupPacking four = whole_matrices(3, 10, {2, 2});
  const std::vector<BucketGroup> both = {{&two}, {&four}};
  HS_EXPECT_INVALID(balance_cuts(both, 1), "cut sizes [2, 2] and [1, 2]");
  const std::vector<BucketGroup> one = {{&two}};
  HS_EXPECT_INVALID(balance_cuts(one, 2), "no level 2 in cut sizes [1, 2]");
}

// Four matrices a unit, cut by rows, over 8 x 512 ranks.
TEST(BalanceCutsTest, ThousandsOfRanksTakeMilliseconds) {
  constexpr std::int64_t kDim = 4096;
  std::vector<PackRequest> requests;
  for (int i = 0; i < 4; ++i) {
    requests.push_back({.name = "w", .shape = {kDim + 8 * i, kDim}, .atom_numel = kDim});
  }
  const GroupPacking packing = pack_group(requests, {.cut_sizes = {8, 512}});
  std::vector<GroupPacking> units(1000, packing);
  const Stopwatch watch;
  const std::vector<Bucket> buckets =
      make_buckets(Bytes(units.size(), packing.numel * 2), packing.numel * 2 * 10);
  ASSERT_EQ(buckets.size(), 100U);
  double worst = 0;
  for (const Bucket& bucket : buckets) {
    std::vector<BucketGroup> groups;
    for (int unit = bucket.begin; unit < bucket.end; ++unit) {
      groups.push_back({&units[static_cast<std::size_t>(unit)], 2});
    }
    balance_cuts(groups, 1);
  }
  const double elapsed_ms = watch.elapsed_ms();
  for (const Bucket& bucket : buckets) {
    const std::vector<int> parent = {3};
    Bytes sums(512);
    for (int unit = bucket.begin; unit < bucket.end; ++unit) {
      const Bytes counts = units[static_cast<std::size_t>(unit)].counts(parent);
      for (std::size_t rank = 0; rank < sums.size(); ++rank) {
        sums[rank] += counts[rank];
      }
    }
    const std::int64_t total = std::accumulate(sums.begin(), sums.end(), std::int64_t{0});
    const auto largest = static_cast<double>(*std::max_element(sums.begin(), sums.end()));
    worst = std::max(worst, largest - static_cast<double>(total) / 512.0);
  }
  EXPECT_LE(worst, static_cast<double>(kDim));
  RecordProperty("elapsed_ms", std::to_string(elapsed_ms));
  EXPECT_LT(elapsed_ms, 5000) << "far more than the some hundred milliseconds of any machine";
}

}  // namespace
}  // namespace hypershard::layout
