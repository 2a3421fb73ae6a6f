// Why: a test's body is a lambda over the test's variables, which no other process has. So a rank
// is this program again, running the same test: it skips the calls of run_ranks before the one that
// started it, runs the body in that one, and ends.
#include "hypershard/testing/internal/rank_run.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "hypershard/comm/c10d/process_world.h"
#include "hypershard/core/error.h"
#include "hypershard/testing/process_ranks.h"
#include "hypershard/testing/worker.h"

namespace hypershard::testing::internal {
namespace {

constexpr const char* kWorkerName = "rank-of-test";
constexpr const char* kThrewMark = "run_ranks: the body threw: ";
constexpr int kHasFailure = 1;
constexpr int kForeignError = 9;
constexpr int kFirstErrorCode = 10;  ///< and ErrorCode's values from there
constexpr int kNeverCalled = 30;

/// In a rank's process: which call of run_ranks it is for; -1 elsewhere.
int& call_to_run() {
  static int call = -1;
  return call;
}

std::string current_test() {
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  HS_CHECK(info != nullptr, "run_ranks: back end shm works only inside a GoogleTest test");
  return std::string(info->test_suite_name()) + "." + info->name();
}

/// Counts the calls of run_ranks with processes in the current test, from 0. By GoogleTest's
/// events: a repeated test has the name of the one before.
class CallCounter : public ::testing::EmptyTestEventListener {
 public:
  void OnTestStart(const ::testing::TestInfo& /*test*/) override { next_ = 0; }
  int next() { return next_++; }

 private:
  int next_ = 0;
};

int next_call() {
  static CallCounter* const counter = [] {
    auto* made = new CallCounter;  // owned by GoogleTest
    ::testing::UnitTest::GetInstance()->listeners().Append(made);
    return made;
  }();
  return counter->next();
}

// arguments: the test, the call in it
const bool kIsRegistered =
    register_worker(kWorkerName, [](const std::vector<std::string>& arguments) {
      call_to_run() = std::atoi(arguments.at(1).c_str());
      std::string program = "test";
      std::string filter = "--gtest_filter=" + arguments.at(0);
      std::string brief = "--gtest_brief=1";
      std::string disabled = "--gtest_also_run_disabled_tests";
      std::vector<char*> argv{
          program.data(), filter.data(), brief.data(), disabled.data(), nullptr
      };
      int argc = 4;
      ::testing::InitGoogleTest(&argc, argv.data());
      const int result = RUN_ALL_TESTS();
      return result == 0 ? kNeverCalled : result;
    });

[[noreturn]] void end_rank(int status) {
  std::fflush(nullptr);
  ::_exit(status);  // the rest of the test is not this process's
}

[[noreturn]] void run_body(const std::function<void(std::shared_ptr<comm::World>)>& body) {
  std::shared_ptr<comm::World> world;
  const auto threw = [&](const std::string& text) {
    if (world != nullptr) {
      comm::report_failure(*world, text);
    }
    std::fprintf(stderr, "%s%s", kThrewMark, text.c_str());
  };
  try {
    world = comm::World::join();
    body(world);
    world->shutdown();
    world.reset();
  } catch (const Error& error) {
    threw(error.what_brief());
    end_rank(kFirstErrorCode + static_cast<int>(error.code()));
  } catch (const std::exception& error) {
    threw(error.what());
    end_rank(kForeignError);
  }
  end_rank(::testing::Test::HasFailure() ? kHasFailure : 0);
}

[[noreturn]] void rethrow(int status, const std::string& text) {
  switch (static_cast<ErrorCode>(status - kFirstErrorCode)) {
    case ErrorCode::kInvalidArgument:
      throw InvalidArgument(text);  // raw-throw: the rank's own error
    case ErrorCode::kUnsupported:
      throw Unsupported(text);  // raw-throw: the rank's own error
    case ErrorCode::kComm:
      throw CommError(text);  // raw-throw: the rank's own error
    case ErrorCode::kIo:
      throw IoError(text);  // raw-throw: the rank's own error
    default:
      throw InternalError(text);  // raw-throw: the rank's own error
  }
}

/// A failed communication is the consequence of another rank's end, however late that one went.
bool comes_before(const RankResult& a, const RankResult& b) {
  const auto is_consequence = [](const RankResult& result) {
    return result.status.code == kFirstErrorCode + static_cast<int>(ErrorCode::kComm);
  };
  return std::pair(is_consequence(a), a.seconds) < std::pair(is_consequence(b), b.seconds);
}

/// Turns what ranks said into failures of the test, and into an exception if one threw.
void judge(const std::vector<RankResult>& results, double deadline_s) {
  const RankResult* first = nullptr;
  bool in_time = true;
  std::string report;
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    const RankResult& result = results[rank];
    if (result.status.code == 0 && !result.killed_at_deadline) {
      continue;
    }
    report += "rank " + std::to_string(rank) + ": " + to_text(result) + "\n";
    first = first == nullptr || comes_before(result, *first) ? &result : first;
    in_time = in_time && !result.killed_at_deadline;
  }
  if (!in_time) {
    HS_FAIL(CommError, "run_ranks: not done within ", deadline_s, " s:\n", report);
  }
  if (first == nullptr) {
    return;
  }
  const std::size_t mark = first->err.find(kThrewMark);
  if (mark != std::string::npos && first->status.code >= kFirstErrorCode) {
    rethrow(first->status.code, first->err.substr(mark) + "\n" + report);
  }
  ADD_FAILURE() << "run_ranks over processes:\n" << report;
}

}  // namespace

void run_rank_processes(
    int num_ranks,
    const std::function<void(std::shared_ptr<comm::World>)>& body,
    const RunRanksOptions& options
) {
  const std::string test = current_test();
  const int call = next_call();
  if (call_to_run() >= 0) {
    if (call == call_to_run()) {
      run_body(body);
    }
    return;
  }
  std::vector<int> supernodes;
  if (!options.supernodes.empty()) {
    const layout::Topology topology = layout::Topology::from_labels(options.supernodes);
    for (int rank = 0; rank < num_ranks; ++rank) {
      supernodes.push_back(topology.supernode_of(rank));
    }
  }
  judge(
      run_processes(
          num_ranks,
          kWorkerName,
          {.arguments = {test, std::to_string(call)},
           .env = {{"HS_TIMEOUT_S", std::to_string(options.timeout_s)}},
           .supernodes = supernodes,
           .deadline_s = options.deadline_s}
      ),
      options.deadline_s
  );
}

}  // namespace hypershard::testing::internal
