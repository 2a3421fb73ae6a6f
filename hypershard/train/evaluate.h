// Why: the held-out loss is the number a run is judged by: the exact mean over the text, the same
// for any number of ranks.
#pragma once

#include "hypershard/data/evaluation_dataset.h"
#include "hypershard/train/session.h"

namespace hypershard::train {

/// The loss on held-out text.
struct Evaluation {
  double loss = 0;         ///< nats a token
  double nats_a_byte = 0;  ///< the same for a byte of the text
  std::int64_t num_tokens = 0;
};

/// Runs the model over the text without gradients; the model's mode is put back.
/// Collective: all ranks.
/// Errors: CommError.
Evaluation evaluate(const Session& session, const data::EvaluationDataset& text);

}  // namespace hypershard::train
