// Checks that a failure of one rank becomes the failure of all, with one text.
#include "hypershard/train/agreement.h"

#include <atomic>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "hypershard/core/error.h"
#include "hypershard/testing/run_ranks.h"

namespace hypershard::train {
namespace {

constexpr int kRanks = 3;

// Runs `body` on some ranks and returns what each rank's AgreedFailure said.
std::vector<std::string> failures(const std::function<void(comm::Communicator&)>& body) {
  std::vector<std::string> texts(kRanks);
  testing::run_ranks(kRanks, [&](const std::shared_ptr<comm::World>& world) {
    try {
      body(*world->world_communicator());
    } catch (const AgreedFailure& failure) {
      texts[static_cast<std::size_t>(world->rank())] =
          std::string(to_text(failure.code())) + ": " + failure.what();
    }
  });
  return texts;
}

TEST(AgreementTest, AllRanksLearnOfTheFailureOfOne) {
  const auto texts = failures([](comm::Communicator& ranks) {
    run_together(ranks, [&] {
      HS_CHECK(ranks.rank() != 1, "rank ", ranks.rank(), " cannot go on");
    });
  });
  EXPECT_NE(texts[0].find("rank 1 cannot go on"), std::string::npos) << texts[0];
  EXPECT_NE(texts[0].find("invalid_argument"), std::string::npos) << texts[0];
  EXPECT_EQ(texts[1], texts[0]);
  EXPECT_EQ(texts[2], texts[0]);
}

TEST(AgreementTest, LowestRankSpeaksIfSeveralFail) {
  const auto texts = failures([](comm::Communicator& ranks) {
    run_together(ranks, [&] {
      if (ranks.rank() > 0) {
        HS_FAIL(IoError, "rank ", ranks.rank(), " cannot go on");
      }
    });
  });
  EXPECT_NE(texts[2].find("rank 1 cannot go on"), std::string::npos) << texts[2];
  EXPECT_NE(texts[2].find("io"), std::string::npos) << texts[2];
}

TEST(AgreementTest, NobodyFailsIfNobodyDid) {
  const auto texts = failures([](comm::Communicator& ranks) {
    run_together(ranks, [] {});
    agree(ranks, {});
  });
  EXPECT_EQ(texts, std::vector<std::string>(kRanks));
}

TEST(AgreementTest, ActionOfTheFirstRankRunsThereOnly) {
  std::atomic<int> calls{0};
  std::atomic<int> caller{-1};
  testing::run_ranks(kRanks, [&](const std::shared_ptr<comm::World>& world) {
    run_on_first(*world->world_communicator(), [&] {
      ++calls;
      caller = world->rank();
    });
  });
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(caller, 0);
}

TEST(AgreementTest, ForeignExceptionIsAnInternalError) {
  const LocalFailure failure =
      catch_failure([] { throw std::runtime_error("out of luck"); });  // raw-throw: a foreign one
  EXPECT_TRUE(failure.failed);
  EXPECT_EQ(failure.code, ErrorCode::kInternal);
  EXPECT_EQ(failure.text, "out of luck");
}

TEST(AgreementTest, CommunicationErrorCannotBeAgreedOn) {
  EXPECT_THROW(catch_failure([] { HS_FAIL(CommError, "rank ", 1, " is gone"); }), CommError);
}

}  // namespace
}  // namespace hypershard::train
