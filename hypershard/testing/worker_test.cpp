// Checks the `--worker` registry through the test binary itself.
#include "hypershard/testing/worker.h"

#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace hypershard::testing {
namespace {

const bool kCountRegistered =
    register_worker("count", [](const std::vector<std::string>& arguments) {
      return static_cast<int>(arguments.size());
    });

const bool kThrowRegistered = register_worker("throw", [](const std::vector<std::string>&) -> int {
  throw std::runtime_error("on purpose");
});

TEST(WorkerTest, PassesArgumentsAndReturnsExitCode) {
  ASSERT_TRUE(kCountRegistered);
  EXPECT_EQ(run_worker("count", {"a", "b", "c"}), 3);
}

TEST(WorkerTest, TurnsExceptionIntoExitCode) {
  ASSERT_TRUE(kThrowRegistered);
  EXPECT_EQ(run_worker("throw", {}), 70);
}

TEST(WorkerTest, NamesKnownWorkersWhenUnknown) {
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(run_worker("nobody", {}), 64);
  const std::string printed = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(printed.find("unknown worker 'nobody'"), std::string::npos) << printed;
  EXPECT_NE(printed.find("count"), std::string::npos) << printed;
}

}  // namespace
}  // namespace hypershard::testing
