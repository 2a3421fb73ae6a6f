// Checks that metrics survive a round trip bit for bit, a resume without doubles, and a full disk
// with a clear error.
#include "hypershard/train/metrics.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <unistd.h>

#include <gtest/gtest.h>

#include "hypershard/core/error.h"

namespace hypershard::train {
namespace {

namespace fs = std::filesystem;

class MetricsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("hs_metrics_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path() const { return (folder_ / "metrics.jsonl").string(); }
  std::string content() const {
    std::ifstream file(path());
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }

  fs::path folder_;
};

StepMetrics awkward_metrics() {
  return {
      .step = 7,
      .loss = 0.1 + 0.2,
      .eval_loss = 1.0 / 3.0,
      .eval_nats_a_byte = 5e-324,
      .lr = 1e-300,
      .grad_norm = 123456789.123456789,
      .step_ms = 1.5,
      .tokens_per_s = 1e17 + 3,
      .mfu = std::nullopt,
      .exposed_comm_share = 0.25,
      .exposed_inside_share = 0.1,
      .exposed_between_share = 0.125,
      .inside_bytes_per_s = 2.0 / 3.0,
      .inside_overlap = 1e-9,
      .between_bytes_per_s = 1.25e8,
      .between_overlap = 0.75,
      .peak_bytes = (std::int64_t{1} << 62) + 1,
      .job_bytes = (std::int64_t{1} << 53) + 1,
      .tokens_seen = 9,
      .copied_bytes = 1,
      .accumulated_bytes = 2,
      .gathered_bytes = 3,
      .reduced_bytes = 4,
      .published_bytes = 5,
      .inside_bytes = 6,
      .between_bytes = 7
  };
}

TEST_F(MetricsTest, ReadsBackTheSameBits) {
  EXPECT_EQ(parse_metrics(to_json(awkward_metrics())), awkward_metrics());
}

TEST_F(MetricsTest, WritesNullForWhatWasNotMeasured) {
  const std::string line = to_json({.step = 1});
  EXPECT_NE(line.find(R"("eval_loss":null)"), std::string::npos) << line;
  EXPECT_NE(line.find(R"("mfu":null)"), std::string::npos) << line;
}

TEST_F(MetricsTest, ReadsNullLossAsNan) {
  EXPECT_TRUE(std::isnan(parse_metrics(to_json({.step = 1, .loss = std::nan("")})).loss));
}

TEST_F(MetricsTest, RefusesForeignLine) {
  try {
    parse_metrics(R"({"stop": 3})");
    FAIL() << "no error";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("not a line of metrics"), std::string::npos)
        << error.what();
  }
}

TEST_F(MetricsTest, FirstRunBeginsTheFile) {
  std::ofstream(path()) << to_json({.step = 1}) << "\nrubbish\n";
  MetricsWriter writer(path(), 0);
  writer.write({.step = 1, .loss = 2});
  EXPECT_EQ(content(), to_json({.step = 1, .loss = 2}) + "\n");
}

TEST_F(MetricsTest, ResumedRunCutsOffLaterAndTornLines) {
  const std::string one = to_json({.step = 1}) + "\n";
  const std::string two = to_json({.step = 2}) + "\n";
  std::ofstream(path()) << one << two << to_json({.step = 3}) << "\n" << R"({"step":4,"lo)";
  {
    MetricsWriter writer(path(), 2);
    writer.write({.step = 3, .loss = 8});
  }
  EXPECT_EQ(content(), one + two + to_json({.step = 3, .loss = 8}) + "\n");
}

TEST_F(MetricsTest, ForeignLineOfAResumedRunIsNamedWithItsFile) {
  std::ofstream(path()) << "nonsense\n";
  try {
    MetricsWriter writer(path(), 2);
    FAIL() << "no error";
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("'nonsense'"), std::string::npos) << text;
    EXPECT_NE(text.find(path()), std::string::npos) << text;
    EXPECT_NE(text.find("move the file away"), std::string::npos) << text;
  }
}

TEST_F(MetricsTest, LineIsInTheFileWhenWriteReturns) {
  MetricsWriter writer(path(), 0);
  writer.write({.step = 1});
  EXPECT_EQ(content(), to_json({.step = 1}) + "\n");
}

TEST_F(MetricsTest, FullDiskIsAnIoErrorThatNamesFileAndCause) {
  MetricsWriter writer("/dev/full", 0);
  try {
    writer.write({.step = 1});
    FAIL() << "no error";
  } catch (const IoError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("/dev/full"), std::string::npos) << text;
    EXPECT_NE(text.find("No space left on device"), std::string::npos) << text;
  }
}

TEST_F(MetricsTest, FolderThatDoesNotExistIsAnIoError) {
  EXPECT_THROW(MetricsWriter((folder_ / "absent" / "m.jsonl").string(), 0), IoError);
}

}  // namespace
}  // namespace hypershard::train
