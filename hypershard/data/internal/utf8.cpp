// Why: the state machine behind utf8.h, written from the Unicode table rather than by cases of
// bits. A lead byte fixes the length and the range of its second byte; all later bytes are 80..BF.
#include "hypershard/data/internal/utf8.h"

#include <algorithm>

namespace hypershard::data::internal {
namespace {

struct Lead {
  std::size_t length;
  unsigned char second_min;
  unsigned char second_max;
};

Lead lead_of(unsigned char byte) {
  if (byte < 0x80) {
    return {1, 0, 0};
  }
  if (byte >= 0xC2 && byte <= 0xDF) {
    return {2, 0x80, 0xBF};
  }
  if (byte >= 0xE0 && byte <= 0xEF) {
    // E0 would be overlong below A0; ED would be a surrogate above 9F.
    return {
        3,
        static_cast<unsigned char>(byte == 0xE0 ? 0xA0 : 0x80),
        static_cast<unsigned char>(byte == 0xED ? 0x9F : 0xBF)
    };
  }
  if (byte >= 0xF0 && byte <= 0xF4) {
    // F0 would be overlong below 90; F4 leaves Unicode above 8F.
    return {
        4,
        static_cast<unsigned char>(byte == 0xF0 ? 0x90 : 0x80),
        static_cast<unsigned char>(byte == 0xF4 ? 0x8F : 0xBF)
    };
  }
  return {0, 0, 0};
}

}  // namespace

std::size_t utf8_sequence_length(std::string_view text, std::size_t offset) {
  const auto byte_at = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  if (offset >= text.size()) {
    return 0;
  }
  const Lead lead = lead_of(byte_at(offset));
  if (lead.length <= 1) {
    return lead.length;
  }
  if (offset + lead.length > text.size()) {
    return 0;
  }
  const unsigned char second = byte_at(offset + 1);
  if (second < lead.second_min || second > lead.second_max) {
    return 0;
  }
  for (std::size_t i = 2; i < lead.length; ++i) {
    if ((byte_at(offset + i) & 0xC0) != 0x80) {
      return 0;
    }
  }
  return lead.length;
}

Utf8Scan scan_utf8(std::string_view text) {
  Utf8Scan scan;
  for (std::size_t offset = 0; offset < text.size();) {
    const std::size_t length = utf8_sequence_length(text, offset);
    if (length == 0 && scan.valid) {
      scan.valid = false;
      scan.first_invalid = offset;
    }
    scan.num_multibyte += length > 1 ? 1 : 0;
    scan.num_invalid += length == 0 ? 1 : 0;
    offset += std::max<std::size_t>(length, 1);
  }
  return scan;
}

std::string latin1_to_utf8(std::string_view text) {
  std::string result;
  result.reserve(text.size() + text.size() / 8);
  for (const char character : text) {
    const auto byte = static_cast<unsigned char>(character);
    if (byte < 0x80) {
      result += character;
    } else {
      result += static_cast<char>(0xC0 | byte >> 6);
      result += static_cast<char>(0x80 | (byte & 0x3F));
    }
  }
  return result;
}

std::string_view utf8_prefix(std::string_view text, std::size_t max_bytes) {
  if (text.size() <= max_bytes) {
    return text;
  }
  std::size_t end = max_bytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) {
    --end;
  }
  return text.substr(0, end);
}

}  // namespace hypershard::data::internal
