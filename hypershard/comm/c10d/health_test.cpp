// What health says about ranks that fall silent, fail, leave, lag or disagree, and about a store
// that dies: several Health objects play the ranks of a job over one store in memory.
#include "hypershard/comm/c10d/health.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "hypershard/core/error.h"

namespace hypershard::comm {
namespace {

constexpr double kBeatS = 0.1;

// A store whose host can die or be stopped.
class MortalStore : public ::c10d::HashStore {
 public:
  void die() {
    const std::lock_guard lock(state_mutex_);
    is_dead_ = true;
  }
  void stop(bool is_stopped) {
    const std::lock_guard lock(state_mutex_);
    is_stopped_ = is_stopped;
    going_on_.notify_all();
  }

  using ::c10d::HashStore::set;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    {
      std::unique_lock lock(state_mutex_);
      going_on_.wait(lock, [&] { return !is_stopped_; });
      if (is_dead_) {
        throw std::runtime_error("Broken pipe");  // raw-throw: plays c10d
      }
    }
    HashStore::set(key, value);
  }

 private:
  std::mutex state_mutex_;
  std::condition_variable going_on_;
  bool is_dead_ = false;
  bool is_stopped_ = false;
};

CollectiveNote note(const std::string& op, std::uint64_t sequence, const std::string& unit) {
  CollectiveNote made;
  made.communicator = "shard";
  made.op = op;
  made.unit = unit;
  made.sequence = sequence;
  made.signature = sequence + op.size();
  made.detail = "float32, 64 bytes";
  return made;
}

class HealthTest : public ::testing::Test {
 protected:
  HealthTest() : store_(c10::make_intrusive<MortalStore>()) {
    group_.name = "shard";
    group_.global_ranks = {0, 1, 2};
    for (int rank = 0; rank < 3; ++rank) {
      HealthOptions options;
      options.rank = rank;
      options.world_size = 3;
      options.heartbeat_s = kBeatS;
      options.store_owner = "rank 0 (which hosts the job's store)";
      ranks_.push_back(std::make_unique<Health>(store_, options));
    }
  }

  // Waits until the store holds what the rank has noted.
  void publish(int rank, const CollectiveNote& made) {
    ranks_[static_cast<std::size_t>(rank)]->note(made);
    const std::string key = "health/" + std::to_string(rank);
    while (store_->get_to_str(key).find(made.unit) == std::string::npos) {
      std::this_thread::yield();
    }
  }

  Stall stall() const {
    Stall made;
    made.note = note("reduce_scatter", 17, "blocks.3");
    return made;
  }

  c10::intrusive_ptr<MortalStore> store_;
  std::vector<std::unique_ptr<Health>> ranks_;
  GroupInfo group_;
};

void expect_contains(const std::string& text, const std::vector<std::string>& fragments) {
  for (const std::string& fragment : fragments) {
    EXPECT_NE(text.find(fragment), std::string::npos) << "no '" << fragment << "' in: " << text;
  }
}

TEST_F(HealthTest, NamesTheRankThatFellSilentAndItsLastCollective) {
  publish(1, note("all_gather", 16, "blocks.4"));
  ranks_[1].reset();
  Stall closed = stall();
  closed.transport_text = "Connection closed by peer";
  expect_contains(
      ranks_[0]->explain(group_, closed),
      {"rank 1 died (no sign of life for ",
       " s) during reduce_scatter #17 of unit 'blocks.3' on axis 'shard'; ",
       "its last known collective was all_gather #16 of unit 'blocks.4' on axis 'shard'"}
  );
}

TEST_F(HealthTest, AfterATimeoutASilentRankMayBeStopped) {
  ranks_[1].reset();
  Stall late = stall();
  late.timed_out = true;
  expect_contains(
      ranks_[0]->explain(group_, late),
      {"rank 1 has died or is stopped (no sign of life", "it has told of no collective yet"}
  );
}

TEST_F(HealthTest, BetweenSupernodesASilentRankMayBeCutOff) {
  ranks_[1].reset();
  Stall late = stall();
  late.timed_out = true;
  late.note.crosses_supernodes = true;
  expect_contains(
      ranks_[0]->explain(group_, late),
      {"rank 1 has died or is stopped, or cut off (no sign of life",
       "during reduce_scatter #17 of unit 'blocks.3' on axis 'shard' between supernodes"}
  );
}

TEST_F(HealthTest, NamesASilentRankOutsideTheGroup) {
  ranks_[2].reset();
  group_.global_ranks = {0, 1};
  expect_contains(ranks_[0]->explain(group_, stall()), {"rank 2 has died or is stopped"});
}

TEST_F(HealthTest, TheFirstFailureWins) {
  ranks_[2]->report_failure("train: the loss is NaN at step 7");
  ranks_[1]->report_failure("some consequence");
  const std::string text = ranks_[0]->explain(group_, stall());
  expect_contains(
      text,
      {"rank 2 failed first",
       "reduce_scatter #17 of unit 'blocks.3' on axis 'shard' cannot complete",
       "the loss is NaN at step 7"}
  );
  EXPECT_EQ(text.find("consequence"), std::string::npos) << text;
}

TEST_F(HealthTest, AFailureIsAVerdictBeforeTheTimeout) {
  const Health::Watch watch(ranks_[0].get(), group_.global_ranks);
  EXPECT_FALSE(ranks_[0]->verdict(group_, stall()).has_value());
  ranks_[2]->report_failure("out of disk");
  std::optional<std::string> verdict;
  while (!verdict) {
    std::this_thread::yield();
    verdict = ranks_[0]->verdict(group_, stall());
  }
  expect_contains(*verdict, {"rank 2 failed first", "out of disk"});
}

TEST_F(HealthTest, NamesARankThatEndedTooEarly) {
  publish(1, note("barrier", 16, "end"));
  ranks_[1]->leave();
  expect_contains(
      ranks_[0]->explain(group_, stall()),
      {"rank 1 has ended its job before reduce_scatter #17",
       "its last known collective was barrier #16"}
  );
}

TEST_F(HealthTest, NamesTheRankThatLags) {
  publish(2, note("reduce_scatter", 17, "blocks.3"));
  publish(1, note("all_gather", 12, "blocks.5"));
  Stall late = stall();
  late.timed_out = true;
  late.waited_s = 300;
  expect_contains(
      ranks_[0]->explain(group_, late),
      {"reduce_scatter #17 of unit 'blocks.3' on axis 'shard' timed out after 300.0 s",
       "every rank is alive",
       "rank 1 lags: its last known collective was all_gather #12 of unit 'blocks.5'"}
  );
}

TEST_F(HealthTest, NamesRanksThatCallDifferentThings) {
  publish(1, note("all_reduce", 17, "head"));
  expect_contains(
      ranks_[0]->explain(group_, stall()),
      {"the ranks call different collectives",
       "rank 0 reduce_scatter #17 of unit 'blocks.3' on axis 'shard' (float32, 64 bytes)",
       "rank 1 all_reduce #17 of unit 'head'"}
  );
}

TEST_F(HealthTest, NamesTheHostOfAStoreThatIsGone) {
  store_->die();
  expect_contains(
      ranks_[2]->explain(group_, stall()),
      {"rank 0 (which hosts the job's store) is gone; reduce_scatter #17 of unit 'blocks.3'"}
  );
}

TEST_F(HealthTest, AStoreThatHangsHoldsUpNobody) {
  store_->stop(true);
  expect_contains(
      ranks_[2]->explain(group_, stall()), {"rank 0 (which hosts the job's store) does not answer"}
  );
  ranks_[2]->report_failure("no matter");
  ranks_[2].reset();  // leaves its thread behind
  store_->stop(false);
}

TEST_F(HealthTest, RanksFinishTogether) {
  std::vector<std::thread> threads;
  std::mutex mutex;
  int num_finished = 0;
  for (const auto& health : ranks_) {
    threads.emplace_back([&, rank = health.get()] {
      rank->finish(60);
      const std::lock_guard lock(mutex);
      ++num_finished;
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(num_finished, 3);
}

std::string finish_text(Health& health, double timeout_s) {
  try {
    health.finish(timeout_s);
  } catch (const CommError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST_F(HealthTest, FinishNamesWhoIsStillAtWork) {
  publish(1, note("all_gather", 3, "blocks.5"));
  ranks_[2]->leave();
  expect_contains(
      finish_text(*ranks_[0], 0.5), {"comm.world: ", "rank 2 has ended its job before shutdown"}
  );
}

TEST_F(HealthTest, FinishGivesUpWhenARankFails) {
  ranks_[1]->report_failure("boom");
  expect_contains(
      finish_text(*ranks_[0], 60), {"rank 1 failed first, so shutdown cannot complete", "boom"}
  );
}

TEST_F(HealthTest, LingerEndsWhenTheOthersHaveLeft) {
  ranks_[1]->leave();
  ranks_[2]->report_failure("boom");
  ranks_[0]->linger(600);  // the suite's time limit ends this if it does not see them go
}

}  // namespace
}  // namespace hypershard::comm
