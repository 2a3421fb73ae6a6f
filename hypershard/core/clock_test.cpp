// Why: durations from a clock that could run backwards would poison every measurement.
#include "hypershard/core/clock.h"

#include <ctime>

#include <gtest/gtest.h>

namespace hypershard {
namespace {

TEST(ClockTest, NeverRunsBackwards) {
  std::int64_t last_ns = now_ns();
  for (int i = 0; i < 10'000; ++i) {
    const std::int64_t next_ns = now_ns();
    ASSERT_GE(next_ns, last_ns);
    last_ns = next_ns;
  }
}

TEST(ClockTest, StopwatchCoversWhatTheClockDoes) {
  const std::int64_t before_ns = now_ns();
  Stopwatch watch;
  const std::int64_t begun_ns = now_ns();
  const std::int64_t now = now_ns();
  const std::int64_t elapsed_ns = watch.elapsed_ns();
  const std::int64_t after_ns = now_ns();
  EXPECT_GE(elapsed_ns, now - begun_ns);
  EXPECT_LE(elapsed_ns, after_ns - before_ns);
  watch.restart();
  EXPECT_LE(watch.elapsed_ns(), now_ns() - after_ns);
}

TEST(ClockTest, WallOffsetGivesTheWallTime) {
  const std::int64_t before_s = std::time(nullptr);
  const std::int64_t wall_ns = now_ns() + wall_minus_monotonic_ns();
  const std::int64_t after_s = std::time(nullptr);
  EXPECT_GE(wall_ns / 1'000'000'000 + 1, before_s);
  EXPECT_LE(wall_ns / 1'000'000'000 - 1, after_s);
}

}  // namespace
}  // namespace hypershard
