// Why: a configuration that is read differently than it was meant wastes a run. Every way to be
// wrong has its message, and what was resolved can be written down and read back.
#include "hypershard/core/config.h"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <ostream>
#include <string>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "hypershard/core/error.h"

namespace hypershard {
namespace {

enum class Strategy { kDdp, kZero3 };

struct Options {
  std::string name = "run";
  int steps = 100;
  std::int64_t big = 1;
  double lr = 0.001;
  bool resume = false;
  Strategy strategy = Strategy::kZero3;
  std::string device = "cpu";
  std::optional<double> clip;
  std::optional<std::int64_t> limit;
  std::optional<std::string> note;
  std::vector<std::int64_t> shape = {1, 2};
  std::vector<double> betas = {0.9, 0.95};
  std::vector<std::string> plays;
  PatternTable<std::string> layout;
  PatternTable<double> lr_scale;

  bool operator==(const Options&) const = default;
};

class ConfigTest : public testing::Test {
 protected:
  ConfigTest() {
    schema.section("").bind("name", &options.name, {.doc = "Name of the run."});
    schema.section("train", "Loop and schedule.")
        .bind("steps", &options.steps, {.min = 1, .doc = "Optimizer steps to run."})
        .bind("big", &options.big, {.min = 0})
        .bind("lr", &options.lr, {.max = 1, .above = 0, .doc = "Peak learning rate."})
        .bind("resume", &options.resume, {.doc = "Go on from the last checkpoint."})
        .bind("clip", &options.clip, {.above = 0})
        .bind("limit", &options.limit, {.min = 1})
        .bind("note", &options.note, {});
    schema.section("shard", "How parameters are cut.")
        .bind_choice<Strategy>(
            "strategy",
            &options.strategy,
            {{"ddp", Strategy::kDdp}, {"zero3", Strategy::kZero3}},
            {.doc = "Row of the strategy table."}
        )
        .bind_choice("device", &options.device, {"cpu", "cuda"}, {})
        .bind("shape", &options.shape, {.min = 1, .min_items = 1, .max_items = 3})
        .bind("layout", &options.layout, {.doc = "Layouts by module path."});
    schema.section("optim.adam", "AdamW.")
        .bind("betas", &options.betas, {.min = 0, .max = 1, .min_items = 2, .max_items = 2})
        .bind("lr_scale", &options.lr_scale, {});
    schema.section("data").bind("plays", &options.plays, {});
  }

  /// Loads and returns the message of the error; fails the test if there is none.
  std::string error_of(const std::string& text, const std::vector<std::string>& overrides = {}) {
    try {
      schema.load_text(text, "run.toml", overrides);
    } catch (const InvalidArgument& error) {
      return error.what_brief();
    }
    ADD_FAILURE() << "accepted: " << text;
    return "";
  }

  std::string set_error(const std::string& override_text) {
    return error_of("name = \"x\"", {override_text});
  }

  void load(const std::string& text, const std::vector<std::string>& overrides = {}) {
    schema.load_text(text, "run.toml", overrides);
  }

  Options options;
  Schema schema;
};

TEST_F(ConfigTest, FillsEveryKindOfField) {
  load(R"(
name = "demo"
[train]
steps = 0x10
lr = 1
resume = true
clip = 0.5
limit = 7
note = 'n'
[shard]
strategy = "ddp"
device = "cuda"
shape = [4, 5, 6]
[shard.layout]
"blocks.*.w" = "flat"
"a.**" = "owned"
[optim]
adam.betas = [0.8, 1]
adam.lr_scale = { head = 2 }
[data]
plays = ["Hamlet", "King Lear"]
)");
  const Options expected{
      .name = "demo",
      .steps = 16,
      .big = 1,
      .lr = 1.0,
      .resume = true,
      .strategy = Strategy::kDdp,
      .device = "cuda",
      .clip = 0.5,
      .limit = 7,
      .note = "n",
      .shape = {4, 5, 6},
      .betas = {0.8, 1.0},
      .plays = {"Hamlet", "King Lear"},
      .layout = {{"blocks.*.w", "flat"}, {"a.**", "owned"}},
      .lr_scale = {{"head", 2.0}},
  };
  EXPECT_EQ(options, expected);
}

TEST_F(ConfigTest, ResolvedTextLoadsBackToTheSameValues) {
  load("[train]\nlr = 0.1\nclip = 3", {"train.note=a \"b\" \\ \n\x01 é", "shard.layout.x.*=y z"});
  const Options first = options;
  const std::string text = schema.to_toml();
  load(text);
  EXPECT_EQ(options, first);
  EXPECT_EQ(schema.to_toml(), text);
}

TEST_F(ConfigTest, ResolvedTextHasDefaultsInTheSchemasOrder) {
  schema.load_defaults();
  EXPECT_EQ(schema.to_toml(), R"(name = "run"

[train]
steps = 100
big = 1
lr = 0.001
resume = false

[shard]
strategy = "zero3"
device = "cpu"
shape = [1, 2]
layout = {}

[optim.adam]
betas = [0.9, 0.95]
lr_scale = {}

[data]
plays = []
)");
}

TEST_F(ConfigTest, SecondLoadStartsFromTheDefaults) {
  load("[train]\nsteps = 5\nclip = 1");
  load("[train]\nlr = 0.5");
  EXPECT_EQ(options.steps, 100);
  EXPECT_EQ(options.clip, std::nullopt);
  EXPECT_FALSE(schema.is_given("train.steps"));
}

TEST_F(ConfigTest, SaysWhereAValueCameFrom) {
  load("name = 'x'\n[train]\n  steps = 5\n", {"train.lr=0.5"});
  EXPECT_EQ(schema.where("train.steps"), "run.toml:3:11");
  EXPECT_EQ(schema.where("train.lr"), "--set train.lr=0.5");
  EXPECT_EQ(schema.where("train.resume"), "default");
}

TEST_F(ConfigTest, UnknownKeyNamesPlaceNearestAndAll) {
  EXPECT_EQ(
      error_of("[train]\nstpes = 5"),
      "config: run.toml:2:1: train.stpes: unknown key; "
      "[train] takes steps, big, lr, resume, clip, limit, note; did you mean 'steps'?"
  );
}

TEST_F(ConfigTest, UnknownKeyPointsToTheSectionThatHasIt) {
  EXPECT_NE(
      error_of("[shard]\nlr = 5")
          .find("shard.lr: unknown key; there is a key train.lr; [shard] takes"),
      std::string::npos
  );
}

TEST_F(ConfigTest, UnknownSectionNamesTheNearest) {
  EXPECT_EQ(
      error_of("[trian]\nsteps = 5"),
      "config: run.toml:1:2: trian: unknown section; "
      "the top of the file takes name, train, shard, optim, data; did you mean 'train'?"
  );
  EXPECT_NE(
      error_of("[optim.sgd]\nx = 1").find("optim.sgd: unknown section; [optim] takes adam"),
      std::string::npos
  );
}

TEST_F(ConfigTest, ReportsEveryProblemAtOnce) {
  const std::string text =
      error_of("[train]\nsteps = 0\nlr = 'fast'\n[shard]\nstrategy = 'zero2'", {"train.lmit=4"});
  EXPECT_EQ(text.substr(0, text.find('\n')), "config: 4 problems:");
  EXPECT_NE(
      text.find("run.toml:2:9: train.steps: found 0, expected an integer of at least 1"),
      std::string::npos
  ) << text;
  EXPECT_NE(
      text.find(
          "run.toml:3:6: train.lr: found the string 'fast', expected a number above 0 and at most 1"
      ),
      std::string::npos
  ) << text;
  EXPECT_NE(
      text.find("run.toml:5:12: shard.strategy: found \"zero2\", expected one of \"ddp\", "
                "\"zero3\"; did you mean 'zero3'?"),
      std::string::npos
  ) << text;
  EXPECT_NE(
      text.find("--set train.lmit=4: train.lmit: unknown key; [train] takes "), std::string::npos
  ) << text;
}

struct WrongValue {
  const char* line;
  const char* fragment;
};

std::ostream& operator<<(std::ostream& stream, const WrongValue& value) {
  return stream << value.line;
}

class ConfigWrongValueTest : public ConfigTest, public testing::WithParamInterface<WrongValue> {};

TEST_P(ConfigWrongValueTest, IsRejected) {
  const std::string text = error_of(GetParam().line);
  EXPECT_NE(text.find(GetParam().fragment), std::string::npos) << text;
}

INSTANTIATE_TEST_SUITE_P(
    All,
    ConfigWrongValueTest,
    testing::Values(
        WrongValue{
            "train.steps = 5.0", "found the number 5.0, expected an integer of at least 1; write 5"
        },
        WrongValue{"train.steps = 5.5", "found the number 5.5, expected an integer"},
        WrongValue{
            "train.steps = '5'", "expected an integer of at least 1; write the value without quotes"
        },
        WrongValue{"train.steps = true", "found true, expected an integer"},
        WrongValue{"train.steps = 3000000000", "found 3000000000, expected at most 2147483647"},
        WrongValue{
            "train.big = 99999999999999999999",
            "'99999999999999999999' is not representable in 64 bits"
        },
        WrongValue{"train.resume = 1", "found the integer 1, expected true or false"},
        WrongValue{"train.lr = nan", "found the number nan, expected a number"},
        WrongValue{"train.lr = inf", "found the number inf, expected a number"},
        WrongValue{"train.lr = 0", "found 0, expected a number above 0"},
        WrongValue{"train.lr = 1.5", "found 1.5, expected a number above 0 and at most 1"},
        WrongValue{"train.lr = 1979-05-27", "found the date or time 1979-05-27"},
        WrongValue{"train.lr = { a = 1 }", "found a table, expected a number"},
        WrongValue{"train.clip = 0", "train.clip: found 0, expected a number above 0"},
        WrongValue{"name = 5", "name: found the integer 5, expected a string"},
        WrongValue{"name = ['a']", "found the list [ 'a' ], expected a string"},
        WrongValue{"train = 5", "train: found the integer 5, expected a section [train]"},
        WrongValue{"[[train]]\nsteps = 5", "train: found the list"},
        WrongValue{
            "shard.shape = []", "found 0 items, expected a list of 1 to 3 integers, each at least 1"
        },
        WrongValue{"shard.shape = [1, 0]", "item 2 is 0, expected a list of 1 to 3 integers"},
        WrongValue{"shard.shape = [1, 2.5]", "expected a list of 1 to 3 integers"},
        WrongValue{
            "optim.adam.betas = [0.9]",
            "found 1 items, expected a list of 2 numbers, each at least 0 and at most 1"
        },
        WrongValue{"optim.adam.betas = [0.9, nan]", "expected a list of 2 numbers"},
        WrongValue{"data.plays = 'Hamlet'", "expected a list of strings"},
        WrongValue{
            "shard.layout = { \"a[0\" = 'flat' }",
            "shard.layout: glob: pattern 'a[0', column 2: '[' is never closed"
        },
        WrongValue{"shard.layout = { a = 1 }", "expected a table from patterns to strings"},
        WrongValue{"train.steps = 1\ntrain.steps = 2", "run.toml:2:"},
        WrongValue{"train.steps = ", "not valid TOML"},
        WrongValue{"name = \"\xff\xfe\"", "not valid TOML"},
        WrongValue{"", "run.toml: the file sets no key"},
        WrongValue{"# only a comment\n", "run.toml: the file sets no key"}
    )
);

TEST_F(ConfigTest, OverridesComeLastAndTheLastWins) {
  load("[train]\nsteps = 5", {"train.steps=6", "train.steps = 7"});
  EXPECT_EQ(options.steps, 7);
}

TEST_F(ConfigTest, OverridesTakeBareWordsAndLists) {
  schema.load_defaults(std::vector<std::string>{
      "name=123",
      "train.note=\"quoted = text\"",
      "train.resume=true",
      "shard.strategy=ddp",
      "shard.shape=7,8",
      "optim.adam.betas=[0.5, 0.6]",
      "data.plays=Hamlet, King Lear",
  });
  EXPECT_EQ(options.name, "123");
  EXPECT_EQ(options.note, "quoted = text");
  EXPECT_TRUE(options.resume);
  EXPECT_EQ(options.strategy, Strategy::kDdp);
  EXPECT_EQ(options.shape, (std::vector<std::int64_t>{7, 8}));
  EXPECT_EQ(options.betas, (std::vector<double>{0.5, 0.6}));
  EXPECT_EQ(options.plays, (std::vector<std::string>{"Hamlet", "King Lear"}));
}

TEST_F(ConfigTest, FileWithoutEndIsRefused) {
  try {
    schema.load_file("/dev/zero");
    ADD_FAILURE() << "read to its end";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("'/dev/zero' is no configuration"), std::string::npos)
        << error.what();
  }
}

TEST_F(ConfigTest, QuotedOverridesHoldAnyText) {
  const std::string odd = "a \"b\" \\c\n'd' \t";
  schema.load_defaults(std::vector<std::string>{"train.note=" + toml_quoted(odd)});
  EXPECT_EQ(options.note, odd);
}

TEST_F(ConfigTest, OverridesThatNoFileCouldHoldAreRefused) {
  for (const std::string value : {"\"a\"b\"", "'a'b'", "\xff"}) {
    try {
      schema.load_defaults(std::vector<std::string>{"train.note=" + value});
      ADD_FAILURE() << "taken: " << value;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("train.note: is not valid TOML"), std::string::npos)
          << error.what();
    }
  }
}

TEST_F(ConfigTest, OverrideOfASectionNamesAKeyOfIt) {
  try {
    schema.load_defaults(std::vector<std::string>{"train={steps = 3}"});
    ADD_FAILURE() << "taken";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(
        std::string(error.what()).find("train: is a section (expected one of its keys"),
        std::string::npos
    ) << error.what();
  }
}

TEST_F(ConfigTest, OverridesOfListsTakeTomlToo) {
  schema.load_defaults(std::vector<std::string>{"data.plays=[\"a, b\", \"c\"]", "shard.shape=3"});
  EXPECT_EQ(options.plays, (std::vector<std::string>{"a, b", "c"}));
  EXPECT_EQ(options.shape, (std::vector<std::int64_t>{3}));
  schema.load_defaults(std::vector<std::string>{"data.plays=[x, y]"});
  EXPECT_EQ(options.plays, (std::vector<std::string>{"x", "y"}));
}

TEST_F(ConfigTest, OverridesReplaceOrAppendRowsOfATable) {
  load(
      "[shard.layout]\n'a.*' = 'flat'\nb = 'flat'",
      {"shard.layout.\"a.*\"=owned", "shard.layout.c.**=flat", "optim.adam.lr_scale.head=0.5"}
  );
  EXPECT_EQ(
      options.layout, (PatternTable<std::string>{{"a.*", "owned"}, {"b", "flat"}, {"c.**", "flat"}})
  );
  EXPECT_EQ(options.lr_scale, (PatternTable<double>{{"head", 0.5}}));
}

TEST_F(ConfigTest, RejectsMalformedOverrides) {
  EXPECT_EQ(set_error("train.steps"), "config: --set train.steps: expected section.key=value");
  EXPECT_EQ(set_error("=5"), "config: --set =5: expected section.key=value");
  EXPECT_NE(
      set_error("train.steps=many")
          .find("--set train.steps=many: train.steps: found the string 'many'"),
      std::string::npos
  );
  EXPECT_NE(set_error("train.steps=").find("expected an integer"), std::string::npos);
  EXPECT_NE(
      set_error("trian.steps=5").find("trian.steps: unknown section; the top of the file takes"),
      std::string::npos
  );
  EXPECT_NE(set_error("train=5").find("train: is a section"), std::string::npos);
  EXPECT_NE(set_error("train.steps=5\ntrain.lr=1").find("expected an integer"), std::string::npos);
  EXPECT_NE(
      set_error("optim.adam.lr_scale.head=x").find("expected a table from patterns to numbers"),
      std::string::npos
  );
  EXPECT_NE(set_error("shard.layout.[=flat").find("'[' is never closed"), std::string::npos);
}

TEST_F(ConfigTest, RequiredKeysMustBeGiven) {
  std::string path;
  schema.section("data").bind("path", &path, {.doc = "Folder.", .required = true});
  EXPECT_EQ(error_of("name = 'x'"), "config: run.toml: data.path: missing; it needs a string");
  load("data.path = 'd'");
  EXPECT_EQ(path, "d");
  EXPECT_EQ(
      error_of("data.path = 5"),
      "config: run.toml:1:13: data.path: found the integer 5, expected a string"
  );
}

TEST_F(ConfigTest, ChecksAcrossKeysReportThePlaceOfTheirKey) {
  schema.add_check([this](ConfigProblems& problems) {
    if (options.steps % 2 != 0) {
      problems.add("train.steps", "must be even");
    }
    if (options.lr > 0.5) {
      problems.add("train.lr", "too large");
    }
  });
  EXPECT_EQ(
      error_of("[train]\nsteps = 5", {"train.lr=0.6"}),
      "config: 2 problems:\n  run.toml:2:9: train.steps: must be even\n"
      "  --set train.lr=0.6: train.lr: too large"
  );
  load("[train]\nsteps = 6");
  EXPECT_EQ(options.steps, 6);
}

TEST_F(ConfigTest, BindingMistakesAreOurBugs) {
  int other = 0;
  EXPECT_THROW(schema.section("train").bind("steps", &other, {}), InternalError);
  EXPECT_THROW(schema.section("train").bind("low", &other, {.min = 1}), InternalError);
  EXPECT_THROW(schema.section("").bind("train", &other, {}), InternalError);
  EXPECT_THROW(schema.section("train.steps"), InternalError);
  EXPECT_THROW(schema.is_given("train.stpes"), InternalError);
}

TEST_F(ConfigTest, HelpNamesKeysDefaultsRangesAndMeanings) {
  const std::string text = schema.describe();
  EXPECT_NE(
      text.find("[train]  Loop and schedule.\n  steps = 100\n      Optimizer steps to run. Takes "
                "an integer of at least 1.\n"),
      std::string::npos
  ) << text;
  EXPECT_NE(
      text.find("  strategy = \"zero3\"\n      Row of the strategy table. Takes one of \"ddp\", "
                "\"zero3\".\n"),
      std::string::npos
  ) << text;
  EXPECT_NE(text.find("  clip = unset\n"), std::string::npos) << text;
}

TEST_F(ConfigTest, MarkdownHasARowForEveryKey) {
  const std::string text = schema.describe_markdown();
  EXPECT_NE(text.find("## `[optim.adam]`\n\nAdamW.\n\n| key |"), std::string::npos) << text;
  EXPECT_NE(
      text.find("| `lr` | `0.001` | a number above 0 and at most 1 | Peak learning rate. |\n"),
      std::string::npos
  ) << text;
  EXPECT_NE(text.find("| `limit` | unset |"), std::string::npos) << text;
}

class ConfigFileTest : public ConfigTest {
 protected:
  ConfigFileTest()
      : folder_(
            std::filesystem::path(testing::TempDir()) / ("config_" + std::to_string(getpid()))
        ) {
    std::filesystem::create_directories(folder_);
  }
  ~ConfigFileTest() override { std::filesystem::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name) << text;
    return (folder_ / name).string();
  }

  std::string io_error_of(const std::string& path) {
    try {
      schema.load_file(path);
    } catch (const IoError& error) {
      return error.what_brief();
    }
    ADD_FAILURE() << "read " << path;
    return "";
  }

  std::filesystem::path folder_;
};

TEST_F(ConfigFileTest, ReadsAFileAndNamesItInErrors) {
  const std::string path = write("run.toml", "[train]\nsteps = 9\n");
  schema.load_file(path, std::vector<std::string>{"train.lr=0.25"});
  EXPECT_EQ(options.steps, 9);
  EXPECT_EQ(options.lr, 0.25);
  EXPECT_EQ(schema.where("train.steps"), path + ":2:9");
}

TEST_F(ConfigFileTest, MissingFileNamesTheNearestOne) {
  write("gpt_small.toml", "name = 'x'");
  const std::string text = io_error_of((folder_ / "gpt_smal.toml").string());
  EXPECT_NE(text.find("No such file or directory (errno 2)"), std::string::npos) << text;
  EXPECT_NE(text.find("hint: did you mean 'gpt_small.toml'?"), std::string::npos) << text;
}

TEST_F(ConfigFileTest, FolderIsNotAFile) {
  EXPECT_NE(io_error_of(folder_.string()).find("is a folder, not a file"), std::string::npos);
}

}  // namespace
}  // namespace hypershard
