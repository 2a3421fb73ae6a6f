// Why: the order of preparation: look at everything first, decide, write, and vouch for it last.
// All mistakes in the input are found before the folder is touched.
#include "hypershard/data/prepare.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include "hypershard/core/error.h"
#include "hypershard/data/internal/holdout.h"
#include "hypershard/data/internal/manifest.h"
#include "hypershard/data/internal/output_file.h"
#include "hypershard/data/internal/sha256.h"
#include "hypershard/data/internal/text_source.h"
#include "hypershard/data/internal/tokenizer_json.h"
#include "hypershard/data/sentencepiece_tokenizer.h"
#include "hypershard/data/token_file.h"

namespace hypershard::data {
namespace fs = std::filesystem;

namespace {

using internal::Manifest;
using internal::ManifestDocument;
using internal::ManifestFile;
using internal::SourceFile;
using internal::SourceText;

constexpr const char* kTrain = "train";
constexpr const char* kVal = "val";

std::string in_folder(const std::string& folder, const std::string& file) {
  return (fs::path(folder) / file).string();
}

// One preparation; its parts run in the order of prepare_text.
class Preparation {
 public:
  Preparation(const std::vector<std::string>& paths, const PrepareOptions& options)
      : options_(options), files_(internal::find_sources(paths, options.include)) {}

  void inspect();
  bool is_already_done();
  void write();
  const Manifest& manifest() const { return manifest_; }
  std::vector<std::string> warnings() const;

 private:
  void make_folder() const;
  void assign_splits();
  SourceText read_again(std::size_t i) const;
  std::unique_ptr<Tokenizer> make_tokenizer() const;
  void save_tokenizer(const Tokenizer& tokenizer);
  ManifestFile write_split(const Tokenizer& tokenizer, const std::string& split);

  const PrepareOptions& options_;
  std::vector<SourceFile> files_;
  Manifest manifest_;
  std::size_t num_with_markers_ = 0;
  std::vector<std::string> latin1_names_;
};

void Preparation::inspect() {
  manifest_.options = internal::describe_options(options_);
  for (const SourceFile& file : files_) {
    const SourceText source = internal::read_source(file, options_);
    manifest_.documents.push_back(
        {.name = file.name,
         .title = source.title,
         .source = file.source,
         .split = {},
         .encoding = source.encoding,
         .sha256 = source.sha256,
         .source_bytes = source.source_bytes,
         .stripped_bytes = source.stripped_bytes,
         .text_bytes = source.text.size()}
    );
    num_with_markers_ += source.has_gutenberg_markers ? 1 : 0;
    if (source.encoding == "latin-1") {
      latin1_names_.push_back(file.name);
    }
  }
  assign_splits();
}

void Preparation::assign_splits() {
  std::vector<internal::DocumentLabel> labels;
  for (const ManifestDocument& document : manifest_.documents) {
    labels.push_back({document.name, document.title});
  }
  const std::vector<bool> held_out = internal::choose_holdout(labels, options_);
  for (std::size_t i = 0; i < held_out.size(); ++i) {
    manifest_.documents[i].split = held_out[i] ? kVal : kTrain;
  }
}

// Tells whether a token file is the one that a manifest describes; damage counts as another one.
bool is_token_file(const std::string& folder, const ManifestFile& file) {
  const std::string path = in_folder(folder, file.file);
  if (file.file.empty() || !fs::exists(path)) {
    return file.file.empty();
  }
  try {
    const TokenFile tokens(path);
    return tokens.num_tokens() == file.num_tokens && tokens.info().tokens_sha256 == file.sha256;
  } catch (const Error&) {
    return false;
  }
}

bool is_whole_file(const std::string& folder, const ManifestFile& file) {
  const std::string path = in_folder(folder, file.file);
  std::error_code error;
  return fs::is_regular_file(path, error) &&
         internal::sha256_hex(internal::read_file(path)) == file.sha256;
}

bool Preparation::is_already_done() {
  const std::string path = in_folder(options_.out_dir, internal::kManifestFile);
  std::error_code error;
  if (!fs::is_regular_file(path, error)) {
    return false;
  }
  std::optional<Manifest> present = internal::parse_manifest(internal::read_file(path));
  if (!present || !internal::same_inputs(*present, manifest_)) {
    return false;
  }
  const bool is_whole =
      is_token_file(options_.out_dir, present->train) &&
      is_token_file(options_.out_dir, present->val) &&
      std::all_of(
          present->tokenizer_files.begin(),
          present->tokenizer_files.end(),
          [&](const ManifestFile& file) { return is_whole_file(options_.out_dir, file); }
      );
  if (is_whole) {
    manifest_ = std::move(*present);
  }
  return is_whole;
}

void Preparation::make_folder() const {
  std::error_code error;
  fs::create_directories(options_.out_dir, error);
  if (error || !fs::is_directory(options_.out_dir)) {
    HS_FAIL(
        IoError,
        "data: ",
        options_.out_dir,
        ": cannot be made: ",
        error ? error.message() : "a file of that name exists",
        HS_HINT("choose another folder with --out")
    );
  }
}

SourceText Preparation::read_again(std::size_t i) const {
  SourceText source = internal::read_source(files_[i], options_);
  const std::string& expected = manifest_.documents[i].sha256;
  if (source.sha256 != expected) {
    HS_FAIL(
        IoError,
        "data: ",
        files_[i].path,
        ": changed while it was being prepared: SHA-256 ",
        source.sha256,
        " (expected ",
        expected,
        ")",
        HS_HINT("run again when nothing writes to it")
    );
  }
  return source;
}

std::unique_ptr<Tokenizer> Preparation::make_tokenizer() const {
  if (options_.tokenizer == TokenizerKind::kByte) {
    return std::make_unique<ByteTokenizer>();
  }
  std::size_t next = 0;
  const NextText next_text = [&](std::string& text) {
    while (next < files_.size() && manifest_.documents[next].split != kTrain) {
      ++next;
    }
    if (next == files_.size()) {
      return false;
    }
    text = read_again(next++).text;
    return true;
  };
  return parse_sentencepiece(
      train_sentencepiece(next_text, options_.vocab_size), "the new vocabulary"
  );
}

void Preparation::save_tokenizer(const Tokenizer& tokenizer) {
  tokenizer.save(options_.out_dir);
  manifest_.tokenizer_name = tokenizer.name();
  manifest_.vocab_size = tokenizer.vocab_size();
  std::vector<std::string> names = {internal::kTokenizerFile};
  const std::string model = in_folder(options_.out_dir, internal::kTokenizerModelFile);
  if (options_.tokenizer == TokenizerKind::kSentencePiece) {
    names.emplace_back(internal::kTokenizerModelFile);
  } else {
    fs::remove(model);  // of an earlier preparation
  }
  for (const std::string& name : names) {
    const std::string content = internal::read_file(in_folder(options_.out_dir, name));
    manifest_.tokenizer_files.push_back({.file = name, .sha256 = internal::sha256_hex(content)});
  }
}

ManifestFile Preparation::write_split(const Tokenizer& tokenizer, const std::string& split) {
  const std::string file = split + ".tokens";
  const std::string path = in_folder(options_.out_dir, file);
  const bool has_documents = std::any_of(
      manifest_.documents.begin(),
      manifest_.documents.end(),
      [&](const ManifestDocument& document) { return document.split == split; }
  );
  if (!has_documents) {
    fs::remove(path);  // of an earlier preparation
    return {};
  }
  TokenFileWriter writer(path, token_writer_options(tokenizer));
  for (std::size_t i = 0; i < files_.size(); ++i) {
    ManifestDocument& document = manifest_.documents[i];
    if (document.split != split) {
      continue;
    }
    const std::vector<Token> tokens = tokenizer.encode(read_again(i).text);
    writer.begin_document(document.name, document.text_bytes);
    writer.append(tokens);
    writer.end_document();
    document.num_tokens = tokens.size();
  }
  const TokenFileInfo info = writer.finish();
  return {
      .file = file,
      .num_tokens = info.num_tokens,
      .text_bytes = info.text_bytes,
      .sha256 = info.tokens_sha256
  };
}

void Preparation::write() {
  const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer();
  make_folder();
  const std::string manifest_path = in_folder(options_.out_dir, internal::kManifestFile);
  std::error_code error;
  fs::remove(manifest_path, error);  // from here to the end the folder vouches for nothing
  save_tokenizer(*tokenizer);
  manifest_.train = write_split(*tokenizer, kTrain);
  manifest_.val = write_split(*tokenizer, kVal);
  internal::write_file(manifest_path, internal::write_manifest(manifest_));
}

std::vector<std::string> Preparation::warnings() const {
  std::vector<std::string> warnings;
  if (num_with_markers_ > 0 && !options_.strip_gutenberg) {
    warnings.push_back(concat_text(
        num_with_markers_,
        " of ",
        files_.size(),
        " documents are wrapped in Project Gutenberg's licence, which will be learnt; "
        "--strip-gutenberg removes it"
    ));
  }
  if (num_with_markers_ == 0 && options_.strip_gutenberg) {
    warnings.push_back(concat_text(
        "no Project Gutenberg wrapping was found in ", files_.size(), " documents: nothing stripped"
    ));
  }
  if (!latin1_names_.empty() && options_.encoding == TextEncoding::kAuto) {
    warnings.push_back(concat_text(
        latin1_names_.size(),
        " of ",
        files_.size(),
        " documents are not UTF-8 and were read as Latin-1: ",
        latin1_names_
    ));
  }
  return warnings;
}

SplitSummary summarize(
    const std::string& dir, const Manifest& manifest, const ManifestFile& file, const char* split
) {
  if (file.file.empty()) {
    return {};
  }
  SplitSummary summary{
      .path = in_folder(dir, file.file),
      .documents = {},
      .num_tokens = file.num_tokens,
      .text_bytes = file.text_bytes
  };
  for (const ManifestDocument& document : manifest.documents) {
    if (document.split == split) {
      summary.documents.push_back(document.name);
    }
  }
  return summary;
}

PreparedData summarize(const std::string& dir, const Manifest& manifest) {
  return {
      .dir = dir,
      .tokenizer_path = in_folder(dir, internal::kTokenizerFile),
      .tokenizer_name = manifest.tokenizer_name,
      .vocab_size = manifest.vocab_size,
      .train = summarize(dir, manifest, manifest.train, kTrain),
      .val = summarize(dir, manifest, manifest.val, kVal)
  };
}

std::string split_text(const char* name, const SplitSummary& split) {
  if (split.path.empty()) {
    return concat_text("  ", name, ": none\n");
  }
  return concat_text(
      "  ",
      name,
      ": ",
      split.num_tokens,
      " tokens, ",
      split.documents.size(),
      split.documents.size() == 1 ? " document" : " documents",
      ", ",
      split.text_bytes,
      " bytes of text\n"
  );
}

}  // namespace

PrepareReport prepare_text(const std::vector<std::string>& paths, const PrepareOptions& options) {
  HS_CHECK(!options.out_dir.empty(), "data: no folder to write to: out_dir is ''");
  HS_SUPPORTED(
      options.tokenizer == TokenizerKind::kByte || has_sentencepiece(),
      "data: a vocabulary of ",
      options.vocab_size,
      " needs SentencePiece, and this build is without it",
      HS_HINT("configure with -DHS_WITH_SENTENCEPIECE=ON, or use the byte tokenizer")
  );
  Preparation preparation(paths, options);
  preparation.inspect();
  PrepareReport report;
  report.unchanged = preparation.is_already_done();
  if (!report.unchanged) {
    preparation.write();
  }
  report.data = summarize(options.out_dir, preparation.manifest());
  report.warnings = preparation.warnings();
  return report;
}

std::string to_text(const PrepareReport& report) {
  const PreparedData& data = report.data;
  std::string text = concat_text(
      report.unchanged ? "unchanged: " : "wrote ",
      data.dir,
      " (tokenizer ",
      data.tokenizer_name,
      ", vocabulary ",
      data.vocab_size,
      ")\n",
      split_text(kTrain, data.train),
      split_text(kVal, data.val)
  );
  if (!data.val.documents.empty()) {
    text += concat_text("  held out: ", data.val.documents, "\n");
  }
  for (const std::string& warning : report.warnings) {
    text += "  note: " + warning + "\n";
  }
  return text;
}

PreparedData open_prepared(const std::string& dir) {
  const std::string path = in_folder(dir, internal::kManifestFile);
  std::error_code error;
  if (!fs::exists(path, error)) {
    HS_FAIL(
        IoError,
        "data: ",
        dir,
        ": is not a prepared folder: it holds no ",
        internal::kManifestFile,
        HS_HINT("prepare it with `hypershard data text PATH... --out ", dir, "`")
    );
  }
  const std::optional<Manifest> manifest = internal::parse_manifest(internal::read_file(path));
  if (!manifest) {
    HS_FAIL(
        IoError,
        "data: ",
        path,
        ": is damaged or of another version (expected a manifest of format hypershard.data, "
        "version 1)",
        HS_HINT("prepare the folder again with `hypershard data text`")
    );
  }
  return summarize(dir, *manifest);
}

}  // namespace hypershard::data
