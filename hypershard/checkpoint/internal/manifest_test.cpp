// A manifest survives the way through its text, and no damage to the text survives the reader.
#include "hypershard/checkpoint/internal/manifest.h"

#include <functional>
#include <string>

#include <gtest/gtest.h>

#include "hypershard/checkpoint/internal/checksum.h"
#include "hypershard/checkpoint/scratch_folder.h"
#include "hypershard/core/error.h"

namespace hypershard::checkpoint::internal {
namespace {

using test::expect_part;
using test::thrown_text;

Manifest example() {
  Manifest manifest;
  manifest.state = {
      .step = 12, .seed = 0xffff'ffff'ffff'ffffULL, .config_toml = "[run]\nname = \"é\"\n"
  };
  manifest.library_version = "0.1.0";
  manifest.world_size = 4;
  manifest.axes = {{"replicate", 2}, {"shard", 2}};
  manifest.strategy = "hsdp";
  manifest.layouts = {{"update", "replicate: Replicate, shard: Flat"}};
  manifest.parameters = {
      {.name = "a.weight",
       .aliases = {"b.weight"},
       .shape = {2, 3},
       .dtype = c10::ScalarType::Double,
       .steps = 5,
       .state = {"exp_avg"}},
      {.name = "empty", .aliases = {}, .shape = {0, 7}},
  };
  manifest.optimizer = SavedOptimizer{.kind = "adamw", .steps = 12};
  manifest.files = {
      {.file = "weights-00000.safetensors",
       .holds = Holds::kWeights,
       .rank = 0,
       .size_bytes = 99,
       .checksum = "xxh64:0000000000000001"},
      {.file = "optimizer-00003.safetensors",
       .holds = Holds::kOptimizer,
       .rank = 3,
       .size_bytes = 1,
       .checksum = "xxh64:0000000000000002"},
  };
  return manifest;
}

// Makes a change that the checksum covers, as a wrong writer could.
std::string with(Manifest manifest, const std::function<void(Manifest&)>& change) {
  change(manifest);
  return write_manifest(manifest);
}

TEST(ManifestTest, TextGivesTheSameManifestBack) {
  const Manifest manifest = example();
  const std::string text = write_manifest(manifest);
  const Manifest read = parse_manifest(text, "m.json");
  EXPECT_EQ(write_manifest(read), text);
  EXPECT_EQ(read.state.seed, manifest.state.seed);
  EXPECT_EQ(read.state.config_toml, manifest.state.config_toml);
  EXPECT_EQ(read.parameters[0].shape, manifest.parameters[0].shape);
  EXPECT_EQ(read.parameters[0].dtype, c10::ScalarType::Double);
  EXPECT_EQ(read.parameters[0].steps, 5);
  EXPECT_EQ(read.parameters[1].numel(), 0);
  EXPECT_EQ(read.optimizer->kind, "adamw");
  EXPECT_EQ(read.files[1].holds, Holds::kOptimizer);
}

TEST(ManifestTest, EveryAlteredByteIsNoticed) {
  const std::string text = write_manifest(example());
  for (std::size_t at = 0; at < text.size(); ++at) {
    std::string other = text;
    other[at] = static_cast<char>(other[at] ^ 0x01);
    // White space may change; whatever means something may not.
    try {
      EXPECT_EQ(write_manifest(parse_manifest(other, "m.json")), text) << at;
    } catch (const IoError& error) {
      expect_part(error.what(), "m.json");
    }
  }
}

TEST(ManifestTest, EveryTruncationIsNoticed) {
  const std::string text = write_manifest(example());
  for (std::size_t size = 0; size + 2 < text.size(); ++size) {
    EXPECT_THROW(parse_manifest(text.substr(0, size), "m.json"), IoError) << size;
  }
}

TEST(ManifestTest, FileNamesThatPointElsewhereAreRefused) {
  for (const std::string file :
       {"../weights-00000.safetensors",
        "/etc/passwd",
        "weights-0.safetensors",
        "",
        "optimizer-00000.safetensors"}) {
    const std::string text = with(example(), [&](Manifest& m) { m.files[0].file = file; });
    expect_part(
        thrown_text<IoError>([&] { parse_manifest(text, "m.json"); }), "names a file '" + file + "'"
    );
  }
}

TEST(ManifestTest, ImpossibleValuesAreRefused) {
  const auto refusal = [](const std::function<void(Manifest&)>& change) {
    const std::string text = with(example(), change);
    return thrown_text<IoError>([&] { parse_manifest(text, "m.json"); });
  };
  expect_part(refusal([](Manifest& m) { m.parameters[0].shape = {-1}; }), "has shape [-1]");
  expect_part(
      refusal([](Manifest& m) { m.parameters[0].shape = {1LL << 40, 1LL << 40}; }), "'a.weight'"
  );
  expect_part(refusal([](Manifest& m) { m.parameters[1].name = "b.weight"; }), "twice");
  expect_part(refusal([](Manifest& m) { m.files[1] = m.files[0]; }), "twice");
  expect_part(refusal([](Manifest& m) { m.parameters[0].steps = -3; }), "-3 optimizer steps");
}

TEST(ManifestTest, OtherVersionsAndFilesAreRefused) {
  expect_part(
      thrown_text<IoError>([] { parse_manifest("{\"a\": 1}", "m.json"); }), "is no manifest"
  );
  expect_part(thrown_text<IoError>([] { parse_manifest("", "m.json"); }), "0 bytes");
  expect_part(
      thrown_text<IoError>([] {
        parse_manifest("{\"format\": \"hypershard.checkpoint\", \"version\": 7}", "m.json");
      }),
      "version 7; this build reads 1"
  );
}

}  // namespace
}  // namespace hypershard::checkpoint::internal
