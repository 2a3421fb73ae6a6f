// The reader; see safetensors.h. The header is parsed entry by entry, so that a hostile one cannot
// make a tree many times its size.
#include "hypershard/checkpoint/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "hypershard/checkpoint/internal/files.h"
#include "hypershard/checkpoint/internal/safetensors_format.h"
#include "hypershard/core/error.h"

namespace hypershard::checkpoint {

namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

using Json = nlohmann::json;

template <class... Parts>
[[noreturn]] void broken(const std::string& path, const Parts&... parts) {
  HS_FAIL(IoError, "checkpoint: ", path, ": ", parts...);
}

// Multiplies sizes; nothing if the product does not fit.
bool multiply(std::uint64_t& product, std::uint64_t factor) {
  return !__builtin_mul_overflow(product, factor, &product);
}

// Turns the header's events into entries.
class HeaderParser {
 public:
  HeaderParser(
      const std::string& path,
      std::uint64_t data_bytes,
      std::vector<SafetensorsEntry>& entries,
      std::map<std::string, std::string>& metadata
  )
      : path_(path), data_bytes_(data_bytes), entries_(entries), metadata_(metadata) {}

  // Depth counts the brackets around the event: 0 the header, 1 an entry, 2 a field, 3 a number.
  bool on_event(int depth, Json::parse_event_t event, Json& value) {
    using Event = Json::parse_event_t;
    const bool opens = event == Event::object_start || event == Event::array_start;
    if (opens && depth > (event == Event::array_start ? 2 : 1)) {
      broken(path_, "the header is nested too deeply at entry '", name_, "'");
    }
    if (depth == 0 && (event == Event::array_start || event == Event::value)) {
      broken(path_, "the header is no JSON object");
    }
    if (event == Event::key) {
      on_key(depth, value.get_ref<const std::string&>());
    } else if (depth == 1 && (event == Event::array_start || event == Event::value)) {
      broken(path_, "entry '", name_, "' is no JSON object");
    } else if (depth == 1 && event == Event::object_end) {
      name_ == internal::kMetadataKey ? add_metadata(value) : add_entry(value);
      return false;  // drops what was read
    }
    return true;
  }

 private:
  void on_key(int depth, const std::string& key) {
    if (depth == 1) {
      name_ = key;
      fields_.clear();
    }
    if (!(depth == 1 ? names_ : fields_).insert(key).second) {
      broken(path_, depth == 1 ? "entry '" : "field '", key, "' is there twice");
    }
  }

  void add_metadata(const Json& value) {
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string()) {
        broken(path_, "metadata '", key, "' is no string");
      }
      metadata_[key] = text.get<std::string>();
    }
  }

  void add_entry(const Json& value) {
    SafetensorsEntry entry{.name = name_};
    const Json& dtype = field(value, "dtype");
    const auto known = dtype.is_string() ? internal::find_dtype(dtype.get_ref<const std::string&>())
                                         : std::optional<c10::ScalarType>();
    if (!known) {
      broken(
          path_,
          "entry '",
          name_,
          "' has dtype ",
          dtype.dump(),
          "; known are ",
          internal::dtype_names()
      );
    }
    entry.dtype = *known;
    const Json& shape = field(value, "shape");
    const Json& offsets = field(value, "data_offsets");
    if (value.size() != 3) {
      broken(
          path_,
          "entry '",
          name_,
          "' has ",
          value.size(),
          " fields; expected dtype, shape, data_offsets"
      );
    }
    const std::vector<std::uint64_t> sizes = numbers(shape, "shape");
    const std::vector<std::uint64_t> range = numbers(offsets, "data_offsets");
    if (range.size() != 2 || range[0] > range[1] || range[1] > data_bytes_) {
      broken(
          path_,
          "entry '",
          name_,
          "' has data_offsets ",
          range,
          "; expected a begin and an end within the ",
          data_bytes_,
          " bytes of data"
      );
    }
    entry.begin = range[0];
    entry.size_bytes = range[1] - range[0];
    check_size(entry, sizes);
    entry.shape.assign(sizes.begin(), sizes.end());
    entries_.push_back(std::move(entry));
  }

  const Json& field(const Json& value, const char* name) const {
    const auto found = value.find(name);
    if (found == value.end()) {
      broken(path_, "entry '", name_, "' has no ", name);
    }
    return *found;
  }

  std::vector<std::uint64_t> numbers(const Json& value, const char* what) const {
    std::vector<std::uint64_t> result;
    bool good = value.is_array();
    for (const Json& item : value) {
      good = good && item.is_number_unsigned() &&
             item.get<std::uint64_t>() <=
                 static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
      if (good) {
        result.push_back(item.get<std::uint64_t>());
      }
    }
    if (!good) {
      broken(
          path_,
          "entry '",
          name_,
          "' has ",
          what,
          " ",
          value.dump().substr(0, 80),
          "; expected a list of sizes"
      );
    }
    return result;
  }

  void check_size(const SafetensorsEntry& entry, const std::vector<std::uint64_t>& sizes) const {
    std::uint64_t needed = c10::elementSize(entry.dtype);
    bool fits = true;
    if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {
      needed = 0;
    } else {
      for (const std::uint64_t size : sizes) {
        fits = fits && multiply(needed, size);
      }
    }
    if (!fits || needed != entry.size_bytes) {
      broken(
          path_,
          "entry '",
          name_,
          "' of shape ",
          sizes,
          " and ",
          c10::elementSize(entry.dtype),
          " bytes an element has ",
          entry.size_bytes,
          " bytes of data",
          fits ? concat_text("; expected ", needed)
               : std::string("; the shape is beyond any memory")
      );
    }
  }

  const std::string& path_;
  std::uint64_t data_bytes_;
  std::vector<SafetensorsEntry>& entries_;
  std::map<std::string, std::string>& metadata_;
  std::string name_;
  std::set<std::string> names_;
  std::set<std::string> fields_;
};

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path)
    : file_(std::make_unique<internal::MappedFile>(path)) {
  const std::span<const std::byte> all = file_->bytes();
  constexpr std::size_t kLengthBytes = sizeof(std::uint64_t);
  if (all.size() < kLengthBytes) {
    broken(path, "is ", all.size(), " bytes long, too short for a safetensors file");
  }
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, all.data(), kLengthBytes);
  const std::uint64_t most =
      std::min<std::uint64_t>(all.size() - kLengthBytes, internal::kMaxHeaderBytes);
  if (header_bytes > most) {
    broken(path, "claims a header of ", header_bytes, " bytes; expected at most ", most);
  }
  data_begin_ = kLengthBytes + header_bytes;
  parse_header({reinterpret_cast<const char*>(all.data()) + kLengthBytes, header_bytes});
  check_layout();
}

SafetensorsFile::~SafetensorsFile() = default;
SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&& other) noexcept = default;

const std::string& SafetensorsFile::path() const {
  return file_->path();
}

void SafetensorsFile::parse_header(std::string_view header) {
  if (header.empty() || header.front() != '{') {
    broken(path(), "the header of ", header.size(), " bytes does not begin with '{'");
  }
  HeaderParser parser(path(), file_->bytes().size() - data_begin_, entries_, metadata_);
  try {
    // The result is empty: every entry is dropped once it has been read.
    const Json parsed = Json::parse(header, [&](int depth, Json::parse_event_t event, Json& value) {
      return parser.on_event(depth, event, value);
    });
  } catch (const nlohmann::json::exception& error) {
    broken(path(), "the header is no JSON: ", error.what());
  }
}

// Sorted by place, each entry must begin where the one before it ends.
void SafetensorsFile::check_layout() {
  std::sort(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.size_bytes) < std::pair(b.begin, b.size_bytes);
  });
  std::uint64_t end = 0;
  for (const SafetensorsEntry& entry : entries_) {
    if (entry.begin != end) {
      broken(
          path(),
          "entry '",
          entry.name,
          "' begins at byte ",
          entry.begin,
          " of the data",
          entry.begin < end ? ", inside the entry before it, which ends at "
                            : ", behind a gap; the entry before it ends at ",
          end
      );
    }
    end += entry.size_bytes;
  }
  const std::uint64_t data_bytes = file_->bytes().size() - data_begin_;
  if (end != data_bytes) {
    broken(path(), "has ", data_bytes - end, " bytes behind its last entry; expected none");
  }
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const auto& entry) {
    return entry.name == name;
  });
  return found == entries_.end() ? nullptr : &*found;
}

std::span<const std::byte> SafetensorsFile::data(const SafetensorsEntry& entry) const {
  return file_->bytes().subspan(data_begin_ + entry.begin, entry.size_bytes);
}

std::span<const std::byte> SafetensorsFile::bytes() const {
  return file_->bytes();
}

}  // namespace hypershard::checkpoint
