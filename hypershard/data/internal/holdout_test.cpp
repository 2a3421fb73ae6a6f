// Why: a selector that quietly takes the wrong play would make every reported loss a lie.
// The labels are modelled on real files: a common ending, names inside names.
#include "hypershard/data/internal/holdout.h"

#include <functional>
#include <limits>
#include <numeric>

#include <gtest/gtest.h>

#include "hypershard/core/error.h"
#include "hypershard/data/scratch_folder.h"

namespace hypershard::data::internal {
namespace {

const std::vector<DocumentLabel> kPlays = {
    {"clear_day_gut", "A CLEAR DAY"},
    {"hamlet_gut", "HAMLET, PRINCE OF DENMARK"},
    {"henry_v_gut", "THE LIFE OF KING HENRY V"},
    {"henry_vi_part_1_gut", "KING HENRY VI, FIRST PART"},
    {"henry_viii_gut", "THE LIFE OF HENRY THE EIGHTH"},
    {"lear_gut", "THE TRAGEDY OF KING LEAR"},
    {"winters_tale_gut", "THE WINTER'S TALE"},
};

// Returns the names of the plays held out.
std::vector<std::string> held_out(const PrepareOptions& options) {
  const std::vector<bool> chosen = choose_holdout(kPlays, options);
  std::vector<std::string> names;
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    if (chosen[i]) {
      names.push_back(kPlays[i].name);
    }
  }
  return names;
}

std::vector<std::string> held_out_by(const std::vector<std::string>& selectors) {
  PrepareOptions options;
  options.holdout = selectors;
  return held_out(options);
}

std::string fault_of(const std::vector<std::string>& selectors) {
  return thrown_text<InvalidArgument>([&] { (void)held_out_by(selectors); });
}

TEST(HoldoutTest, FindsDocumentsByNameTitleAndWords) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(held_out_by({"hamlet_gut"}), Names{"hamlet_gut"});
  EXPECT_EQ(held_out_by({"hamlet"}), Names{"hamlet_gut"});
  EXPECT_EQ(held_out_by({"Prince of Denmark"}), Names{"hamlet_gut"});
  EXPECT_EQ(held_out_by({"The Winter's Tale"}), Names{"winters_tale_gut"});
  EXPECT_EQ(held_out_by({"winters-tale"}), Names{"winters_tale_gut"});
  EXPECT_EQ(held_out_by({"hamlet", "Hamlet", "lear"}), (Names{"hamlet_gut", "lear_gut"}));
}

TEST(HoldoutTest, MatchesWholeWordsOnly) {
  EXPECT_EQ(held_out_by({"lear"}), std::vector<std::string>{"lear_gut"});
  EXPECT_EQ(held_out_by({"henry_v"}), std::vector<std::string>{"henry_v_gut"});
}

TEST(HoldoutTest, AnAmbiguousSelectorNamesItsMatches) {
  const std::string fault = fault_of({"henry"});
  HS_EXPECT_HAS(fault, "holdout 'henry' matches 3 documents (expected 1)");
  HS_EXPECT_HAS(fault, "henry_v_gut, henry_vi_part_1_gut, henry_viii_gut");
}

TEST(HoldoutTest, APatternTakesAllItsMatches) {
  EXPECT_EQ(
      held_out_by({"henry_v*"}),
      (std::vector<std::string>{"henry_v_gut", "henry_vi_part_1_gut", "henry_viii_gut"})
  );
  HS_EXPECT_HAS(fault_of({"othello*"}), "holdout 'othello*' matches none of 7 documents");
}

TEST(HoldoutTest, AnUnknownNameSuggestsTheNearest) {
  HS_EXPECT_HAS(fault_of({"hamlt"}), "did you mean 'hamlet'?");
  HS_EXPECT_HAS(fault_of({"winters tail"}), "did you mean 'winters tale'?");
  HS_EXPECT_HAS(fault_of({"xyzzyxyzzyxyzzyxyzzy"}), "the documents are [clear day, hamlet");
  HS_EXPECT_HAS(fault_of({"!!"}), "matches none of 7 documents");
}

TEST(HoldoutTest, HoldingOutEverythingIsRefused) {
  HS_EXPECT_HAS(fault_of({"*"}), "all 7 documents are held out");
  PrepareOptions options;
  HS_EXPECT_HAS(
      thrown_text<InvalidArgument>([&] { (void)choose_holdout({{"only", "ONLY"}}, options); }),
      "nothing is left to train on: all 1 documents"
  );
}

TEST(HoldoutTest, AFractionIsRoundedUpAndRepeatable) {
  for (const auto& [fraction, expected] :
       std::vector<std::pair<double, std::size_t>>{{0.0, 0}, {0.01, 1}, {1.0 / 7.0, 1}, {0.3, 3}}) {
    PrepareOptions options;
    options.holdout_fraction = fraction;
    EXPECT_EQ(held_out(options).size(), expected) << fraction;
    EXPECT_EQ(held_out(options), held_out(options));
  }
}

TEST(HoldoutTest, TheSeedChoosesAndAddedDocumentsMoveFew) {
  PrepareOptions options;
  options.holdout_fraction = 0.3;
  bool differs = false;
  for (std::uint64_t seed = 1; seed < 10; ++seed) {
    PrepareOptions other = options;
    other.seed = seed;
    differs = differs || held_out(other) != held_out(options);
  }
  EXPECT_TRUE(differs);

  auto more = kPlays;
  more.push_back({"zenobia_gut", "ZENOBIA"});
  const std::vector<bool> before = choose_holdout(kPlays, options);
  const std::vector<bool> after = choose_holdout(more, options);
  const auto num_moved = std::inner_product(
      before.begin(), before.end(), after.begin(), 0, std::plus<>(), std::not_equal_to<>()
  );
  EXPECT_LE(num_moved, 1);
}

TEST(HoldoutTest, ImpossibleFractionsAreRefused) {
  for (const double fraction : {-0.1, 1.0, 2.0, std::numeric_limits<double>::quiet_NaN()}) {
    PrepareOptions options;
    options.holdout_fraction = fraction;
    EXPECT_THROW((void)held_out(options), InvalidArgument) << fraction;
  }
}

}  // namespace
}  // namespace hypershard::data::internal
