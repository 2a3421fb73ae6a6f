// Why: a misspelt or malformed variable must be named, never skipped or guessed at.
#include "hypershard/core/env.h"

#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "hypershard/core/error.h"
#include "hypershard/core/log_capture.h"

namespace hypershard {
namespace {

/// Sets a variable and restores it at the end.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) {
      before_ = before;
    }
    setenv(name, value, 1);
  }
  ~ScopedVariable() {
    if (before_.has_value()) {
      setenv(name_, before_->c_str(), 1);
    } else {
      unsetenv(name_);
    }
  }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

template <class Read>
void expect_rejected(
    const char* name, const char* value, const Read& read, const std::string& fragment
) {
  const ScopedVariable variable(name, value);
  try {
    read(name);
    FAIL() << "accepted " << name << "=" << value;
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find(std::string("env: ") + name + "='" + value + "'"), std::string::npos)
        << text;
    EXPECT_NE(text.find(fragment), std::string::npos) << text;
  }
}

TEST(EnvTest, TableIsSortedDocumentedAndReadable) {
  std::string previous;
  for (const env::Variable& variable : env::variables()) {
    EXPECT_LT(previous, variable.name);
    EXPECT_TRUE(variable.name.starts_with("HS_"));
    EXPECT_TRUE(variable.doc.ends_with('.')) << variable.name;
    previous = variable.name;
  }
  EXPECT_NO_THROW(env::check_all());
}

TEST(EnvTest, UnsetAndEmptyGiveTheDefault) {
  unsetenv("HS_HEARTBEAT_MS");
  EXPECT_FALSE(env::is_set("HS_HEARTBEAT_MS"));
  EXPECT_EQ(env::get_duration_ms("HS_HEARTBEAT_MS"), 500);
  const ScopedVariable variable("HS_HEARTBEAT_MS", "");
  EXPECT_FALSE(env::is_set("HS_HEARTBEAT_MS"));
  EXPECT_EQ(env::get_duration_ms("HS_HEARTBEAT_MS"), 500);
}

TEST(EnvTest, ReadsChoices) {
  const ScopedVariable variable("HS_COMM", "c10d");
  EXPECT_TRUE(env::is_set("HS_COMM"));
  EXPECT_EQ(env::get_string("HS_COMM"), "c10d");
  expect_rejected("HS_COMM", "shn", env::get_string, "did you mean 'shm'?");
  expect_rejected("HS_COMM", "mpi", env::get_string, "one of auto, shm, c10d");
}

TEST(EnvTest, ReadsIntegersInRange) {
  const ScopedVariable variable("HS_SUPERNODE", "7");
  EXPECT_EQ(env::get_int("HS_SUPERNODE"), 7);
  for (const char* value : {"7x", "7.5", "-2", "2147483648", "99999999999999999999", " 7"}) {
    expect_rejected("HS_SUPERNODE", value, env::get_int, "an integer from -1 to 2147483647");
  }
}

TEST(EnvTest, ReadsDurationsInTheirOwnUnitAndInOthers) {
  const struct {
    const char* value;
    std::int64_t expected_ms;
  } kCases[] = {
      {"2", 2000}, {"0.5", 500}, {"250ms", 250}, {"3s", 3000}, {"2m", 120'000}, {"1h", 3'600'000}
  };
  for (const auto& test : kCases) {
    const ScopedVariable variable("HS_TIMEOUT_S", test.value);
    EXPECT_EQ(env::get_duration_ms("HS_TIMEOUT_S"), test.expected_ms) << test.value;
  }
  const ScopedVariable variable("HS_HEARTBEAT_MS", "20");
  EXPECT_EQ(env::get_duration_ms("HS_HEARTBEAT_MS"), 20);
}

TEST(EnvTest, RejectsMalformedDurations) {
  for (const char* value : {"abc", "s", "0", "-1", "inf", "nan", "1e99"}) {
    expect_rejected("HS_TIMEOUT_S", value, env::get_duration_ms, "a duration from 0.001 to");
  }
  expect_rejected("HS_TIMEOUT_S", "5sec", env::get_duration_ms, "units are ms, s, m and h");
}

TEST(EnvTest, CheckAllListsEveryMalformedVariable) {
  const ScopedVariable comm("HS_COMM", "mpi");
  const ScopedVariable threads("HS_THREADS", "many");
  try {
    env::check_all();
    FAIL() << "accepted two malformed variables";
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("HS_COMM='mpi'"), std::string::npos) << text;
    EXPECT_NE(text.find("HS_THREADS='many'"), std::string::npos) << text;
  }
}

TEST(EnvTest, AskingForWhatHasNoRowOrAnotherTypeIsOurBug) {
  EXPECT_THROW(env::get_string("HS_NO_SUCH_ROW"), InternalError);
  EXPECT_THROW(env::is_set("HS_NO_SUCH_ROW"), InternalError);
  EXPECT_THROW(env::get_int("HS_COMM"), InternalError);
}

TEST(EnvTest, WarnsOfUnknownVariablesWithTheNearestName) {
  const LogCapture capture;
  EXPECT_EQ(env::warn_unknown(), 0);
  const ScopedVariable slip("HS_LOG_LEVLE", "debug");
  const ScopedVariable other("HS_QQQQQQQQQ", "1");
  const ScopedVariable of_tests("HS_TEST_ANYTHING", "1");
  EXPECT_EQ(env::warn_unknown(), 2);
  EXPECT_EQ(
      capture.count(LogLevel::kWarn, "HS_LOG_LEVLE is ignored; did you mean 'HS_LOG_LEVEL'"), 1
  );
  EXPECT_EQ(capture.count(LogLevel::kWarn), 2);
  EXPECT_EQ(capture.count(LogLevel::kWarn, "HS_QQQQQQQQQ is ignored; `hypershard info env`"), 1);
}

TEST(EnvTest, DescriptionsNameEveryVariable) {
  const ScopedVariable variable("HS_COMM", "c10d");
  const std::string text = env::describe();
  const std::string markdown = env::describe_markdown();
  for (const env::Variable& row : env::variables()) {
    EXPECT_NE(text.find(row.name), std::string::npos);
    EXPECT_NE(markdown.find("| `" + std::string(row.name) + "` |"), std::string::npos);
  }
  EXPECT_NE(text.find("HS_COMM = c10d   (set; default auto)"), std::string::npos) << text;
  EXPECT_EQ(markdown.find("set; default"), std::string::npos);
}

}  // namespace
}  // namespace hypershard
