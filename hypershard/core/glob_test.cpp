// Why: patterns decide which parameters a plan touches; a pattern that matches one path too many or
// too few changes a model silently.
#include "hypershard/core/glob.h"

#include <ostream>
#include <string>

#include <gtest/gtest.h>

#include "hypershard/core/error.h"

namespace hypershard {
namespace {

struct Match {
  const char* pattern;
  const char* path;
  bool matches;
};

std::ostream& operator<<(std::ostream& stream, const Match& match) {
  return stream << match.pattern << " on " << match.path;
}

class GlobMatchTest : public testing::TestWithParam<Match> {};

TEST_P(GlobMatchTest, DecidesAsDocumented) {
  const Match& match = GetParam();
  EXPECT_EQ(glob_match(match.pattern, match.path), match.matches) << match;
}

INSTANTIATE_TEST_SUITE_P(
    Literals,
    GlobMatchTest,
    testing::Values(
        Match{"head.weight", "head.weight", true},
        Match{"head.weight", "head.weights", false},
        Match{"head.weight", "ahead.weight", false},
        Match{"head.weight", "headXweight", false},
        Match{"Head", "head", false},
        Match{"head", "", false}
    )
);

INSTANTIATE_TEST_SUITE_P(
    Star,
    GlobMatchTest,
    testing::Values(
        Match{"blocks.*.mlp", "blocks.3.mlp", true},
        Match{"blocks.*.mlp", "blocks.31.mlp", true},
        Match{"blocks.*.mlp", "blocks.3.x.mlp", false},
        Match{"blocks.*", "blocks", false},
        Match{"blocks.*", "blocks.3.mlp", false},
        Match{"*", "head", true},
        Match{"*", "head.weight", false},
        Match{"w*", "w", true},
        Match{"w*1", "w11", true},
        Match{"*.*.*", "a.b.c", true},
        Match{"*.*.*", "a.b", false}
    )
);

INSTANTIATE_TEST_SUITE_P(
    DoubleStar,
    GlobMatchTest,
    testing::Values(
        Match{"**", "a.b.c", true},
        Match{"**", "a", true},
        Match{"**.bias", "bias", true},
        Match{"**.bias", "a.b.bias", true},
        Match{"**.bias", "a.rebias", false},
        Match{"blocks.**", "blocks", true},
        Match{"blocks.**", "blocks.1.w", true},
        Match{"blocks.**", "blocksy", false},
        Match{"a.**.b", "a.b", true},
        Match{"a.**.b", "a.x.y.b", true},
        Match{"a.**.b", "a.xb", false},
        Match{"a**b", "a.b", true},
        Match{"x**.b", "x.b", true},
        Match{"x**.b", "xb", false},
        Match{"**.mlp.**", "mlp", true},
        Match{"**.mlp.**", "blocks.1.mlp.w1.weight", true},
        Match{"**.mlp.**", "blocks.1.xmlp.w1", false}
    )
);

INSTANTIATE_TEST_SUITE_P(
    ClassesAndBraces,
    GlobMatchTest,
    testing::Values(
        Match{"blocks.[0-3].w", "blocks.2.w", true},
        Match{"blocks.[0-3].w", "blocks.4.w", false},
        Match{"blocks.[!0-3].w", "blocks.4.w", true},
        Match{"a[!x]b", "a.b", false},
        Match{"a?b", "a.b", false},
        Match{"a?b", "axb", true},
        Match{"[]]", "]", true},
        Match{"[a-]", "-", true},
        Match{"{q,k,v}_proj", "k_proj", true},
        Match{"{q,k,v}_proj", "o_proj", false},
        Match{"w{1,2{a,b}}", "w2b", true},
        Match{"w{1,2{a,b}}", "w2", false},
        Match{"w{,_extra}", "w", true},
        Match{"{[,],x}", ",", true},
        Match{"{**.bias,head.*}", "a.bias", true},
        Match{"a\\*b", "a*b", true},
        Match{"a\\*b", "axb", false},
        Match{"{a\\,b,c}", "a,b", true}
    )
);

void expect_rejected(const char* pattern, const std::string& fragment) {
  try {
    const Glob glob{pattern};
    FAIL() << "accepted " << pattern;
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find(fragment), std::string::npos) << error.what();
  }
}

TEST(GlobTest, RejectsMalformedPatternsByColumn) {
  expect_rejected("", "empty");
  expect_rejected("blocks.[0-3", "column 8: '[' is never closed");
  expect_rejected("a{b,c", "column 2: '{' is never closed");
  expect_rejected("ab}c", "column 3: '}' was never opened");
  expect_rejected("ab\\", "column 3: nothing follows '\\'");
  expect_rejected("{a,b}[9-0]", "column 7: the range runs backwards");
}

TEST(GlobTest, RejectsExplodingBraces) {
  std::string pattern;
  for (int i = 0; i < 11; ++i) {
    pattern += "{a,b}";
  }
  expect_rejected(pattern.c_str(), "too many alternatives");
}

TEST(GlobTest, KeepsItsPatternText) {
  EXPECT_EQ(Glob("a.{b,c}").pattern(), "a.{b,c}");
}

}  // namespace
}  // namespace hypershard
