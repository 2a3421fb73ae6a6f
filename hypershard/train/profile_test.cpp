// Why: a report is believed, so its sums must be the clock's and no time may hide.
#include "hypershard/train/profile.h"

#include <cmath>
#include <cstdint>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace hypershard::train {
namespace {

constexpr std::int64_t kMillisecond = 1'000'000;

std::vector<TraceShare> some_shares() {
  return {
      {TraceLane::kOther, std::string(kStepSpan), 3 * kMillisecond, 2},
      {TraceLane::kCompute, "forward", 1 * kMillisecond, 2},
      {TraceLane::kCompute, "forward blocks.0.attn", 10 * kMillisecond, 2},
      {TraceLane::kCompute, "forward blocks.11.attn", 20 * kMillisecond, 2},
      {TraceLane::kCompute, "backward blocks.0.attn", 40 * kMillisecond, 2},
      {TraceLane::kCompute, "backward root", 5 * kMillisecond, 2},
      {TraceLane::kWait, "unshard root", 1 * kMillisecond, 4},
      {TraceLane::kWait, "reduce root", 2 * kMillisecond, 2},
      {TraceLane::kWait, "write window", 2 * kMillisecond, 4},
      {TraceLane::kWait, "loss", 1 * kMillisecond, 2},
      {TraceLane::kOptimizer, "clip", 1 * kMillisecond, 2},
      {TraceLane::kOptimizer, "step", 3 * kMillisecond, 2},
      {TraceLane::kData, "batch", 1 * kMillisecond, 2},
      {TraceLane::kCheckpoint, "save", 10 * kMillisecond, 1},
  };
}

double part(const Profile& profile, const std::string& name) {
  for (const PartTime& each : profile.parts) {
    if (each.name == name) {
      return each.ms;
    }
  }
  return std::nan("");
}

TEST(ProfileTest, PartsAddUpToTheStep) {
  const Profile profile = make_profile(some_shares(), {});
  EXPECT_EQ(profile.num_steps, 2);
  EXPECT_DOUBLE_EQ(profile.step_ms, 50);
  double sum = 0;
  for (const PartTime& each : profile.parts) {
    sum += each.ms;
  }
  EXPECT_DOUBLE_EQ(sum, profile.step_ms);
  EXPECT_DOUBLE_EQ(part(profile, "forward"), 15.5);
  EXPECT_DOUBLE_EQ(part(profile, "backward"), 22.5);
  EXPECT_DOUBLE_EQ(part(profile, "optimizer"), 1.5);
  EXPECT_DOUBLE_EQ(part(profile, "clip"), 0.5);
  EXPECT_DOUBLE_EQ(part(profile, "wait for the write window"), 1);
  EXPECT_DOUBLE_EQ(part(profile, "reduce gradients, and wait for peers"), 1);
  EXPECT_DOUBLE_EQ(part(profile, "exchange the loss, and wait for peers"), 0.5);
  EXPECT_DOUBLE_EQ(part(profile, "rest"), 6.5);
}

TEST(ProfileTest, ModulesThatDifferInAnIndexAreOneRow) {
  const Profile profile = make_profile(some_shares(), {});
  ASSERT_EQ(profile.modules.size(), 2U);
  EXPECT_EQ(profile.modules[0].path, "blocks.*.attn");
  EXPECT_EQ(profile.modules[0].num_modules, 2);
  EXPECT_DOUBLE_EQ(profile.modules[0].forward_ms, 15);
  EXPECT_DOUBLE_EQ(profile.modules[0].backward_ms, 20);
  EXPECT_EQ(profile.modules[1].path, "root");
  EXPECT_DOUBLE_EQ(profile.modules[1].wait_ms, 1.5);
}

/// The rows of a report's memory that add up, and the sum below them, in MiB; those after it are
/// left out.
std::map<std::string, double> memory_rows(const std::string& text) {
  std::map<std::string, double> rows;
  std::istringstream lines(text.substr(text.find("  memory")));
  std::string line;
  std::getline(lines, line);
  while (std::getline(lines, line)) {
    const std::size_t unit = line.find(" MiB");
    const std::size_t number = line.rfind("  ", unit);
    EXPECT_NE(unit, std::string::npos) << line;
    const std::string name = line.substr(2, line.find("  ", 2) - 2);
    rows[name] = std::stod(line.substr(number));
    if (name.starts_with("sum")) {
      break;
    }
  }
  return rows;
}

TEST(ProfileTest, MemoryRowsAddUpToThePeak) {
  constexpr std::int64_t kMiB = 1 << 20;
  const MemoryUse memory{
      .process = 100 * kMiB,
      .peak = 300 * kMiB,
      .job = 400 * kMiB,
      .plan =
          {.runtime = 1 * kMiB,
           .shared_runtime = 2 * kMiB,
           .shared_unsharded = 3 * kMiB,
           .unsharded = 4 * kMiB,
           .gradient_buffers = 5 * kMiB,
           .gradients = 6 * kMiB,
           .update = 7 * kMiB,
           .optimizer = 8 * kMiB}
  };
  const std::string text = describe(make_profile(some_shares(), memory));
  EXPECT_NE(text.find("400 MiB"), std::string::npos) << text;
  std::map<std::string, double> rows = memory_rows(text);
  const double sum = rows["sum: resident at its highest"];
  rows.erase("sum: resident at its highest");
  EXPECT_DOUBLE_EQ(sum, 300) << text;
  EXPECT_DOUBLE_EQ(rows["program and libraries"], 100) << text;
  EXPECT_DOUBLE_EQ(rows["optimizer state"], 8) << text;
  EXPECT_DOUBLE_EQ(rows["activations, workspace and the rest"], 300 - 100 - 36) << text;
  double added = 0;
  for (const auto& [name, mib] : rows) {
    added += mib;
  }
  EXPECT_DOUBLE_EQ(added, sum) << text;
}

TEST(ProfileTest, WithoutAStepItSaysSo) {
  EXPECT_NE(describe(make_profile({}, {})).find("no step was traced"), std::string::npos);
}

}  // namespace
}  // namespace hypershard::train
