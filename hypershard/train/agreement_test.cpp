// Checks that a failure of one rank becomes the failure of all, with one text.
#include "hypershard/train/agreement.h"

#include <atomic>
#include <new>
#include <stdexcept>
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

TEST(AgreementTest, ShortMemoryIsNoInternalError) {
  const std::bad_alloc ours;
  const std::runtime_error torch("DefaultCPUAllocator: can't allocate memory: 9 bytes");
  for (const std::exception* error :
       {static_cast<const std::exception*>(&ours), static_cast<const std::exception*>(&torch)}) {
    const LocalFailure failure = failure_of(*error);
    EXPECT_EQ(failure.code, ErrorCode::kInvalidArgument);
    EXPECT_NE(failure.text.find("memory is too short"), std::string::npos) << failure.text;
    EXPECT_NE(failure.text.find("batch.global_batch"), std::string::npos) << failure.text;
  }
}

TEST(AgreementTest, ConfigurationsMustBeAlike) {
  const auto texts = failures([](comm::Communicator& ranks) {
    const std::string seed = ranks.rank() == 2 ? "8" : "7";
    agree_on_config(
        ranks,
        "[run]\nseed = " + seed + "\nthreads = " + std::to_string(ranks.rank()) +
            "\n\n[model]\nseed = 7\n"
    );
  });
  EXPECT_NE(texts[0].find("rank 2 has run.seed = 8, rank 0 has run.seed = 7"), std::string::npos)
      << texts[0];
  EXPECT_EQ(texts[1], texts[0]);
}

TEST(AgreementTest, WhatBelongsToAHostMayDiffer) {
  const auto texts = failures([](comm::Communicator& ranks) {
    const std::string own = std::to_string(ranks.rank());
    agree_on_config(
        ranks, "[run]\nthreads = " + own + "\n[data]\npath = " + own + "\n[log]\ntrace = " + own
    );
  });
  EXPECT_EQ(texts, std::vector<std::string>(kRanks));
}

TEST(AgreementTest, CommunicationErrorCannotBeAgreedOn) {
  EXPECT_THROW(catch_failure([] { HS_FAIL(CommError, "rank ", 1, " is gone"); }), CommError);
}

}  // namespace
}  // namespace hypershard::train
