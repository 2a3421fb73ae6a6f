// Why: a trained run must be able to speak: load its newest weights without a mesh, and generate.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "hypershard/data/tokenizer.h"
#include "hypershard/model/sample.h"
#include "hypershard/train/run_config.h"

namespace hypershard::train {

/// A model out of a checkpoint, with its tokenizer. One process, no sharding.
class Sampler {
 public:
  /// Loads a run folder's newest checkpoint, or the checkpoint named.
  /// Errors: InvalidArgument, IoError naming what is missing or does not fit.
  explicit Sampler(const std::string& run);
  ~Sampler();
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;

  /// Continues `prompt` (empty: from a document's beginning) and hands out text as it comes, in
  /// pieces that may end inside a character.
  /// Errors: InvalidArgument for options out of range.
  void generate(
      const std::string& prompt,
      const model::SampleOptions& options,
      const std::function<void(std::string_view)>& on_text
  ) const;

  const std::string& checkpoint() const { return checkpoint_; }

 private:
  std::string checkpoint_;
  std::unique_ptr<data::Tokenizer> tokenizer_;
  std::shared_ptr<model::GptImpl> model_;
};

}  // namespace hypershard::train
