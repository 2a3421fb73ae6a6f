// Why: that training data do not depend on the number of ranks is promised bit for bit.
// A counting file makes every window tell where it begins.
#include "hypershard/data/dataset.h"

#include <algorithm>
#include <limits>
#include <set>

#include <gtest/gtest.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>

#include "hypershard/core/error.h"
#include "hypershard/data/scratch_folder.h"

namespace hypershard::data {
namespace {

class TokenDatasetTest : public ::testing::Test {
 protected:
  // Token i is i, so that a window tells where it begins.
  std::string write_counting(std::int64_t num_tokens) const {
    const std::string path = folder_ / ("counting_" + std::to_string(num_tokens) + ".tokens");
    TokenFileWriter writer(
        path, {.tokenizer_name = "counting", .vocab_size = 100'000, .separator = {}}
    );
    std::vector<Token> tokens;
    for (std::int64_t i = 0; i < num_tokens; ++i) {
      tokens.push_back(static_cast<Token>(i));
    }
    writer.begin_document("all", 1);
    writer.append(tokens);
    writer.end_document();
    writer.finish();
    return path;
  }

  ScratchFolder folder_;
};

std::int64_t at(const at::Tensor& tensor, std::int64_t row, std::int64_t column) {
  return tensor.data_ptr<std::int64_t>()[row * tensor.size(1) + column];
}

at::Tensor whole_step_input(
    const TokenDataset& dataset, std::int64_t step, std::int64_t world_size
) {
  std::vector<at::Tensor> parts;
  for (std::int64_t micro = 0; micro < dataset.options().accumulation; ++micro) {
    for (std::int64_t rank = 0; rank < world_size; ++rank) {
      parts.push_back(dataset.batch(step, micro, rank, world_size).input);
    }
  }
  return at::cat(parts);
}

TEST_F(TokenDatasetTest, TargetsFollowInputs) {
  const TokenDataset dataset(
      write_counting(1000), {.sequence_length = 7, .global_batch = 6, .accumulation = 1}
  );
  const Batch batch = dataset.batch(3, 0, 1, 2);
  ASSERT_EQ(batch.input.sizes(), (std::vector<std::int64_t>{3, 7}));
  ASSERT_EQ(batch.target.sizes(), (std::vector<std::int64_t>{3, 7}));
  EXPECT_EQ(batch.input.scalar_type(), at::kLong);
  EXPECT_TRUE(batch.input.is_contiguous() && batch.target.is_contiguous());
  for (std::int64_t row = 0; row < 3; ++row) {
    for (std::int64_t column = 0; column < 7; ++column) {
      EXPECT_EQ(at(batch.input, row, column), at(batch.input, row, 0) + column);
      EXPECT_EQ(at(batch.target, row, column), at(batch.input, row, column) + 1);
    }
  }
}

TEST_F(TokenDatasetTest, RanksTogetherGetTheSameRowsForAnyWorldSize) {
  for (const std::int64_t accumulation : {1, 2, 5}) {
    const TokenDataset dataset(
        write_counting(5000),
        {.sequence_length = 16, .global_batch = 240, .accumulation = accumulation, .seed = 3}
    );
    for (const std::int64_t step : {0, 1, 2, 17, 1000}) {
      const at::Tensor expected = whole_step_input(dataset, step, 1);
      for (const std::int64_t world_size : {1, 2, 3, 4, 8}) {
        EXPECT_TRUE(at::equal(whole_step_input(dataset, step, world_size), expected))
            << "step " << step << ", world size " << world_size << ", accumulation "
            << accumulation;
      }
    }
  }
}

TEST_F(TokenDatasetTest, AccumulationOnlyCutsTheSameRows) {
  const std::string path = write_counting(5000);
  const TokenDataset whole(path, {.sequence_length = 16, .global_batch = 24, .accumulation = 1});
  const TokenDataset cut(path, {.sequence_length = 16, .global_batch = 24, .accumulation = 3});
  for (const std::int64_t step : {0, 5, 50}) {
    EXPECT_TRUE(at::equal(whole_step_input(cut, step, 4), whole_step_input(whole, step, 1)));
  }
}

TEST_F(TokenDatasetTest, EveryWindowComesOnceAnEpoch) {
  for (const std::int64_t num_tokens : {17, 31, 32, 33, 48, 1000, 1015, 1016}) {
    const TokenDataset dataset(write_counting(num_tokens), {.sequence_length = 16, .seed = 7});
    const std::int64_t num_windows = dataset.num_windows();
    for (std::int64_t epoch = 0; epoch < 20; ++epoch) {
      std::set<std::uint64_t> begins;
      for (std::int64_t i = 0; i < num_windows; ++i) {
        begins.insert(dataset.sample_begin(epoch * num_windows + i));
      }
      ASSERT_EQ(begins.size(), static_cast<std::size_t>(num_windows));
      // Distinct, a multiple of T apart, spanning exactly num_windows: end to end without gaps.
      EXPECT_EQ(
          *begins.rbegin() - *begins.begin(), static_cast<std::uint64_t>(num_windows - 1) * 16
      );
      EXPECT_TRUE(std::all_of(begins.begin(), begins.end(), [&](std::uint64_t begin) {
        return (begin - *begins.begin()) % 16 == 0 &&
               begin + 17 <= static_cast<std::uint64_t>(num_tokens);
      }));
      EXPECT_LT(*begins.begin(), 16u);
    }
  }
}

TEST_F(TokenDatasetTest, EpochsDifferInOrderAndPhase) {
  const TokenDataset dataset(write_counting(2000), {.sequence_length = 16});
  const std::int64_t num_windows = dataset.num_windows();
  std::set<std::uint64_t> phases;
  std::set<std::vector<std::uint64_t>> orders;
  for (std::int64_t epoch = 0; epoch < 64; ++epoch) {
    std::vector<std::uint64_t> order;
    for (std::int64_t i = 0; i < num_windows; ++i) {
      order.push_back(dataset.sample_begin(epoch * num_windows + i) / 16);
    }
    phases.insert(dataset.sample_begin(epoch * num_windows) % 16);
    orders.insert(order);
    EXPECT_FALSE(std::is_sorted(order.begin(), order.end()));
  }
  EXPECT_EQ(orders.size(), 64u);
  EXPECT_GT(phases.size(), 12u) << "64 draws of 16 phases";
}

TEST_F(TokenDatasetTest, SeedsDifferAndEqualSeedsAgree) {
  const std::string path = write_counting(2000);
  const TokenDataset a(path, {.sequence_length = 16, .seed = 1});
  const TokenDataset b(path, {.sequence_length = 16, .seed = 1});
  const TokenDataset c(path, {.sequence_length = 16, .seed = 2});
  EXPECT_TRUE(at::equal(a.batch(4, 0, 0, 1).input, b.batch(4, 0, 0, 1).input));
  EXPECT_FALSE(at::equal(a.batch(4, 0, 0, 1).input, c.batch(4, 0, 0, 1).input));
}

TEST_F(TokenDatasetTest, AResumedRunSeesWhatAnUninterruptedOneSees) {
  const std::string path = write_counting(1000);
  const DatasetOptions options{.sequence_length = 16, .global_batch = 12, .accumulation = 2};
  const TokenDataset first(path, options);
  std::vector<at::Tensor> seen;
  for (std::int64_t step = 0; step < 20; ++step) {
    seen.push_back(first.batch(step, step % 2, 1, 3).target);
  }
  const TokenDataset resumed(path, options);
  for (std::int64_t step = 13; step < 20; ++step) {
    EXPECT_TRUE(
        at::equal(resumed.batch(step, step % 2, 1, 3).target, seen[static_cast<std::size_t>(step)])
    );
  }
}

TEST_F(TokenDatasetTest, WithoutShufflingWindowsComeInOrder) {
  const TokenDataset dataset(
      write_counting(65), {.sequence_length = 16, .global_batch = 2, .shuffle = false}
  );
  EXPECT_EQ(dataset.num_windows(), 4);
  for (std::int64_t i = 0; i < 12; ++i) {
    EXPECT_EQ(dataset.sample_begin(i), static_cast<std::uint64_t>(i % 4 * 16));
  }
  EXPECT_DOUBLE_EQ(dataset.epochs_before(6), 3.0);
}

TEST_F(TokenDatasetTest, OneSequenceIsEnoughAndLessIsRefused) {
  const TokenDataset dataset(write_counting(17), {.sequence_length = 16, .global_batch = 4});
  EXPECT_EQ(dataset.num_windows(), 1);
  EXPECT_EQ(dataset.batch(9, 0, 0, 1).input.size(0), 4);
  const std::string path = write_counting(16);
  const std::string fault =
      thrown_text<InvalidArgument>([&] { TokenDataset(path, {.sequence_length = 16}); });
  HS_EXPECT_HAS(fault, path);
  HS_EXPECT_HAS(fault, "too few tokens: 16 (needed: at least 16 + 1");
  HS_EXPECT_HAS(fault, "set sequence_length to at most 15");
}

TEST_F(TokenDatasetTest, RefusesBatchesThatCannotBeDealtOut) {
  const TokenDataset dataset(
      write_counting(100), {.sequence_length = 8, .global_batch = 10, .accumulation = 2}
  );
  EXPECT_EQ(dataset.rows_per_rank(5), 1);
  const std::string fault = thrown_text<InvalidArgument>([&] { (void)dataset.batch(0, 0, 0, 2); });
  HS_EXPECT_HAS(
      fault,
      "global_batch 10 cannot be dealt out to 2 ranks in 2 micro-batches (expected a multiple of 4)"
  );
  HS_EXPECT_HAS(fault, "set global_batch to 8 or 12");
  HS_EXPECT_HAS(
      thrown_text<InvalidArgument>([&] { (void)dataset.rows_per_rank(16); }),
      "set global_batch to 32, or use fewer ranks"
  );
  EXPECT_THROW((void)dataset.rows_per_rank(0), InvalidArgument);
}

TEST_F(TokenDatasetTest, RefusesArgumentsOutOfRange) {
  const std::string path = write_counting(100);
  const TokenDataset dataset(path, {.sequence_length = 8, .global_batch = 8, .accumulation = 2});
  HS_EXPECT_HAS(thrown_text<InvalidArgument>([&] { (void)dataset.batch(-1, 0, 0, 2); }), "step -1");
  HS_EXPECT_HAS(
      thrown_text<InvalidArgument>([&] { (void)dataset.batch(0, 2, 0, 2); }), "micro-batch 2"
  );
  HS_EXPECT_HAS(thrown_text<InvalidArgument>([&] { (void)dataset.batch(0, 0, 2, 2); }), "rank 2");
  HS_EXPECT_HAS(thrown_text<InvalidArgument>([&] { dataset.will_need(0, 0, -1, 2); }), "rank -1");
  EXPECT_THROW(
      (void)dataset.batch(std::numeric_limits<std::int64_t>::max(), 0, 0, 2), InvalidArgument
  );
  EXPECT_THROW((void)dataset.sample_begin(-1), InvalidArgument);
  for (const DatasetOptions& options :
       {DatasetOptions{.sequence_length = 0},
        DatasetOptions{.sequence_length = 8, .global_batch = 0},
        DatasetOptions{.sequence_length = 8, .global_batch = 8, .accumulation = 0},
        DatasetOptions{.sequence_length = std::numeric_limits<std::int64_t>::max()}}) {
    EXPECT_THROW(TokenDataset(path, options), InvalidArgument);
  }
}

TEST_F(TokenDatasetTest, AskingAheadChangesNothing) {
  const TokenDataset dataset(write_counting(1000), {.sequence_length = 16, .global_batch = 8});
  const Batch before = dataset.batch(2, 0, 0, 2);
  dataset.will_need(2, 0, 0, 2);
  EXPECT_TRUE(at::equal(dataset.batch(2, 0, 0, 2).input, before.input));
}

// A run's data are part of its reproducibility: a change here changes every trained model.
TEST_F(TokenDatasetTest, TheSequenceOfSamplesIsFixed) {
  const TokenDataset dataset(write_counting(1000), {.sequence_length = 10, .seed = 42});
  std::vector<std::uint64_t> begins;
  for (std::int64_t i = 0; i < 6; ++i) {
    begins.push_back(dataset.sample_begin(i));
  }
  EXPECT_EQ(begins, (std::vector<std::uint64_t>{614, 984, 944, 734, 774, 404}));
}

}  // namespace
}  // namespace hypershard::data
