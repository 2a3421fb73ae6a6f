// See checksum.h. Four lanes of 8 bytes run side by side, which is what makes it fast.
#include "hypershard/checkpoint/internal/checksum.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>

namespace hypershard::checkpoint::internal {

namespace {

static_assert(std::endian::native == std::endian::little, "files are little-endian");

constexpr std::uint64_t kPrime1 = 0x9e3779b185ebca87ULL;
constexpr std::uint64_t kPrime2 = 0xc2b2ae3d27d4eb4fULL;
constexpr std::uint64_t kPrime3 = 0x165667b19e3779f9ULL;
constexpr std::uint64_t kPrime4 = 0x85ebca77c2b2ae63ULL;
constexpr std::uint64_t kPrime5 = 0x27d4eb2f165667c5ULL;
constexpr std::size_t kStripe = 32;

template <class Word>
std::uint64_t load(const std::byte* data) {
  Word word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

std::uint64_t round(std::uint64_t lane, std::uint64_t input) {
  return std::rotl(lane + input * kPrime2, 31) * kPrime1;
}

const std::byte* consume(
    std::array<std::uint64_t, 4>& lanes, const std::byte* data, std::size_t num_stripes
) {
  std::array<std::uint64_t, 4> now = lanes;
  for (std::size_t i = 0; i < num_stripes; ++i, data += kStripe) {
    now[0] = round(now[0], load<std::uint64_t>(data));
    now[1] = round(now[1], load<std::uint64_t>(data + 8));
    now[2] = round(now[2], load<std::uint64_t>(data + 16));
    now[3] = round(now[3], load<std::uint64_t>(data + 24));
  }
  lanes = now;
  return data;
}

std::uint64_t join(const std::array<std::uint64_t, 4>& lanes) {
  std::uint64_t hash = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) +
                       std::rotl(lanes[3], 18);
  for (const std::uint64_t lane : lanes) {
    hash = (hash ^ round(0, lane)) * kPrime1 + kPrime4;
  }
  return hash;
}

}  // namespace

void Checksum::update(const void* data, std::size_t size) {
  const auto* bytes = static_cast<const std::byte*>(data);
  num_bytes_ += size;
  if (num_pending_ > 0) {
    const std::size_t taken = std::min(size, kStripe - num_pending_);
    std::copy_n(bytes, taken, pending_.data() + num_pending_);
    num_pending_ += taken;
    bytes += taken;
    size -= taken;
    if (num_pending_ < kStripe) {
      return;
    }
    consume(lanes_, pending_.data(), 1);
  }
  bytes = consume(lanes_, bytes, size / kStripe);
  num_pending_ = size % kStripe;
  std::copy_n(bytes, num_pending_, pending_.data());
}

std::uint64_t Checksum::value() const {
  std::uint64_t hash = (num_bytes_ >= kStripe ? join(lanes_) : kPrime5) + num_bytes_;
  const std::byte* rest = pending_.data();
  std::size_t left = num_pending_;
  for (; left >= 8; left -= 8, rest += 8) {
    hash = std::rotl(hash ^ round(0, load<std::uint64_t>(rest)), 27) * kPrime1 + kPrime4;
  }
  for (; left >= 4; left -= 4, rest += 4) {
    hash = std::rotl(hash ^ load<std::uint32_t>(rest) * kPrime1, 23) * kPrime2 + kPrime3;
  }
  for (; left > 0; --left, ++rest) {
    hash = std::rotl(hash ^ load<std::uint8_t>(rest) * kPrime5, 11) * kPrime1;
  }
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

std::string checksum_text(std::uint64_t checksum) {
  std::array<char, 32> text{};
  const int length = std::snprintf(
      text.data(), text.size(), "xxh64:%016llx", static_cast<unsigned long long>(checksum)
  );
  return {text.data(), static_cast<std::size_t>(length)};
}

std::uint64_t checksum_of(std::string_view bytes) {
  Checksum checksum;
  checksum.update(bytes.data(), bytes.size());
  return checksum.value();
}

}  // namespace hypershard::checkpoint::internal
