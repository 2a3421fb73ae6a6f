// `hypershard data`: turns files into what training reads.
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tools/command.h"
#include <CLI/CLI.hpp>

#include "hypershard/data/prepare.h"
#include "hypershard/train/exit_code.h"

namespace hypershard::tools {
namespace {

constexpr const char* kFooter =
    "Examples:\n"
    "  hypershard data text books/ --out data/books\n"
    "  hypershard data text plays/*.txt --out data/plays --gutenberg --holdout Hamlet \\\n"
    "      --holdout 'The Tempest'\n"
    "  hypershard data text books/ --out data/books4k --tokenizer sentencepiece --vocab 4096\n"
    "\n"
    "Every file is one document. DIR gets train.tokens, val.tokens (what was held out),\n"
    "tokenizer.json and manifest.json, which says which document went where.";

struct TextArguments {
  std::vector<std::string> paths;
  data::PrepareOptions options;
  std::vector<std::string> include;
};

void add_text(CLI::App& data_command, Action& action) {
  const auto arguments = std::make_shared<TextArguments>();
  data::PrepareOptions& options = arguments->options;
  CLI::App* command =
      data_command.add_subcommand("text", "Tokenises text files into a train and a held-out part.");
  command->footer(kFooter);
  command->add_option("PATH", arguments->paths, "Files, or folders to look for files in")
      ->required();
  command
      ->add_option(
          "--out", options.out_dir, "Folder to write; the same input writes the same bytes"
      )
      ->type_name("DIR")
      ->required();
  command
      ->add_option(
          "--include",
          arguments->include,
          "Pattern for files in folders (default *.txt); repeatable"
      )
      ->type_name("GLOB")
      ->allow_extra_args(false);
  const std::map<std::string, data::TextEncoding> encodings = {
      {"auto", data::TextEncoding::kAuto},
      {"utf8", data::TextEncoding::kUtf8},
      {"latin1", data::TextEncoding::kLatin1}
  };
  command->add_option("--encoding", options.encoding, "auto, utf8 or latin1 (default auto)")
      ->type_name("NAME")
      ->transform(CLI::CheckedTransformer(encodings));
  command->add_flag(
      "--gutenberg", options.strip_gutenberg, "Cut off Project Gutenberg's licence texts"
  );
  const std::map<std::string, data::TokenizerKind> kinds = {
      {"byte", data::TokenizerKind::kByte}, {"sentencepiece", data::TokenizerKind::kSentencePiece}
  };
  command->add_option("--tokenizer", options.tokenizer, "byte or sentencepiece (default byte)")
      ->type_name("KIND")
      ->transform(CLI::CheckedTransformer(kinds));
  command->add_option("--vocab", options.vocab_size, "Size of a SentencePiece vocabulary")
      ->capture_default_str();
  command
      ->add_option(
          "--holdout",
          options.holdout,
          "Document to hold out, by name, title or pattern; repeatable"
      )
      ->type_name("NAME")
      ->allow_extra_args(false);
  command
      ->add_option(
          "--holdout-fraction",
          options.holdout_fraction,
          "Without --holdout: share of the documents to hold out, chosen by --seed"
      )
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--seed", options.seed, "Seed of that choice")->capture_default_str();
  command->callback([&action, arguments] {
    action = [arguments] {
      if (!arguments->include.empty()) {
        arguments->options.include = arguments->include;
      }
      print_line(to_text(data::prepare_text(arguments->paths, arguments->options)));
      return static_cast<int>(train::kExitOk);
    };
  });
}

}  // namespace

void add_data(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("data", "Prepares data for training.");
  command->require_subcommand(1);
  add_text(*command, action);
}

}  // namespace hypershard::tools
