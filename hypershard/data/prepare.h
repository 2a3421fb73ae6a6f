// Why: one call turns text files into what training reads, the same bytes every time.
// The folder it writes explains itself: which documents, which split, which tokenizer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hypershard::data {

/// The vocabulary to make: every byte a token, or pieces of words learnt from the train split.
enum class TokenizerKind { kByte, kSentencePiece };

/// How the bytes of a file become characters. kAuto takes a file as UTF-8 if it is well-formed, as
/// Latin-1 if none of its bytes above 127 form UTF-8, and refuses a mixture.
enum class TextEncoding { kAuto, kUtf8, kLatin1 };

/// What prepare_text does with the files.
struct PrepareOptions {
  std::string out_dir;  ///< made if missing
  /// Shell patterns for files found in folders: matched against the file's name, or against its
  /// path below the folder if the pattern holds a slash.
  std::vector<std::string> include = {"*.txt"};
  TextEncoding encoding = TextEncoding::kAuto;
  bool strip_gutenberg = false;  ///< see gutenberg.h

  TokenizerKind tokenizer = TokenizerKind::kByte;
  std::int64_t vocab_size = 4096;  ///< of a SentencePiece vocabulary, trained on the train split

  /// Documents to hold out, each by name, title or shell pattern; see choose_holdout.
  std::vector<std::string> holdout = {};
  /// Used if `holdout` is empty: the share of documents to hold out, chosen by `seed`, rounded up.
  /// 0 holds out nothing, and then there is no validation split.
  double holdout_fraction = 0.1;
  std::uint64_t seed = 0;
};

/// One written split.
struct SplitSummary {
  std::string path;  ///< empty if there is no such split
  std::vector<std::string> documents;
  std::uint64_t num_tokens = 0;
  std::uint64_t text_bytes = 0;
  /// Text bytes for one token: a loss in nats a token, divided by it, is in nats a byte.
  double bytes_per_token() const {
    return num_tokens == 0 ? 0.0
                           : static_cast<double>(text_bytes) / static_cast<double>(num_tokens);
  }
};

/// A prepared folder.
struct PreparedData {
  std::string dir;
  std::string tokenizer_path;
  std::string tokenizer_name;
  std::int64_t vocab_size = 0;
  SplitSummary train;
  SplitSummary val;
};

/// What prepare_text did.
struct PrepareReport {
  PreparedData data;
  bool unchanged = false;             ///< the folder already held exactly this
  std::vector<std::string> warnings;  ///< whole sentences for the user
};

/// Tokenises text files into `train.tokens` and `val.tokens`.
///
/// Every file is one document. A folder in `paths` stands for the files below it that match
/// `include`. Whole documents are held out. Writes, beside the two token files, `tokenizer.json`
/// (and `tokenizer.model`) and, last, `manifest.json`; the same files and options give the same
/// bytes, and if the folder already holds them nothing is written. Errors: IoError for a path that
/// cannot be read or a folder that cannot be written; InvalidArgument
///         for an empty file, no file, a file that is not text, a `holdout` that names no document
///         or more than one, or a split without documents; Unsupported for SentencePiece where the
///         build is without it.
PrepareReport prepare_text(const std::vector<std::string>& paths, const PrepareOptions& options);

/// Writes a report as a few lines for the user.
std::string to_text(const PrepareReport& report);

/// Opens a folder that prepare_text wrote.
/// Errors: IoError if it holds no manifest, a damaged one, or one of another version.
PreparedData open_prepared(const std::string& dir);

}  // namespace hypershard::data
