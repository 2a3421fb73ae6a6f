// Why: a suggestion must be the obvious one and must stay away when nothing is near.
#include "hypershard/core/suggest.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace hypershard {
namespace {

const std::vector<std::string> kAxes = {"replicate", "shard", "tp", "ep"};

TEST(SuggestTest, FindsSwappedMissingExtraAndReplacedLetters) {
  for (const char* slip : {"shrad", "shar", "sshard", "sherd", "SHARD"}) {
    EXPECT_EQ(suggestion(slip, kAxes), "did you mean 'shard'?") << slip;
  }
}

TEST(SuggestTest, StaysSilentWhenNothingIsNear) {
  EXPECT_EQ(suggestion("learning_rate", kAxes), "");
  EXPECT_EQ(suggestion("", kAxes), "");
  EXPECT_EQ(suggestion("shard", {}), "");
}

TEST(SuggestTest, OffersNamesThatBeginTheSame) {
  const std::vector<std::string> keys = {"warmup_steps", "steps"};
  EXPECT_EQ(suggestion("warmup", keys), "did you mean 'warmup_steps'?");
}

TEST(SuggestTest, OrdersByDistanceThenByCandidateOrder) {
  const std::vector<std::string> names = {"abcx", "abcd", "abcy"};
  EXPECT_EQ(nearest_names("abcd", names), (std::vector<std::string>{"abcd", "abcx", "abcy"}));
  EXPECT_EQ(nearest_names("abcd", names, 1), (std::vector<std::string>{"abcd"}));
}

TEST(SuggestTest, NamesTwoAtMost) {
  const std::vector<std::string> names = {"w1", "w2", "w3"};
  EXPECT_EQ(suggestion("w4", names), "did you mean 'w1' or 'w2'?");
}

TEST(SuggestTest, ShortNamesNeedMoreThanOneLetterInCommon) {
  const std::vector<std::string> names = {"x"};
  EXPECT_EQ(suggestion("y", names), "");
}

}  // namespace
}  // namespace hypershard
