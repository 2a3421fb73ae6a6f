// Checks of a GPT's shape and the numbers derived from it.
#include "hypershard/model/gpt_config.h"

#include <cmath>
#include <cstdint>
#include <string_view>

#include "hypershard/core/error.h"

namespace hypershard::model {
namespace {

void check_positive(const char* field, std::int64_t value) {
  HS_CHECK(value > 0, "model.gpt: ", field, " must be positive (got ", value, ")");
}

std::int64_t matrix_parameters_of_block(const GptConfig& config) {
  const std::int64_t kv_dim = config.num_kv_heads * config.head_dim();
  return 2 * config.dim * config.dim + 2 * kv_dim * config.dim + 3 * config.hidden_dim * config.dim;
}

}  // namespace

GptConfig checked(const GptConfig& config) {
  GptConfig full = config;
  check_positive("vocab_size", full.vocab_size);
  check_positive("num_layers", full.num_layers);
  check_positive("dim", full.dim);
  check_positive("num_heads", full.num_heads);
  check_positive("hidden_multiple", full.hidden_multiple);
  check_positive("max_sequence", full.max_sequence);
  if (full.num_kv_heads == 0) {
    full.num_kv_heads = full.num_heads;
  }
  if (full.hidden_dim == 0) {
    const std::int64_t wanted = 8 * full.dim / 3;
    full.hidden_dim =
        (wanted + full.hidden_multiple - 1) / full.hidden_multiple * full.hidden_multiple;
  }
  check_positive("num_kv_heads", full.num_kv_heads);
  check_positive("hidden_dim", full.hidden_dim);
  HS_CHECK(
      full.dim % full.num_heads == 0 && full.head_dim() % 2 == 0,
      "model.gpt: dim ",
      full.dim,
      " does not divide into ",
      full.num_heads,
      " heads of an even size, which rotary positions need"
  );
  HS_CHECK(
      full.num_heads % full.num_kv_heads == 0,
      "model.gpt: num_heads ",
      full.num_heads,
      " is no multiple of num_kv_heads ",
      full.num_kv_heads
  );
  HS_CHECK(
      full.dropout >= 0 && full.dropout < 1,
      "model.gpt: dropout must be in [0, 1) (got ",
      full.dropout,
      ")"
  );
  HS_CHECK(
      full.rope_theta > 0, "model.gpt: rope_theta must be positive (got ", full.rope_theta, ")"
  );
  HS_CHECK(
      full.norm_eps >= 0, "model.gpt: norm_eps must not be negative (got ", full.norm_eps, ")"
  );
  HS_CHECK(
      full.init_std >= 0, "model.gpt: init_std must not be negative (got ", full.init_std, ")"
  );
  return full;
}

std::int64_t num_parameters(const GptConfig& config) {
  const GptConfig full = checked(config);
  const std::int64_t table = full.vocab_size * full.dim;
  const std::int64_t block = matrix_parameters_of_block(full) + 2 * full.dim;
  return (full.tie_embeddings ? 1 : 2) * table + full.num_layers * block + full.dim;
}

double flops_per_token(const GptConfig& config, std::int64_t sequence) {
  const GptConfig full = checked(config);
  const std::int64_t matrices =
      full.num_layers * matrix_parameters_of_block(full) + full.vocab_size * full.dim;
  const std::int64_t attention = full.num_layers * full.dim * sequence;
  return 6.0 * static_cast<double>(matrices) + 12.0 * static_cast<double>(attention);
}

nn::InitFn gpt_init(const GptConfig& config) {
  const GptConfig full = checked(config);
  const double branch_std = full.init_std / std::sqrt(2.0 * static_cast<double>(full.num_layers));
  return [std = full.init_std, branch_std](std::string_view name, at::IntArrayRef) {
    if (name.ends_with("norm.weight")) {
      return nn::Init::constant(1);
    }
    const bool ends_branch = name.ends_with("wo.weight") || name.ends_with("w2.weight");
    return nn::Init::normal(0, ends_branch ? branch_std : std);
  };
}

}  // namespace hypershard::model
