// The writer and the table of dtypes; see safetensors.h.
#include <array>
#include <bit>
#include <cstring>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "hypershard/checkpoint/internal/files.h"
#include "hypershard/checkpoint/internal/safetensors_format.h"
#include "hypershard/checkpoint/safetensors.h"
#include "hypershard/core/error.h"

namespace hypershard::checkpoint {

namespace {

// Data begins on a cache line.
constexpr std::size_t kAlignment = 64;

struct DtypeName {
  c10::ScalarType dtype;
  const char* name;
};

constexpr std::array kDtypes = {
    DtypeName{c10::ScalarType::Double, "F64"},
    DtypeName{c10::ScalarType::Float, "F32"},
    DtypeName{c10::ScalarType::Half, "F16"},
    DtypeName{c10::ScalarType::BFloat16, "BF16"},
    DtypeName{c10::ScalarType::Long, "I64"},
    DtypeName{c10::ScalarType::Int, "I32"},
    DtypeName{c10::ScalarType::Short, "I16"},
    DtypeName{c10::ScalarType::Char, "I8"},
    DtypeName{c10::ScalarType::Byte, "U8"},
    DtypeName{c10::ScalarType::Bool, "BOOL"},
    DtypeName{c10::ScalarType::UInt16, "U16"},
    DtypeName{c10::ScalarType::UInt32, "U32"},
    DtypeName{c10::ScalarType::UInt64, "U64"},
    DtypeName{c10::ScalarType::Float8_e4m3fn, "F8_E4M3"},
    DtypeName{c10::ScalarType::Float8_e5m2, "F8_E5M2"},
    DtypeName{c10::ScalarType::Float8_e8m0fnu, "F8_E8M0"},
};

std::uint64_t bytes_of(const std::string& path, const SafetensorsEntry& entry) {
  std::uint64_t bytes = c10::elementSize(entry.dtype);
  for (const std::int64_t size : entry.shape) {
    HS_CHECK_GE(size, 0, "checkpoint: ", path, ": entry '", entry.name, "' of shape ", entry.shape);
    bytes *= static_cast<std::uint64_t>(size);
  }
  return bytes;
}

// Gives the entries their places and returns the header, padded so that data begins aligned.
std::string make_header(
    const std::string& path,
    std::vector<SafetensorsEntry>& entries,
    const std::map<std::string, std::string>& metadata
) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) {
    header[internal::kMetadataKey] = metadata;
  }
  std::set<std::string> names;
  std::uint64_t end = 0;
  for (SafetensorsEntry& entry : entries) {
    HS_CHECK(
        entry.name != internal::kMetadataKey && names.insert(entry.name).second,
        "checkpoint: ",
        path,
        ": entry name '",
        entry.name,
        "' is reserved or there twice"
    );
    entry.begin = end;
    entry.size_bytes = bytes_of(path, entry);
    end += entry.size_bytes;
    header[entry.name] = {
        {"dtype", safetensors_dtype(entry.dtype)},
        {"shape", entry.shape},
        {"data_offsets", {entry.begin, end}},
    };
  }
  std::string text = header.dump();
  const std::size_t ragged = (sizeof(std::uint64_t) + text.size()) % kAlignment;
  text.append(ragged == 0 ? 0 : kAlignment - ragged, ' ');
  HS_CHECK_LE(text.size(), internal::kMaxHeaderBytes, "checkpoint: ", path, ": the header's bytes");
  return text;
}

}  // namespace

std::string safetensors_dtype(c10::ScalarType dtype) {
  for (const DtypeName& known : kDtypes) {
    if (known.dtype == dtype) {
      return known.name;
    }
  }
  HS_FAIL(
      Unsupported,
      "checkpoint: safetensors has no name for dtype ",
      c10::toString(dtype),
      "; it knows ",
      internal::dtype_names()
  );
}

namespace internal {

std::optional<c10::ScalarType> find_dtype(std::string_view name) {
  for (const DtypeName& known : kDtypes) {
    if (known.name == name) {
      return known.dtype;
    }
  }
  return std::nullopt;
}

std::vector<std::string> dtype_names() {
  std::vector<std::string> names;
  for (const DtypeName& known : kDtypes) {
    names.emplace_back(known.name);
  }
  return names;
}

}  // namespace internal

SafetensorsWriter::SafetensorsWriter(
    const std::string& path,
    std::vector<SafetensorsEntry> entries,
    const std::map<std::string, std::string>& metadata
) {
  const std::string header = make_header(path, entries, metadata);
  for (const SafetensorsEntry& entry : entries) {
    left_bytes_ += entry.size_bytes;
  }
  file_ = std::make_unique<internal::OutputFile>(path);
  const std::uint64_t length = header.size();
  file_->write(std::as_bytes(std::span(&length, 1)));
  file_->write(header);
}

SafetensorsWriter::~SafetensorsWriter() = default;

void SafetensorsWriter::write(std::span<const std::byte> data) {
  HS_CHECK_LE(
      data.size(), left_bytes_, "checkpoint: ", file_->path(), ": more data than its entries have"
  );
  left_bytes_ -= data.size();
  file_->write(data);
}

WrittenFile SafetensorsWriter::finish() {
  HS_CHECK_EQ(left_bytes_, 0U, "checkpoint: ", file_->path(), ": bytes of its entries are missing");
  file_->finish();
  return {.size_bytes = file_->size_bytes(), .checksum = file_->checksum()};
}

}  // namespace hypershard::checkpoint
