// Loading; see checkpoint.h. Everything is checked on all ranks before the first value is written.
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/GradMode.h>

#include "hypershard/checkpoint/checkpoint.h"
#include "hypershard/checkpoint/internal/agreement.h"
#include "hypershard/checkpoint/internal/entry_index.h"
#include "hypershard/checkpoint/internal/manifest.h"
#include "hypershard/checkpoint/internal/model_table.h"
#include "hypershard/checkpoint/internal/paths.h"
#include "hypershard/core/error.h"
#include "hypershard/core/error_context.h"
#include "hypershard/shard/engine.h"

namespace hypershard::checkpoint {

namespace {

using internal::EntryIndex;
using internal::Holds;
using internal::Manifest;
using internal::Match;
using internal::OwnedPiece;
using internal::SavedParameter;

// One rank reads each file whole: the one that wrote it, if it is there.
void verify_share(const std::string& folder, const Manifest& manifest, int rank, int num_ranks) {
  for (const internal::SavedFile& file : manifest.files) {
    if (file.rank % num_ranks == rank) {
      internal::verify_file(folder, file);
    }
  }
}

[[noreturn]] void fail_mismatch(const std::string& folder, const Match& match, const char* what) {
  std::string text;
  const auto add = [&](const std::vector<std::string>& items, const char* how) {
    if (!items.empty()) {
      text += concat_text(
          text.empty() ? "" : "; ", items.size(), " ", how, ": ", internal::list_text(items)
      );
    }
  };
  add(match.missing, "missing in the checkpoint");
  add(match.unexpected, "unexpected");
  add(match.different, "different");
  HS_FAIL(
      InvalidArgument,
      "checkpoint: ",
      folder,
      " does not fit the ",
      what,
      ": ",
      text,
      HS_HINT("build the model and optimizer of the configuration in its ", internal::kManifestFile)
  );
}

void check_match(const std::string& folder, const Match& match, const char* what) {
  if (!match.missing.empty() || !match.unexpected.empty() || !match.different.empty()) {
    fail_mismatch(folder, match, what);
  }
}

// The part of a load that only looks.
class Plan {
 public:
  Plan(
      const std::string& folder,
      const shard::ShardedModel& model,
      const optim::ShardedOptimizer* optimizer
  )
      : folder_(folder),
        manifest_(internal::read_manifest(folder)),
        updates_(model.update_parameters()) {
    const std::vector<SavedParameter> parameters = internal::list_parameters(model);
    const Match match = internal::match_parameters(parameters, manifest_.parameters);
    check_match(folder_, match, "model");
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      saved_[parameters[i].name] = &manifest_.parameters[match.saved_of[i]];
    }
    weights_ = std::make_unique<EntryIndex>(folder_, manifest_, Holds::kWeights);
    if (optimizer != nullptr) {
      check_optimizer(*optimizer);
      state_ = std::make_unique<EntryIndex>(folder_, manifest_, Holds::kOptimizer);
    }
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  const Manifest& manifest() const { return manifest_; }

  void read_weights() const { read(internal::weight_pieces(updates_), *weights_); }

  void read_optimizer(optim::ShardedOptimizer& optimizer) const {
    optimizer.restore_steps(manifest_.optimizer->steps, steps_);
    read(internal::state_pieces(updates_, optimizer.state_tensors()), *state_);
  }

 private:
  void check_optimizer(const optim::ShardedOptimizer& optimizer) {
    HS_CHECK(
        manifest_.optimizer.has_value(),
        "checkpoint: ",
        folder_,
        " holds no optimizer state for '",
        optimizer.kind(),
        "'",
        HS_HINT("pass no optimizer to load the weights alone")
    );
    HS_CHECK(
        manifest_.optimizer->kind == optimizer.kind(),
        "checkpoint: ",
        folder_,
        " holds the state of optimizer '",
        manifest_.optimizer->kind,
        "'; expected '",
        optimizer.kind(),
        "'"
    );
    HS_CHECK_EQ(
        optimizer.update_steps().size(),
        updates_.size(),
        "checkpoint: the optimizer '",
        optimizer.kind(),
        "' was built over another model"
    );
    Match match;
    for (std::size_t i = 0; i < updates_.size(); ++i) {
      steps_.push_back(steps_of(updates_[i]));
      const std::vector<std::string> wanted =
          steps_[i] > 0 ? optimizer.state_names(i) : std::vector<std::string>();
      for (const shard::UpdatePiece& piece : updates_[i].pieces) {
        compare_state(piece.name, wanted, match);
      }
    }
    check_match(folder_, match, "optimizer");
  }

  void compare_state(const std::string& name, const std::vector<std::string>& wanted, Match& match)
      const {
    const std::vector<std::string>& found = saved_.at(name)->state;
    const auto without = [&](const std::vector<std::string>& all, const auto& known, auto& list) {
      for (const std::string& state : all) {
        if (std::find(known.begin(), known.end(), state) == known.end()) {
          list.push_back(state + "/" + name);
        }
      }
    };
    without(wanted, found, match.missing);
    without(found, wanted, match.unexpected);
  }

  // An update tensor has one count, so that parameters which were stepped apart cannot share one.
  std::int64_t steps_of(const shard::UpdateTensor& update) const {
    std::int64_t steps = 0;
    for (std::size_t i = 0; i < update.pieces.size(); ++i) {
      const std::int64_t own = saved_.at(update.pieces[i].name)->steps;
      HS_CHECK(
          i == 0 || own == steps,
          "checkpoint: parameters '",
          update.pieces.front().name,
          "' and '",
          update.pieces[i].name,
          "' are stepped together in this model, but were stepped ",
          steps,
          " and ",
          own,
          " times in ",
          folder_,
          HS_HINT("freeze before fully_shard what the saved run had frozen")
      );
      steps = own;
    }
    return steps;
  }

  void read(const std::vector<OwnedPiece>& pieces, const EntryIndex& index) const {
    for (const OwnedPiece& piece : pieces) {
      // The checkpoint may have another of a tied parameter's names first.
      const std::string key = piece.prefix + saved_.at(piece.name)->name;
      index.read(key, piece.block, piece.range, piece.flat);
    }
  }

  std::string folder_;
  Manifest manifest_;
  std::vector<shard::UpdateTensor> updates_;
  std::map<std::string, const SavedParameter*> saved_;  // by the model's name
  std::vector<std::int64_t> steps_;
  std::unique_ptr<EntryIndex> weights_;
  std::unique_ptr<EntryIndex> state_;
};

}  // namespace

TrainState load(
    const std::string& path,
    const shard::ShardedModel& model,
    optim::ShardedOptimizer* optimizer,
    const comm::ProcessMesh& mesh
) {
  const ErrorContext context("checkpoint load");
  const c10::NoGradGuard no_grad;
  comm::Communicator& ranks = *mesh.world().world_communicator();
  // One rank says what `latest` means, in case it moves meanwhile.
  const std::string folder =
      internal::together(ranks, [&] {
        return mesh.rank() == 0 ? internal::find_folder(path) : std::string();
      }).front();
  internal::together(ranks, [&] {
    const Manifest manifest = internal::read_manifest(folder);
    verify_share(folder, manifest, mesh.rank(), ranks.size());
    return std::string();
  });
  std::unique_ptr<Plan> plan;
  internal::together(ranks, [&] {
    model.begin_update();
    plan = std::make_unique<Plan>(folder, model, optimizer);
    return std::string();
  });
  internal::together(ranks, [&] {
    plan->read_weights();
    if (optimizer != nullptr) {
      plan->read_optimizer(*optimizer);
    }
    return std::string();
  });
  model.engine().mark_initialised();
  model.sync_runtime();
  return plan->manifest().state;
}

}  // namespace hypershard::checkpoint
