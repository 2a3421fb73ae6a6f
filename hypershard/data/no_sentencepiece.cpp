// Why: a build without the SentencePiece library offers the same functions and says what is
// missing. CMake picks this source or sentencepiece_tokenizer.cpp: callers need no conditions.
#include "hypershard/core/error.h"
#include "hypershard/data/sentencepiece_tokenizer.h"

namespace hypershard::data {
namespace {

[[noreturn]] void fail_unavailable(const std::string& request) {
  HS_FAIL(
      Unsupported,
      "data: ",
      request,
      " needs SentencePiece, and this build is without it",
      HS_HINT(
          "install libsentencepiece-dev and configure with -DHS_WITH_SENTENCEPIECE=ON, or use the "
          "byte tokenizer"
      )
  );
}

}  // namespace

bool has_sentencepiece() {
  return false;
}

std::unique_ptr<Tokenizer> load_sentencepiece(const std::string& path) {
  fail_unavailable("loading " + path);
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): the library's own takes the model over
std::unique_ptr<Tokenizer> parse_sentencepiece(std::string, const std::string& origin) {
  fail_unavailable("loading " + origin);
}

std::string train_sentencepiece(const NextText&, std::int64_t vocab_size) {
  fail_unavailable("training a vocabulary of " + std::to_string(vocab_size));
}

void train_sentencepiece(
    const std::vector<std::string>&, const std::string& out_prefix, std::int64_t
) {
  fail_unavailable("training " + out_prefix + ".model");
}

}  // namespace hypershard::data
