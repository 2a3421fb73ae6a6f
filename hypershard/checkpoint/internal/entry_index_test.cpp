// Entries that are parts of a tensor: their names, reading across other cuts, and what damage is
// noticed.
#include "hypershard/checkpoint/internal/entry_index.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "hypershard/checkpoint/scratch_folder.h"
#include "hypershard/core/error.h"

namespace hypershard::checkpoint::internal {
namespace {

using test::expect_part;
using test::ScratchFolder;
using test::thrown_text;

/// A checkpoint of one parameter `w` of shape [4, 6] whose element i has value i.
struct OneTensor {
  explicit OneTensor(const std::vector<std::pair<std::string, std::vector<std::int64_t>>>& entries
  ) {
    std::vector<SafetensorsEntry> list;
    std::vector<at::Tensor> values;
    for (const auto& [name, shape] : entries) {
      const EntryName parsed = parse_entry_name(name);
      layout::Block block = layout::whole_block({4, 6});
      at::Tensor part = at::arange(24, at::kDouble).view({4, 6});
      for (std::size_t dim = 0; dim < parsed.ranges.size(); ++dim) {
        const layout::Range& range = parsed.ranges[dim];
        const std::int64_t end = std::min(range.end, block.shape[dim]);
        part = part.slice(static_cast<std::int64_t>(dim), range.begin, end);
      }
      part = part.reshape({-1});
      if (parsed.range.numel() > 0) {
        part = part.slice(0, parsed.range.begin, parsed.range.end);
      }
      values.push_back(part.contiguous());
      list.push_back({.name = name, .dtype = at::kDouble, .shape = shape});
    }
    SafetensorsWriter writer(folder / file_name(Holds::kWeights, 0), list, {});
    for (const at::Tensor& part : values) {
      writer.write(
          {static_cast<const std::byte*>(part.const_data_ptr()),
           static_cast<std::size_t>(part.numel() * 8)}
      );
    }
    manifest.parameters = {{.name = "w", .shape = {4, 6}, .dtype = at::kDouble}};
    manifest.files = {{.file = file_name(Holds::kWeights, 0), .holds = Holds::kWeights}};
    manifest.files.front().size_bytes = writer.finish().size_bytes;
  }
  std::string refusal() const {
    return thrown_text<IoError>([&] { EntryIndex(folder.path(), manifest, Holds::kWeights); });
  }
  ScratchFolder folder;
  Manifest manifest;
};

TEST(EntryNameTest, NamesOfBlocksAndRangesAreReadBack) {
  const layout::Block whole = layout::whole_block({4, 6});
  const layout::Block part{{4, 6}, {{0, 4}, {2, 6}}};
  EXPECT_EQ(entry_name("a.w", whole, {0, 24}), "a.w");
  EXPECT_EQ(entry_name("a.w", whole, {3, 24}), "a.w@3:24");
  EXPECT_EQ(entry_name("a.w", part, {0, 16}), "a.w[0:4,2:6]");
  EXPECT_EQ(entry_name("a.w", part, {1, 2}), "a.w[0:4,2:6]@1:2");
  const EntryName name = parse_entry_name("a.w[0:4,2:6]@1:2");
  EXPECT_EQ(name.key, "a.w");
  EXPECT_EQ(name.ranges, part.ranges);
  EXPECT_EQ(name.range, (layout::Range{1, 2}));
  for (const char* plain :
       {"w", "w[", "w[]", "w[1]", "w[2:1]", "w[1:2", "w@", "w@2:2", "w[0:1,]"}) {
    EXPECT_EQ(parse_entry_name(plain).key, plain);
  }
}

TEST(EntryIndexTest, AnyPartIsReadFromAnyCut) {
  const OneTensor saved({{"w[0:4,0:2]@0:3", {3}}, {"w[0:4,0:2]@3:8", {5}}, {"w[0:4,2:6]", {4, 4}}});
  const EntryIndex index(saved.folder.path(), saved.manifest, Holds::kWeights);
  const at::Tensor whole = at::arange(24, at::kDouble).view({4, 6});
  EXPECT_TRUE(at::equal(index.read_whole("w"), whole));
  for (std::int64_t row = 0; row < 4; ++row) {
    for (std::int64_t column = 0; column < 6; ++column) {
      const layout::Block block{{4, 6}, {{row, 4}, {column, 6}}};
      const std::int64_t numel = block.numel();
      const at::Tensor expected = whole.slice(0, row).slice(1, column).reshape({-1});
      for (const auto dtype : {at::kDouble, at::kFloat}) {
        const at::Tensor found = at::empty({numel - numel / 3}, dtype);
        index.read("w", block, {numel / 3, numel}, found);
        EXPECT_TRUE(at::equal(found, expected.slice(0, numel / 3).to(dtype)));
      }
    }
  }
}

TEST(EntryIndexTest, PartsThatOverlapOrLeaveGapsAreNoticed) {
  expect_part(
      OneTensor({{"w[0:4,0:2]", {4, 2}}, {"w[0:4,1:6]", {4, 5}}}).refusal(),
      "w: the parts [0:4,0:2] and [0:4,1:6] overlap"
  );
  expect_part(
      OneTensor({{"w[0:4,0:2]", {4, 2}}, {"w[0:4,3:6]", {4, 3}}}).refusal(),
      "w: its parts hold 20 of 24 elements"
  );
  expect_part(
      OneTensor({{"w[0:4,0:2]@0:3", {3}}, {"w[0:4,0:2]@4:8", {4}}, {"w[0:4,2:6]", {4, 4}}}
      ).refusal(),
      "w[0:4,0:2]: element 3 of 8 is in no entry, or one before it in two"
  );
  expect_part(
      OneTensor({{"w[0:4,0:2]@0:8", {8}}, {"w[0:4,2:6]", {4, 4}}}).refusal(), "(expected F64 [4, 2]"
  );
  expect_part(OneTensor({{"w[0:4,0:7]", {4, 6}}}).refusal(), "is outside of shape [4, 6]");
  expect_part(OneTensor({{"w[0:4]", {4, 6}}}).refusal(), "is outside of shape [4, 6]");
  expect_part(OneTensor({{"v[0:4,0:6]", {4, 6}}}).refusal(), "unexpected v[0:4,0:6]");
}

}  // namespace
}  // namespace hypershard::checkpoint::internal
