// Why: digests are compared with other programs', so they must be the standard's.
// The expected values are the standard's own.
#include "hypershard/data/internal/sha256.h"

#include <gtest/gtest.h>

namespace hypershard::data::internal {
namespace {

TEST(Sha256Test, MatchesTheStandardsExamples) {
  EXPECT_EQ(sha256_hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(
      sha256_hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
      "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
  );
  EXPECT_EQ(
      sha256_hex(std::string(1'000'000, 'a')),
      "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"
  );
}

TEST(Sha256Test, DoesNotDependOnHowThePiecesAreCut) {
  std::string text;
  for (int i = 0; i < 300; ++i) {
    text += static_cast<char>(i * 7);
  }
  for (std::size_t cut = 0; cut <= text.size(); ++cut) {
    Sha256 hash;
    hash.update(std::string_view(text).substr(0, cut));
    hash.update(std::string_view(text).substr(cut));
    EXPECT_EQ(to_hex(hash.finish()), sha256_hex(text)) << "cut at " << cut;
  }
}

TEST(Sha256Test, FirstWordIsLittleEndian) {
  EXPECT_EQ(first_word(sha256("abc", 3)), 0xeacf018fbf1678baULL);
}

}  // namespace
}  // namespace hypershard::data::internal
