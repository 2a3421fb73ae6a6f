// The format by hand-made files: what is right is read, and each kind of wrong is named.
#include "hypershard/checkpoint/safetensors.h"

#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "hypershard/checkpoint/internal/checksum.h"
#include "hypershard/checkpoint/scratch_folder.h"
#include "hypershard/core/error.h"

namespace hypershard::checkpoint {
namespace {

using test::content_of;
using test::expect_part;
using test::put;
using test::ScratchFolder;
using test::thrown_text;

std::string file_of(const std::string& header, std::size_t data_bytes) {
  const std::uint64_t length = header.size();
  std::string text(sizeof(length), '\0');
  std::memcpy(text.data(), &length, sizeof(length));
  return text + header + std::string(data_bytes, 'x');
}

class SafetensorsTest : public ::testing::Test {
 protected:
  std::string refusal(const std::string& content) {
    const std::string path = put(folder_ / "bad.safetensors", content);
    const std::string text = thrown_text<IoError>([&] { SafetensorsFile file(path); });
    expect_part(text, path);
    return text;
  }
  std::string header_refusal(const std::string& header, std::size_t data_bytes = 8) {
    return refusal(file_of(header, data_bytes));
  }
  ScratchFolder folder_;
};

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

TEST_F(SafetensorsTest, WhatIsWrittenIsRead) {
  const std::vector<double> doubles = {1.5, -2, 3};
  const std::vector<float> floats = {0.25F, 4, 5, 6};
  const std::string path = folder_ / "a.safetensors";
  SafetensorsWriter writer(
      path,
      {{.name = "d", .dtype = c10::ScalarType::Double, .shape = {3}},
       {.name = "none", .dtype = c10::ScalarType::Double, .shape = {0, 4}},
       {.name = "f", .dtype = c10::ScalarType::Float, .shape = {2, 2}},
       {.name = "scalar", .dtype = c10::ScalarType::BFloat16, .shape = {}}},
      {{"format", "pt"}, {"shape:f", "[4, 2]"}}
  );
  writer.write(bytes_of(doubles));
  writer.write(bytes_of(floats).first(5));  // pieces need not be entries
  writer.write(bytes_of(floats).subspan(5));
  writer.write(bytes_of(std::vector<char>{0x40, 0x41}));
  const WrittenFile written = writer.finish();
  EXPECT_EQ(written.size_bytes, content_of(path).size());
  EXPECT_EQ(written.checksum, internal::checksum_of(content_of(path)));

  const SafetensorsFile file(path);
  EXPECT_EQ(file.metadata().at("shape:f"), "[4, 2]");
  ASSERT_EQ(file.entries().size(), 4);
  const SafetensorsEntry* d = file.find("d");
  ASSERT_NE(d, nullptr);
  EXPECT_EQ(d->dtype, c10::ScalarType::Double);
  EXPECT_EQ(d->shape, std::vector<std::int64_t>{3});
  EXPECT_EQ(std::memcmp(file.data(*d).data(), doubles.data(), 24), 0);
  EXPECT_EQ(std::memcmp(file.data(*file.find("f")).data(), floats.data(), 16), 0);
  EXPECT_EQ(file.find("none")->size_bytes, 0);
  EXPECT_EQ(file.find("scalar")->shape.size(), 0);
  EXPECT_EQ(file.find("g"), nullptr);
  const auto offset = file.data(*d).data() - file.bytes().data();
  EXPECT_EQ(offset % 64, 0);
}

// The layout of the bytes is the format's, not only our reader's idea of it.
TEST_F(SafetensorsTest, BytesAreTheFormats) {
  const std::string path = folder_ / "b.safetensors";
  SafetensorsWriter writer(path, {{.name = "x", .dtype = c10::ScalarType::Short, .shape = {2}}});
  writer.write(bytes_of(std::vector<std::int16_t>{1, 258}));
  writer.finish();
  const std::string text = content_of(path);
  std::uint64_t length = 0;
  std::memcpy(&length, text.data(), 8);
  ASSERT_EQ(8 + length + 4, text.size());
  EXPECT_EQ(
      nlohmann::json::parse(text.substr(8, length)),
      nlohmann::json::parse(R"({"x": {"dtype": "I16", "shape": [2], "data_offsets": [0, 4]}})")
  );
  EXPECT_EQ(text.substr(8 + length), std::string("\1\0\2\1", 4));
}

TEST_F(SafetensorsTest, FileWithoutEntriesIsRead) {
  const SafetensorsFile file(put(folder_ / "none.safetensors", file_of("{}", 0)));
  EXPECT_TRUE(file.entries().empty());
}

TEST_F(SafetensorsTest, EntriesMayBeListedInAnyOrder) {
  const SafetensorsFile file(
      put(folder_ / "c.safetensors",
          file_of(
              R"({"late":{"dtype":"U8","shape":[3],"data_offsets":[5,8]},)"
              R"("early":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}}  )",
              8
          ))
  );
  EXPECT_EQ(file.entries()[0].name, "early");
  EXPECT_EQ(file.data(*file.find("late")).size(), 3);
}

TEST_F(SafetensorsTest, ShortFilesAndHugeHeadersAreRefused) {
  expect_part(refusal(""), "0 bytes long");
  expect_part(refusal("1234567"), "7 bytes long");
  std::string huge(8, '\xff');
  expect_part(refusal(huge + "{}"), "claims a header of 18446744073709551615 bytes");
  huge.assign("\3\0\0\0\0\0\0\0{}", 10);
  expect_part(refusal(huge), "claims a header of 3 bytes; expected at most 2");
  expect_part(refusal(std::string(8, '\0')), "does not begin with '{'");
}

TEST_F(SafetensorsTest, MalformedJsonIsRefused) {
  expect_part(header_refusal("{\"a\": "), "is no JSON");
  expect_part(header_refusal(" {}"), "does not begin with '{'");
  expect_part(header_refusal("{\"a\": 3}"), "entry 'a' is no JSON object");
  expect_part(header_refusal("{\"a\": [3]}"), "entry 'a' is no JSON object");
  expect_part(header_refusal("{\"a\": {\"shape\": {\"b\": 1}}}"), "nested too deeply");
  expect_part(header_refusal("{\"a\": {\"shape\": [[1]]}}"), "nested too deeply");
  expect_part(header_refusal("{\"\xff\": {}}"), "is no JSON");
  expect_part(header_refusal("{\"__metadata__\": {\"a\": 1}}"), "metadata 'a' is no string");
  const std::string deep(100'000, '[');
  expect_part(header_refusal("{\"a\": {\"b\": " + deep), "nested too deeply");
}

TEST_F(SafetensorsTest, WrongEntriesAreRefusedByName) {
  const auto entry = [&](const std::string& dtype, const std::string& shape, const std::string& at
                     ) {
    return header_refusal(
        "{\"e\": {\"dtype\": " + dtype + ", \"shape\": " + shape + ", \"data_offsets\": " + at +
        "}}"
    );
  };
  expect_part(
      entry("\"F31\"", "[2]", "[0, 8]"), "entry 'e' has dtype \"F31\"; known are [F64, F32"
  );
  expect_part(entry("7", "[2]", "[0, 8]"), "has dtype 7");
  expect_part(entry("\"F32\"", "[3]", "[0, 8]"), "has 8 bytes of data; expected 12");
  expect_part(entry("\"F32\"", "[2, -1]", "[0, 8]"), "expected a list of sizes");
  expect_part(entry("\"F32\"", "[2.0]", "[0, 8]"), "expected a list of sizes");
  expect_part(entry("\"F32\"", "2", "[0, 8]"), "expected a list of sizes");
  expect_part(entry("\"F32\"", "[2]", "[8, 0]"), "has data_offsets [8, 0]");
  expect_part(entry("\"F32\"", "[2]", "[0, 9]"), "within the 8 bytes of data");
  expect_part(entry("\"F32\"", "[2]", "[0, 4, 8]"), "has data_offsets [0, 4, 8]");
  expect_part(
      entry("\"F32\"", "[4611686018427387904, 4611686018427387904]", "[0, 8]"), "beyond any memory"
  );
  expect_part(entry("\"F32\"", "[99999999999999999999]", "[0, 8]"), "expected a list of sizes");
  expect_part(entry("\"F32\"", "[2]", "[0, 8], \"more\": 1"), "has 4 fields");
  expect_part(header_refusal("{\"e\": {\"dtype\": \"F32\", \"shape\": [2]}}"), "no data_offsets");
  expect_part(entry("\"F32\"", "[2]", "[0, 8], \"shape\": [2]"), "field 'shape' is there twice");
}

TEST_F(SafetensorsTest, OverlapsGapsTrailingBytesAndDuplicatesAreRefused) {
  const auto two = [&](const std::string& second, const std::string& at) {
    return header_refusal(
        R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},")" + second +
        R"(":{"dtype":"U8","shape":[4],"data_offsets":)" + at + "}}"
    );
  };
  expect_part(two("b", "[2,6]"), "entry 'b' begins at byte 2 of the data, inside the entry");
  expect_part(two("b", "[0,4]"), "inside the entry before it");
  expect_part(
      header_refusal(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})"), "behind a gap"
  );
  expect_part(
      header_refusal(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})"),
      "has 4 bytes behind its last entry"
  );
  expect_part(two("a", "[4,8]"), "entry 'a' is there twice");
}

TEST_F(SafetensorsTest, FilesThatCannotBeReadAreNamed) {
  const std::string missing = folder_ / "missing.safetensors";
  expect_part(thrown_text<IoError>([&] { SafetensorsFile file(missing); }), "No such file");
  expect_part(
      thrown_text<IoError>([&] { SafetensorsFile file(folder_.path()); }), "not a regular file"
  );
}

TEST_F(SafetensorsTest, WriterRefusesWhatNoReaderWouldTake) {
  const SafetensorsEntry entry{.name = "a", .dtype = c10::ScalarType::Byte, .shape = {2}};
  const std::string path = folder_ / "w.safetensors";
  expect_part(
      thrown_text<InvalidArgument>([&] { SafetensorsWriter writer(path, {entry, entry}); }),
      "entry name 'a'"
  );
  SafetensorsEntry reserved = entry;
  reserved.name = "__metadata__";
  expect_part(
      thrown_text<InvalidArgument>([&] { SafetensorsWriter writer(path, {reserved}); }), "reserved"
  );
  SafetensorsWriter writer(path, {entry});
  expect_part(
      thrown_text<InvalidArgument>([&] { writer.write(bytes_of(std::vector<char>(3))); }),
      "more data"
  );
  writer.write(bytes_of(std::vector<char>(1)));
  expect_part(thrown_text<InvalidArgument>([&] { writer.finish(); }), "are missing");
  EXPECT_THROW(SafetensorsFile file(path), IoError);
  expect_part(
      thrown_text<IoError>([&] {
        SafetensorsWriter nowhere(folder_ / "no/such/folder.safetensors", {entry});
      }),
      "cannot be created"
  );
}

TEST_F(SafetensorsTest, DtypesKeepTheirNames) {
  EXPECT_EQ(safetensors_dtype(c10::ScalarType::Half), "F16");
  EXPECT_EQ(safetensors_dtype(c10::ScalarType::Bool), "BOOL");
  expect_part(
      thrown_text<Unsupported>([] { safetensors_dtype(c10::ScalarType::ComplexDouble); }),
      "ComplexDouble"
  );
}

// Every byte of a header changed in every bit: an error or a sound file, never a fault.
TEST_F(SafetensorsTest, MutatedHeadersAreReadOrRefused) {
  const std::string good = file_of(
      R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}})", 8
  );
  int refused = 0;
  for (std::size_t bit = 0; bit < (good.size() - 8) * 8; ++bit) {
    std::string other = good;
    other[bit / 8] = static_cast<char>(other[bit / 8] ^ (1 << (bit % 8)));
    const std::string path = put(folder_ / "m.safetensors", other);
    try {
      const SafetensorsFile file(path);
      for (const SafetensorsEntry& entry : file.entries()) {
        EXPECT_EQ(file.data(entry).size(), entry.size_bytes);
      }
    } catch (const IoError& error) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 400);
}

}  // namespace
}  // namespace hypershard::checkpoint
