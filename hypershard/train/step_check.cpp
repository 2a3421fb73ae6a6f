// See step_check.h.
#include "hypershard/train/step_check.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <utility>

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "hypershard/core/error.h"
#include "hypershard/model/gpt.h"
#include "hypershard/shard/engine.h"

namespace hypershard::train {
namespace {

// What limits how equal gradients can be: the coarsest dtype on their way.
at::ScalarType comparison_dtype(const Session& session) {
  at::ScalarType coarsest = at::kDouble;
  const auto take = [&coarsest](at::ScalarType dtype) {
    if (plan::gradient_bound(dtype) > plan::gradient_bound(coarsest)) {
      coarsest = dtype;
    }
  };
  for (const auto& unit : session.sharded().engine().units()) {
    for (const auto& group : unit->groups()) {
      take(group->dtypes().compute);
      take(group->dtypes().reduce);
      take(group->dtypes().update);
      if (group->dtypes().wire && group->crossing_bytes() > 0) {
        take(*group->dtypes().wire);
      }
    }
  }
  return coarsest;
}

// Rounds as the engine does on the way from update to compute parameters, into a parameter that is
// as fine as these or finer.
void fill(const at::Tensor& parameter, const at::Tensor& value, const RunConfig& config) {
  const c10::NoGradGuard no_grad;
  at::Tensor target = parameter;
  target.copy_(value.to(storage_dtype(config)).to(compute_dtype(config)));
}

// The model as one rank would have it, with the weights of now and computing in `compute`; made on
// rank 0 only. Collective.
std::shared_ptr<model::GptImpl> gather_model(const Session& session, at::ScalarType compute) {
  std::shared_ptr<model::GptImpl> whole;
  std::map<std::string, at::Tensor> parameters;
  run_on_first(session.everyone(), [&] {
    whole = std::make_shared<model::GptImpl>(
        session.shape(), model::GptOptions{.dtype = compute, .seed = std::nullopt}
    );
    for (const auto& item : whole->named_parameters()) {
      parameters.emplace(item.key(), item.value());
    }
  });
  session.sharded().visit_full_parameters([&](const std::string& name, const at::Tensor& value) {
    if (whole) {
      fill(parameters.at(name), value, session.config());
    }
  });
  return whole;
}

// Moves the gradients of one piece into sums that do not round, and adds up their norms.
void add_gradients(
    model::GptImpl& model, plan::NamedGradients& sums, std::map<std::string, double>& norms
) {
  const c10::NoGradGuard no_grad;
  for (const auto& item : model.named_parameters()) {
    const at::Tensor& gradient = item.value().grad();
    if (!gradient.defined()) {
      continue;
    }
    at::Tensor& sum = sums[item.key()];
    sum = sum.defined() ? sum.add_(gradient) : gradient.to(at::kDouble, false, /*copy=*/true);
    norms[item.key()] += at::linalg_vector_norm(gradient, 2, {}, false, at::kDouble).item<double>();
  }
  model.zero_grad();
}

// Tells whether gradients that differ may be right all the same: what fp32 can round away.
bool is_undecided(const plan::GradientReport& report, at::ScalarType dtype) {
  return dtype == at::kFloat && !report.passed && !report.rows.empty() &&
         std::all_of(report.rows.begin(), report.rows.end(), [](const plan::GradientRow& row) {
           return std::isfinite(row.relative_error);
         });
}

// Tells all ranks what rank 0 found. Collective.
bool from_first(const Session& session, bool value) {
  at::Tensor told = at::zeros({1}, at::kDouble);
  *told.mutable_data_ptr<double>() = value ? 1 : 0;
  session.everyone().broadcast(told, 0, "train.verdict")->wait();
  return *told.const_data_ptr<double>() > 0;
}

std::string scientific(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1e", value);
  return text;
}

}  // namespace

StepCheck::StepCheck(const Session& session) : session_(session) {
  HS_ASSERT(
      session_.applied().has_value(), "train.step_check: the session resolved no layouts to check"
  );
}

StepCheck::~StepCheck() = default;

void StepCheck::begin(std::int64_t step) {
  verdict_.step = step + 1;
  Reference reference = run_reference(compute_dtype(session_.config()));
  verdict_.reference_loss = reference.loss;
  const at::ScalarType dtype = comparison_dtype(session_);
  for (auto& item : reference.gradients) {
    reference_[item.first] = std::exchange(item.second, {}).to(dtype);
  }
  // Several ranks in one process share a random generator; the model here draws no numbers.
  guard_.emplace(
      session_.model(),
      *session_.applied(),
      plan::ValidationOptions{.check_random = false, .has_engine = true}
  );
}

// Row by row as the data ranks see them, all of them on rank 0. The others meet it at every piece,
// so that none of their waits is longer than one, and hear of it where it fails.
StepCheck::Reference StepCheck::run_reference(at::ScalarType compute) const {
  const std::shared_ptr<model::GptImpl> whole = gather_model(session_, compute);
  const RunConfig& config = session_.config();
  const int size = session_.num_data_ranks();
  const double parts = static_cast<double>(config.batch.accumulation) * size;
  Reference reference;
  for (std::int64_t micro = 0; micro < config.batch.accumulation; ++micro) {
    for (int data_rank = 0; data_rank < size; ++data_rank) {
      run_on_first(session_.everyone(), [&] {
        const data::Batch rows =
            session_.data().batch(config, verdict_.step - 1, micro, data_rank, size);
        const at::Tensor loss = whole->loss(rows.input, rows.target);
        loss.backward();
        reference.loss += loss.item<double>() / parts;
        add_gradients(*whole, reference.gradients, reference.addends);
      });
    }
  }
  for (auto& item : reference.gradients) {
    item.second.div_(parts);
    reference.addends.at(item.first) /= parts;
  }
  return reference;
}

void StepCheck::end() {
  guard_->finish();
  verdict_.counts = guard_->counts();
  guard_.reset();
  compare();
}

bool StepCheck::tell_failure(const LocalFailure& failure) {
  return guard_.has_value() && guard_->tell_failure(failure.code, failure.text);
}

void StepCheck::compare() {
  const bool is_first = session_.world().rank() == 0;
  plan::NamedGradients found;
  session_.sharded().visit_full_gradients([&](const std::string& name, const at::Tensor& gradient) {
    if (is_first) {
      found[name] = gradient;
    }
  });
  if (is_first) {
    verdict_.gradients = plan::compare_gradients(found, reference_);
  }
  const at::ScalarType dtype = comparison_dtype(session_);
  if (from_first(session_, is_first && is_undecided(verdict_.gradients, dtype))) {
    look_again(found);
  }
  reference_.clear();
  verdict_.gradients.passed = from_first(session_, verdict_.gradients.passed);
}

// The weights are still those of the step: no optimizer has run.
void StepCheck::look_again(const plan::NamedGradients& found) {
  Reference exact = run_reference(at::kDouble);
  if (session_.world().rank() == 0) {
    verdict_.gradients = plan::compare_with_exact(
        found,
        plan::ExactReference{
            .gradients = std::move(exact.gradients),
            .rounded = std::move(reference_),
            .addends = std::move(exact.addends)
        }
    );
  }
  verdict_.gradients.is_exact = true;
}

std::string to_text(const StepVerdict& verdict) {
  std::string text = concat_text(
      "step ",
      verdict.step,
      " validated: ",
      verdict.counts.operators,
      " operators, ",
      verdict.counts.boundaries,
      " boundaries, ",
      verdict.counts.backward_operators,
      " operators in backward, ",
      verdict.counts.values,
      " values compared between ranks; "
  );
  const auto& rows = verdict.gradients.rows;
  text += verdict.gradients.passed
              ? concat_text("all ", rows.size(), " gradients equal those of one rank")
              : std::string("gradients differ from those of one rank");
  if (verdict.gradients.is_exact) {
    text += verdict.gradients.passed ? " but for the rounding of fp32"
                                     : " by more than the rounding of fp32";
    text += ", judged beside a reference in fp64";
  }
  if (!rows.empty()) {
    const plan::GradientRow& worst = rows.front();
    text += concat_text(
        ", worst ",
        worst.name,
        " (",
        scientific(worst.relative_error),
        ", bound ",
        scientific(worst.bound),
        ")"
    );
  }
  return text;
}

void require_passed(const Session& session, const StepVerdict& verdict) {
  if (verdict.gradients.passed) {
    return;
  }
  std::string text;
  try {
    run_on_first(session.everyone(), [&] {
      HS_FAIL(
          InvalidArgument,
          "train.validate: the gradients of step ",
          verdict.step,
          " differ from those of the same step on one rank:\n",
          to_text(verdict.gradients),
          HS_HINT("the first rows name what is wrong most; `hypershard explain` shows how it is "
                  "cut and "
                  "reduced")
      );
    });
  } catch (const AgreedFailure& failure) {
    text = failure.what();
  }
  throw FoundWrong(text);  // raw-throw: all ranks throw the same
}

}  // namespace hypershard::train
