// Why: reading of token files: mapping, validation, and bounds that hold for any bytes on disk.
// Nothing in the file is believed before its checksum and its range have been compared.
#include "hypershard/data/token_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "hypershard/core/error.h"
#include "hypershard/data/internal/token_format.h"

namespace hypershard::data {
namespace {

using internal::TokenHeader;

constexpr const char* kPrepareAgain = "prepare the data again with `hypershard data text`";

// Owns a mapping of a whole file.
class Mapping {
 public:
  explicit Mapping(const std::string& path);
  ~Mapping() {
    if (data_ != nullptr) {
      ::munmap(data_, size_);
    }
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  const std::byte* data() const { return static_cast<const std::byte*>(data_); }
  std::uint64_t size() const { return size_; }
  void advise(std::uint64_t offset, std::uint64_t size, int advice) const;

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

Mapping::Mapping(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    HS_FAIL(
        IoError,
        "data: ",
        path,
        ": cannot be opened: ",
        errno_text(errno),
        HS_HINT("make it with `hypershard data text`")
    );
  }
  struct stat status {};
  const int error = ::fstat(fd, &status) == 0 ? 0 : errno;
  const bool is_file = error == 0 && S_ISREG(status.st_mode);
  if (is_file && status.st_size > 0) {
    size_ = static_cast<std::size_t>(status.st_size);
    void* data = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, 0);
    const int map_error = errno;
    ::close(fd);
    if (data == MAP_FAILED) {
      HS_FAIL(IoError, "data: ", path, ": cannot be mapped: ", errno_text(map_error));
    }
    data_ = data;
    return;
  }
  ::close(fd);
  if (!is_file) {
    HS_FAIL(
        IoError,
        "data: ",
        path,
        ": is not a regular file",
        error == 0 ? std::string() : ": " + errno_text(error)
    );
  }
}

// Advice is only a hint: the kernel may refuse it without consequence.
void Mapping::advise(std::uint64_t offset, std::uint64_t size, int advice) const {
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t begin = offset / page * page;
  (void)::madvise(static_cast<char*>(data_) + begin, offset - begin + size, advice);
}

// Takes numbers and texts off a table, refusing to leave it.
class TableReader {
 public:
  TableReader(const std::byte* data, std::uint64_t size) : data_(data), size_(size) {}

  template <class Number>
  bool take(Number& number) {
    if (size_ - offset_ < sizeof(Number)) {
      return false;
    }
    std::memcpy(&number, data_ + offset_, sizeof(Number));
    offset_ += sizeof(Number);
    return true;
  }

  bool take(std::string& text) {
    std::uint32_t length = 0;
    if (!take(length) || size_ - offset_ < length) {
      return false;
    }
    text.assign(reinterpret_cast<const char*>(data_ + offset_), length);
    offset_ += length;
    return true;
  }

  bool at_end() const { return offset_ == size_; }

 private:
  const std::byte* data_;
  std::uint64_t size_;
  std::uint64_t offset_ = 0;
};

template <class Stored>
std::int64_t widen(const std::byte* source, std::span<std::int64_t> destination) {
  std::int64_t largest = 0;
  for (std::size_t i = 0; i < destination.size(); ++i) {
    Stored stored;
    std::memcpy(&stored, source + i * sizeof(Stored), sizeof(Stored));
    destination[i] = stored;
    largest = std::max(largest, destination[i]);
  }
  return largest;
}

}  // namespace

struct TokenFile::Impl {
  Impl(const std::string& file_path, AccessPattern pattern);
  void read_header();
  void check_ranges() const;
  void read_table();
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    HS_FAIL(IoError, "data: ", path, ": ", parts..., HS_HINT(kPrepareAgain));
  }

  std::string path;
  Mapping mapping;
  TokenHeader header;
  TokenFileInfo info;
  std::vector<TokenDocument> documents;
};

TokenFile::Impl::Impl(const std::string& file_path, AccessPattern pattern)
    : path(file_path), mapping(file_path) {
  read_header();
  check_ranges();
  read_table();
  const int advice = pattern == AccessPattern::kRandom ? MADV_RANDOM : MADV_SEQUENTIAL;
  mapping.advise(header.tokens_offset, header.num_tokens * header.token_bytes, advice);
}

void TokenFile::Impl::read_header() {
  if (mapping.size() < sizeof(TokenHeader)) {
    fail(
        "is not a token file or is truncated: ",
        mapping.size(),
        " bytes (expected at least ",
        sizeof(TokenHeader),
        ")"
    );
  }
  std::memcpy(&header, mapping.data(), sizeof(TokenHeader));
  if (header.magic != internal::kTokenMagic) {
    fail(
        "is not a token file: it begins with bytes ",
        internal::hex_of({header.magic.data(), header.magic.size()}),
        " (expected ",
        internal::hex_of({internal::kTokenMagic.data(), internal::kTokenMagic.size()}),
        ", 'HSTOKENS')"
    );
  }
  if (header.version != internal::kTokenVersion) {
    fail("has format version ", header.version, " (expected ", internal::kTokenVersion, ")");
  }
  if (header.header_checksum != checksum_of(header)) {
    fail(
        "its header is damaged: checksum ",
        header.header_checksum,
        " (expected ",
        checksum_of(header),
        ")"
    );
  }
}

// The checksum already vouches for the header; these guard against a writer of another program.
void TokenFile::Impl::check_ranges() const {
  const std::uint64_t width = header.token_bytes;
  if (width != 1 && width != 2 && width != 4) {
    fail("stores tokens of ", width, " bytes (expected 1, 2 or 4)");
  }
  if (header.num_tokens == 0) {
    fail("holds no tokens");
  }
  if (header.vocab_size == 0 || header.vocab_size > INT32_MAX) {
    fail("has a vocabulary of ", header.vocab_size, " (expected 1 to ", INT32_MAX, ")");
  }
  const bool is_placed = header.tokens_offset >= sizeof(TokenHeader) &&
                         header.tokens_offset % width == 0 &&
                         header.table_offset >= header.tokens_offset &&
                         (header.table_offset - header.tokens_offset) / width >= header.num_tokens;
  if (!is_placed) {
    fail(
        "places ",
        header.num_tokens,
        " tokens of ",
        width,
        " bytes between offsets ",
        header.tokens_offset,
        " and ",
        header.table_offset,
        ", where they do not fit"
    );
  }
  const std::uint64_t rest = mapping.size() - std::min(mapping.size(), header.table_offset);
  if (header.table_offset > mapping.size() || rest < header.table_bytes) {
    fail(
        "is truncated: ",
        mapping.size(),
        " bytes (expected ",
        header.table_offset + header.table_bytes,
        ")"
    );
  }
}

void TokenFile::Impl::read_table() {
  const std::byte* table = mapping.data() + header.table_offset;
  const std::uint64_t checksum = internal::first_word(internal::sha256(table, header.table_bytes));
  if (checksum != header.table_checksum) {
    fail(
        "its document table is damaged: checksum ",
        checksum,
        " (expected ",
        header.table_checksum,
        ")"
    );
  }
  TableReader reader(table, header.table_bytes);
  std::int64_t separator = -1;
  bool is_whole = reader.take(info.tokenizer_name) && reader.take(separator);
  for (std::uint64_t i = 0; is_whole && i < header.num_documents; ++i) {
    TokenDocument document;
    is_whole = reader.take(document.begin) && reader.take(document.end) &&
               reader.take(document.text_bytes) && reader.take(document.name) &&
               document.begin <= document.end && document.end <= header.num_tokens;
    info.text_bytes += document.text_bytes;
    documents.push_back(std::move(document));
  }
  if (!is_whole || !reader.at_end()) {
    fail(
        "its document table does not match its header: ",
        header.table_bytes,
        " bytes for ",
        header.num_documents,
        " documents"
    );
  }
  info.vocab_size = static_cast<std::int64_t>(header.vocab_size);
  info.num_tokens = header.num_tokens;
  info.token_bytes = static_cast<int>(header.token_bytes);
  if (separator >= 0) {
    info.separator = static_cast<Token>(separator);
  }
  info.tokens_sha256 = internal::to_hex(header.tokens_sha256);
}

TokenFile::TokenFile(const std::string& path, AccessPattern pattern)
    : impl_(std::make_unique<Impl>(path, pattern)) {}
TokenFile::~TokenFile() = default;
TokenFile::TokenFile(TokenFile&& other) noexcept = default;
TokenFile& TokenFile::operator=(TokenFile&& other) noexcept = default;

const std::string& TokenFile::path() const {
  return impl_->path;
}
const TokenFileInfo& TokenFile::info() const {
  return impl_->info;
}
const std::vector<TokenDocument>& TokenFile::documents() const {
  return impl_->documents;
}

void TokenFile::read(std::uint64_t begin, std::span<std::int64_t> destination) const {
  const TokenHeader& header = impl_->header;
  HS_CHECK(
      begin <= header.num_tokens && destination.size() <= header.num_tokens - begin,
      "data: ",
      impl_->path,
      ": tokens ",
      begin,
      " to ",
      begin + destination.size(),
      " were asked for, but it holds ",
      header.num_tokens
  );
  const std::byte* source =
      impl_->mapping.data() + header.tokens_offset + begin * header.token_bytes;
  std::int64_t largest = 0;
  switch (header.token_bytes) {
    case 1:
      largest = widen<std::uint8_t>(source, destination);
      break;
    case 2:
      largest = widen<std::uint16_t>(source, destination);
      break;
    default:
      largest = widen<std::uint32_t>(source, destination);
      break;
  }
  if (largest >= impl_->info.vocab_size) [[unlikely]] {
    const auto at = std::find(destination.begin(), destination.end(), largest);
    impl_->fail(
        "token ",
        largest,
        " at position ",
        begin + static_cast<std::uint64_t>(at - destination.begin()),
        " is outside the vocabulary of ",
        impl_->info.vocab_size,
        ": the file is damaged"
    );
  }
}

void TokenFile::will_need(std::uint64_t begin, std::uint64_t count) const {
  const TokenHeader& header = impl_->header;
  begin = std::min(begin, header.num_tokens);
  count = std::min(count, header.num_tokens - begin);
  impl_->mapping.advise(
      header.tokens_offset + begin * header.token_bytes, count * header.token_bytes, MADV_WILLNEED
  );
}

void TokenFile::verify() const {
  const TokenHeader& header = impl_->header;
  const std::string found = internal::to_hex(internal::sha256(
      impl_->mapping.data() + header.tokens_offset, header.num_tokens * header.token_bytes
  ));
  if (found != impl_->info.tokens_sha256) {
    impl_->fail(
        "its tokens are damaged: SHA-256 ", found, " (expected ", impl_->info.tokens_sha256, ")"
    );
  }
  std::vector<std::int64_t> piece(std::size_t{1} << 16);
  for (std::uint64_t begin = 0; begin < header.num_tokens; begin += piece.size()) {
    const std::uint64_t count = std::min<std::uint64_t>(piece.size(), header.num_tokens - begin);
    read(begin, std::span(piece).first(count));
  }
}

}  // namespace hypershard::data
