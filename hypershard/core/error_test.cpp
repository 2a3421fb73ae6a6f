// Why: the form of a message is a promise to users and to every other module's tests.
// Checks text, type, laziness and what happens to ranks that are threads.
#include "hypershard/core/error.h"

#include <cerrno>
#include <cstdint>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace hypershard {
namespace {

class ErrorTest : public testing::Test {
 protected:
  void TearDown() override { set_error_rank(-1, 0); }
};

template <class Type, class Function>
Type catch_error(const Function& function) {
  try {
    function();
  } catch (const Type& error) {
    return error;
  }
  throw std::logic_error("nothing was thrown");
}

void unknown_axis() {
  const bool has_axis = false;
  HS_CHECK(has_axis, "layout.mesh: unknown axis 'shrad'", HS_HINT("did you mean '", "shard", "'?"));
}

TEST_F(ErrorTest, WritesRankHintCheckPlaceAndContext) {
  set_error_rank(5, 8);
  const ErrorContext outer("fully_shard");
  const ErrorContext inner(std::string("blocks.") + "3");
  const auto error = catch_error<InvalidArgument>(unknown_axis);
  const std::string what = error.what();
  const std::string place = "hypershard/core/error_test.cpp:";
  const std::size_t line = what.find(place) + place.size();
  EXPECT_EQ(
      what.substr(0, line),
      "[rank 5/8] layout.mesh: unknown axis 'shrad'\n"
      "  hint: did you mean 'shard'?\n"
      "  check: has_axis   at " +
          place
  );
  EXPECT_EQ(what.substr(what.find("   while: ")), "   while: fully_shard > blocks.3");
}

TEST_F(ErrorTest, BriefEndsBeforeCheckAndPlace) {
  EXPECT_EQ(
      catch_error<Error>(unknown_axis).what_brief(),
      "layout.mesh: unknown axis 'shrad'\n  hint: did you mean 'shard'?"
  );
}

TEST_F(ErrorTest, EachMacroThrowsItsType) {
  EXPECT_THROW(HS_CHECK(false), InvalidArgument);
  EXPECT_THROW(HS_SUPPORTED(false), Unsupported);
  EXPECT_THROW(HS_ASSERT(false), InternalError);
  EXPECT_THROW(HS_FAIL(CommError, "peer gone"), CommError);
  EXPECT_THROW(HS_FAIL(IoError, "disk full"), IoError);
  EXPECT_NO_THROW(HS_CHECK(true, "never built"));
}

TEST_F(ErrorTest, DebugChecksCostNothingInRelease) {
  int num_evaluated = 0;
#ifdef NDEBUG
  EXPECT_NO_THROW(HS_DCHECK(++num_evaluated == 0, "value ", num_evaluated));
  EXPECT_EQ(num_evaluated, 0);
#else
  EXPECT_THROW(HS_DCHECK(++num_evaluated == 0, "value ", num_evaluated), InternalError);
  EXPECT_EQ(num_evaluated, 1);
#endif
}

TEST_F(ErrorTest, CodesMatchTypes) {
  EXPECT_EQ(InvalidArgument("x").code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(Unsupported("x").code(), ErrorCode::kUnsupported);
  EXPECT_EQ(CommError("x").code(), ErrorCode::kComm);
  EXPECT_EQ(IoError("x").code(), ErrorCode::kIo);
  EXPECT_EQ(InternalError("x").code(), ErrorCode::kInternal);
  EXPECT_EQ(to_text(ErrorCode::kComm), "comm");
}

TEST_F(ErrorTest, ComparisonsPrintBothValues) {
  const std::vector<int> counts = {4, 5};
  const auto error = catch_error<InvalidArgument>([&] {
    HS_CHECK_EQ(counts.size(), 3, "comm: wrong number of counts");
  });
  EXPECT_NE(
      std::string(error.what())
          .find("comm: wrong number of counts\n  check: counts.size() == 3 (2 vs. 3)"),
      std::string::npos
  ) << error.what();
}

TEST_F(ErrorTest, ComparisonsHoldAndFailAtTheirBorders) {
  EXPECT_NO_THROW(HS_CHECK_LE(2, 2));
  EXPECT_THROW(HS_CHECK_LE(3, 2), InvalidArgument);
  EXPECT_NO_THROW(HS_CHECK_LT(1, 2));
  EXPECT_THROW(HS_CHECK_LT(2, 2), InvalidArgument);
  EXPECT_NO_THROW(HS_CHECK_GE(2, 2));
  EXPECT_THROW(HS_CHECK_GE(1, 2), InvalidArgument);
  EXPECT_NO_THROW(HS_CHECK_GT(3, 2));
  EXPECT_THROW(HS_CHECK_GT(2, 2), InvalidArgument);
  EXPECT_NO_THROW(HS_CHECK_NE(1, 2));
  EXPECT_THROW(HS_CHECK_NE(2, 2), InvalidArgument);
}

TEST_F(ErrorTest, IntegersOfMixedSignCompareByValue) {
  EXPECT_THROW(HS_CHECK_EQ(-1, std::numeric_limits<std::uint64_t>::max()), InvalidArgument);
  EXPECT_NO_THROW(HS_CHECK_LT(-1, std::size_t{0}));
}

TEST_F(ErrorTest, NanFailsEveryOrder) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(HS_CHECK_LE(nan, 1.0), InvalidArgument);
  EXPECT_THROW(HS_CHECK_GE(nan, 1.0), InvalidArgument);
}

TEST_F(ErrorTest, EvaluatesOperandsOnceAndPartsOnlyOnFailure) {
  int operands = 0;
  int parts = 0;
  const auto part = [&] { return ++parts; };
  HS_CHECK_EQ(++operands, 1, "part ", part());
  HS_CHECK(true, "part ", part());
  EXPECT_EQ(operands, 1);
  EXPECT_EQ(parts, 0);
  EXPECT_THROW(HS_CHECK_EQ(++operands, 1, "part ", part()), InvalidArgument);
  EXPECT_EQ(operands, 2);
  EXPECT_EQ(parts, 1);
}

TEST_F(ErrorTest, TemporariesInOperandsLiveUntilPrinted) {
  const auto names = [] { return std::vector<std::string>{"a name too long for a small string"}; };
  const auto error = catch_error<InvalidArgument>([&] { HS_CHECK_EQ(names().back(), "other"); });
  EXPECT_NE(
      std::string(error.what()).find("(a name too long for a small string vs. other)"),
      std::string::npos
  );
}

TEST_F(ErrorTest, WorksInABranchWithoutBraces) {
  bool reached_else = false;
  // clang-format off
  // NOLINTBEGIN(readability-braces-around-statements): that is what is tested
  if (false)
    HS_CHECK(true);
  else
    reached_else = true;
  // NOLINTEND(readability-braces-around-statements)
  // clang-format on
  EXPECT_TRUE(reached_else);
}

TEST_F(ErrorTest, ThreadRankCoversProcessRank) {
  set_error_rank(0, 4);
  std::string inside;
  std::thread([&inside] {
    const ThreadErrorRank rank(3, 4);
    inside = InvalidArgument("x").what();
  }).join();
  EXPECT_EQ(inside, "[rank 3/4] x");
  EXPECT_EQ(std::string(InvalidArgument("x").what()), "[rank 0/4] x");
}

TEST_F(ErrorTest, DoesNotRepeatARankAlreadyNamed) {
  set_error_rank(0, 4);
  const CommError other("[rank 2/4] comm: peer gone");
  EXPECT_EQ(std::string(other.what()), "[rank 2/4] comm: peer gone");
}

TEST_F(ErrorTest, ContextEndsWithItsScope) {
  {
    const ErrorContext step("load");
    EXPECT_EQ(error_context(), "load");
  }
  EXPECT_EQ(error_context(), "");
  EXPECT_EQ(std::string(IoError("x").what()), "x");
}

TEST_F(ErrorTest, ContextCanBeHandedToAnotherThread) {
  const ErrorContext outer("step 7");
  const ErrorContext inner("blocks.0");
  std::string inside;
  std::thread([&inside, context = error_context()]() mutable {
    const ErrorContext handed(std::move(context));
    const ErrorContext own("reduce");
    inside = error_context();
  }).join();
  EXPECT_EQ(inside, "step 7 > blocks.0 > reduce");
}

TEST_F(ErrorTest, OnlyInternalErrorsCarryAStack) {
  EXPECT_NE(std::string(InternalError("x").what()).find("\n  stack:\n    #0 "), std::string::npos);
  EXPECT_EQ(InternalError("x").what_brief(), "x");
  EXPECT_EQ(std::string(InvalidArgument("x").what()).find("stack"), std::string::npos);
}

TEST_F(ErrorTest, KeepsSeveralHintsOnLinesOfTheirOwn) {
  const auto error = catch_error<IoError>([] {
    HS_FAIL(IoError, "a", HS_HINT("first"), "b", hs_hint("second ", 2));
  });
  EXPECT_EQ(error.what_brief(), "ab\n  hint: first\n  hint: second 2");
}

TEST_F(ErrorTest, CopiesKeepEverything) {
  const auto error = catch_error<InvalidArgument>(unknown_axis);
  const Error& copy = InvalidArgument(error);
  EXPECT_EQ(copy.what_brief(), error.what_brief());
  EXPECT_STREQ(copy.what(), error.what());
}

class TimeoutError : public CommError {
 public:
  explicit TimeoutError(const ErrorText& text) : CommError(text) {}
};

TEST_F(ErrorTest, TypesOfOtherModulesCanBeThrown) {
  const auto error = catch_error<TimeoutError>([] { HS_FAIL(TimeoutError, "after ", 3, " s"); });
  EXPECT_EQ(error.code(), ErrorCode::kComm);
  EXPECT_EQ(error.what_brief(), "after 3 s");
}

TEST_F(ErrorTest, DescribesErrnoByTextAndNumber) {
  EXPECT_EQ(errno_text(ENOENT), "No such file or directory (errno 2)");
}

}  // namespace
}  // namespace hypershard
