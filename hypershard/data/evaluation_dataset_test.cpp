// Why: an evaluation must count every held-out token once, for any number of ranks.
// The counts are checked against a counting file.
#include "hypershard/data/evaluation_dataset.h"

#include <algorithm>
#include <map>

#include <gtest/gtest.h>

#include "hypershard/core/error.h"
#include "hypershard/data/scratch_folder.h"

namespace hypershard::data {
namespace {

class EvaluationDatasetTest : public ::testing::Test {
 protected:
  // Token i is i.
  std::string write_counting(std::int64_t num_tokens) const {
    const std::string path = folder_ / "counting.tokens";
    TokenFileWriter writer(
        path, {.tokenizer_name = "counting", .vocab_size = 10'000, .separator = {}}
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

// Counts how often each token is a target, and checks that it follows its input.
std::map<std::int64_t, int> counted_targets(
    const EvaluationDataset& dataset, std::int64_t world_size
) {
  std::map<std::int64_t, int> counts;
  for (std::int64_t index = 0; index < dataset.num_batches(world_size); ++index) {
    for (std::int64_t rank = 0; rank < world_size; ++rank) {
      const EvaluationBatch batch = dataset.batch(index, rank, world_size);
      EXPECT_EQ(batch.input.size(0), dataset.options().rows_per_rank);
      EXPECT_EQ(batch.input.size(1), dataset.options().sequence_length);
      EXPECT_EQ(batch.target.sizes(), batch.input.sizes());
      std::int64_t num_counted = 0;
      for (std::int64_t i = 0; i < batch.target.numel(); ++i) {
        const std::int64_t target = batch.target.data_ptr<std::int64_t>()[i];
        const std::int64_t input = batch.input.data_ptr<std::int64_t>()[i];
        if (target != kIgnoredTarget) {
          EXPECT_EQ(target, input + 1);
          ++counts[target];
          ++num_counted;
        } else {
          EXPECT_EQ(input, 0);
        }
      }
      EXPECT_EQ(batch.num_targets, num_counted);
    }
  }
  return counts;
}

TEST_F(EvaluationDatasetTest, EveryTokenButTheFirstIsATargetOnceForAnyWorldSize) {
  for (const std::int64_t num_tokens : {2, 16, 17, 18, 100, 161}) {
    const std::string path = write_counting(num_tokens);
    const EvaluationDataset dataset(path, {.sequence_length = 16, .rows_per_rank = 2});
    EXPECT_EQ(dataset.num_targets(), num_tokens - 1);
    for (const std::int64_t world_size : {1, 2, 3, 4, 8}) {
      const auto counts = counted_targets(dataset, world_size);
      EXPECT_EQ(static_cast<std::int64_t>(counts.size()), num_tokens - 1);
      EXPECT_EQ(counts.begin()->first, 1);
      EXPECT_TRUE(std::all_of(counts.begin(), counts.end(), [](const auto& c) {
        return c.second == 1;
      }));
    }
  }
}

TEST_F(EvaluationDatasetTest, StopsAtTheLimit) {
  const std::string path = write_counting(200);
  const EvaluationDataset dataset(
      path, {.sequence_length = 16, .rows_per_rank = 2, .max_tokens = 37}
  );
  EXPECT_EQ(dataset.num_targets(), 37);
  EXPECT_EQ(counted_targets(dataset, 3).rbegin()->first, 37);
  EXPECT_EQ(dataset.num_batches(1), 2);
  EXPECT_EQ(dataset.num_batches(2), 1);
  const EvaluationDataset all(path, {.sequence_length = 16, .max_tokens = 100'000});
  EXPECT_EQ(all.num_targets(), 199);
}

TEST_F(EvaluationDatasetTest, RefusesWhatItCannotDo) {
  const std::string single = write_counting(1);
  HS_EXPECT_HAS(
      thrown_text<InvalidArgument>([&] { EvaluationDataset(single, {}); }),
      "too few tokens to evaluate on: 1 (needed: at least 2)"
  );
  const std::string path = write_counting(100);
  const EvaluationDataset dataset(path, {.sequence_length = 16, .rows_per_rank = 2});
  EXPECT_EQ(dataset.num_batches(2), 2);
  HS_EXPECT_HAS(
      thrown_text<InvalidArgument>([&] { (void)dataset.batch(2, 0, 2); }),
      "evaluation batch 2 (expected 0 to 1)"
  );
  HS_EXPECT_HAS(thrown_text<InvalidArgument>([&] { (void)dataset.batch(0, 2, 2); }), "rank 2");
  EXPECT_THROW((void)dataset.num_batches(0), InvalidArgument);
  EXPECT_THROW(EvaluationDataset(path, {.sequence_length = 0}), InvalidArgument);
  EXPECT_THROW(EvaluationDataset(path, {.rows_per_rank = 0}), InvalidArgument);
  EXPECT_THROW(EvaluationDataset(path, {.max_tokens = -1}), InvalidArgument);
}

}  // namespace
}  // namespace hypershard::data
