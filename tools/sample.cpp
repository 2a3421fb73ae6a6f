// `hypershard sample`: lets a trained model write.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

#include "tools/command.h"
#include <CLI/CLI.hpp>

#include "hypershard/core/env.h"
#include "hypershard/train/exit_code.h"
#include "hypershard/train/sampler.h"

namespace hypershard::tools {
namespace {

constexpr const char* kFooter =
    "Examples:\n"
    "  hypershard sample runs/gpt_shakespeare\n"
    "  hypershard sample runs/gpt_shakespeare --prompt $'KING HENRY.\\n' --tokens 300\n"
    "  hypershard sample runs/gpt_shakespeare/checkpoints/step-00000200 --temperature 0\n"
    "\n"
    "The same weights, prompt and seed give the same text.";

constexpr int kMost = 1'000'000'000;  // tokens; unlike CLI::PositiveNumber it reads well in errors

struct SampleArguments {
  std::string run;
  std::string prompt = "\n";
  model::SampleOptions options;
};

void write_text(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

int run(const SampleArguments& arguments) {
  const train::Sampler sampler(arguments.run);
  write_text(arguments.prompt);
  sampler.generate(arguments.prompt, arguments.options, write_text);
  write_text("\n");
  return train::kExitOk;
}

}  // namespace

void add_sample(CLI::App& app, Action& action) {
  const auto arguments = std::make_shared<SampleArguments>();
  model::SampleOptions& options = arguments->options;
  CLI::App* command = app.add_subcommand(
      "sample", "Generates text with the newest checkpoint of a run, in one process."
  );
  command->footer(kFooter);
  command->add_option("RUN", arguments->run, "Run folder, or one of its checkpoints")->required();
  command->add_option("--prompt", arguments->prompt, "Text to continue (default: a new line)")
      ->type_name("TEXT");
  command->add_option("--tokens", options.max_new_tokens, "Tokens to generate")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command
      ->add_option(
          "--temperature",
          options.temperature,
          "0 always takes the likeliest token; higher is wilder"
      )
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  command->add_option("--top-k", options.top_k, "Choose among the k likeliest tokens; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      ->add_option(
          "--top-p", options.top_p, "Choose among the likeliest tokens that share this probability"
      )
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  CLI::Option* seed =
      command->add_option("--seed", options.seed, "Seed of the choices")->capture_default_str();
  command->callback([&action, arguments, seed] {
    action = [arguments, seed] {
      if (const std::int64_t wanted = env::get_int("HS_SEED"); seed->count() == 0 && wanted >= 0) {
        arguments->options.seed = static_cast<std::uint64_t>(wanted);
      }
      return run(*arguments);
    };
  });
}

}  // namespace hypershard::tools
