// Why: see sampler.h.
#include "hypershard/train/sampler.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include "hypershard/checkpoint/checkpoint.h"
#include "hypershard/core/error.h"
#include "hypershard/core/process.h"
#include "hypershard/model/gpt.h"
#include "hypershard/train/run_folder.h"
#include "hypershard/train/session.h"

namespace hypershard::train {
namespace {

void fill_parameters(model::GptImpl& model, const std::string& checkpoint) {
  const c10::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> weights;
  for (checkpoint::NamedTensor& each : checkpoint::read_weights(checkpoint)) {
    weights.emplace(std::move(each.name), std::move(each.tensor));
  }
  for (auto& item : model.named_parameters()) {
    const auto found = weights.find(item.key());
    HS_CHECK(
        found != weights.end(),
        "train.sampler: checkpoint '",
        checkpoint,
        "' has no '",
        item.key(),
        "' among ",
        weights.size(),
        " tensors"
    );
    HS_CHECK_EQ(
        found->second.sizes().vec(),
        item.value().sizes().vec(),
        "train.sampler: shape of '",
        item.key(),
        "' in '",
        checkpoint,
        "'"
    );
    item.value().copy_(found->second);
  }
}

}  // namespace

Sampler::Sampler(const std::string& run) {
  const ResumePoint point = find_resume_point(run);
  checkpoint_ = point.checkpoint;
  RunConfigFile config;
  config.load(RunFolder(point.run_dir).config_path(), {}, /*world_size=*/0);
  tokenizer_ = data::load_tokenizer(point.run_dir);
  at::set_num_threads(available_cores());
  model_ = std::make_shared<model::GptImpl>(
      gpt_config(config.config(), tokenizer_->vocab_size()),
      model::GptOptions{.dtype = parameter_dtype(config.config()), .seed = std::nullopt}
  );
  fill_parameters(*model_, checkpoint_);
}

Sampler::~Sampler() = default;

void Sampler::generate(
    const std::string& prompt,
    const model::SampleOptions& options,
    const std::function<void(std::string_view)>& on_text
) const {
  const std::vector<data::Token> encoded = tokenizer_->encode(prompt);
  std::vector<std::int64_t> tokens(encoded.begin(), encoded.end());
  if (tokens.empty()) {
    // What ends a document stands before the next one.
    tokens.push_back(tokenizer_->eos_id().value_or(tokenizer_->bos_id().value_or(0)));
  }
  model::SampleOptions told = options;
  // Decoded as a whole each time: a token's text may depend on the one before it.
  std::vector<data::Token> made;
  std::size_t num_shown = 0;
  told.on_token = [&](std::int64_t token) {
    made.push_back(static_cast<data::Token>(token));
    if (tokenizer_->eos_id() == made.back()) {
      return false;
    }
    const std::string text = tokenizer_->decode(made);
    on_text(std::string_view(text).substr(std::min(num_shown, text.size())));
    num_shown = text.size();
    return true;
  };
  model::generate(*model_, tokens, told);
}

}  // namespace hypershard::train
