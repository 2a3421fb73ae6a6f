// Saving; see checkpoint.h. Three phases, each agreed on by all ranks: make room, write one's own
// files, and on rank 0 tie them together and put them in place.
#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include "hypershard/checkpoint/checkpoint.h"
#include "hypershard/checkpoint/internal/agreement.h"
#include "hypershard/checkpoint/internal/entry_index.h"
#include "hypershard/checkpoint/internal/files.h"
#include "hypershard/checkpoint/internal/manifest.h"
#include "hypershard/checkpoint/internal/model_table.h"
#include "hypershard/checkpoint/internal/paths.h"
#include "hypershard/checkpoint/safetensors.h"
#include "hypershard/core/error.h"
#include "hypershard/core/error_context.h"
#include "hypershard/shard/engine.h"

namespace hypershard::checkpoint {

namespace {

using internal::Holds;
using internal::Manifest;
using internal::OwnedPiece;
using internal::SavedFile;
using internal::SavedParameter;
using Json = nlohmann::ordered_json;

// A name that reads like a cut of another would be taken for one.
void check_names(const std::vector<SavedParameter>& parameters) {
  for (const SavedParameter& parameter : parameters) {
    const std::string key = internal::parse_entry_name(parameter.name).key;
    HS_CHECK(
        key == parameter.name,
        "checkpoint: parameter '",
        parameter.name,
        "' has a name that ends like an element range or a part of '",
        key,
        "'",
        HS_HINT("rename the parameter")
    );
  }
}

SavedFile write_pieces(
    const std::string& folder, Holds holds, int rank, std::vector<OwnedPiece> pieces
) {
  // Larger elements first keeps all of them aligned in the file.
  std::stable_sort(pieces.begin(), pieces.end(), [](const OwnedPiece& a, const OwnedPiece& b) {
    return a.flat.element_size() > b.flat.element_size();
  });
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, std::string> metadata{{"format", "pt"}};
  for (const OwnedPiece& piece : pieces) {
    const std::string name = internal::entry_name(piece.key(), piece.block, piece.range);
    const bool is_block = piece.range == layout::Range{0, piece.block.numel()};
    entries.push_back(
        {.name = name,
         .dtype = piece.flat.scalar_type(),
         .shape =
             is_block ? piece.block.local_shape() : std::vector<std::int64_t>{piece.range.numel()}}
    );
    if (name != piece.key()) {
      metadata[internal::shape_key(piece.key())] = text_of(piece.block.shape);
    }
  }
  SavedFile saved{.file = internal::file_name(holds, rank), .holds = holds, .rank = rank};
  SafetensorsWriter writer(folder + "/" + saved.file, std::move(entries), metadata);
  for (const OwnedPiece& piece : pieces) {
    const at::Tensor values = piece.flat.contiguous().cpu();
    writer.write(
        {static_cast<const std::byte*>(values.const_data_ptr()),
         static_cast<std::size_t>(values.numel() * values.element_size())}
    );
  }
  const WrittenFile written = writer.finish();
  saved.size_bytes = written.size_bytes;
  saved.checksum = internal::checksum_text(written.checksum);
  return saved;
}

// Parameters without elements are owned by nobody; rank 0 lists them so that readers find them.
void add_empty_parameters(
    std::vector<OwnedPiece>& pieces, const std::vector<SavedParameter>& parameters
) {
  for (const SavedParameter& parameter : parameters) {
    if (parameter.numel() == 0) {
      const at::Tensor none = at::empty({0}, at::TensorOptions().dtype(parameter.dtype));
      pieces.push_back(
          {.prefix = {},
           .name = parameter.name,
           .block = layout::whole_block(parameter.shape),
           .range = {},
           .flat = none}
      );
    }
  }
}

Json file_json(const SavedFile& file) {
  return {
      {"file", file.file},
      {"holds", file.holds == Holds::kOptimizer},
      {"rank", file.rank},
      {"bytes", file.size_bytes},
      {"checksum", file.checksum}
  };
}

SavedFile file_from(const Json& json) {
  return {
      .file = json.at("file"),
      .holds = json.at("holds").get<bool>() ? Holds::kOptimizer : Holds::kWeights,
      .rank = json.at("rank"),
      .size_bytes = json.at("bytes"),
      .checksum = json.at("checksum")
  };
}

// Step counts and names of state for each parameter that has elements on this rank.
Json optimizer_json(
    const std::vector<shard::UpdateTensor>& updates,
    const optim::ShardedOptimizer& optimizer,
    const std::vector<optim::StateTensor>& state
) {
  const std::vector<std::int64_t> steps = optimizer.update_steps();
  HS_CHECK_EQ(
      steps.size(),
      updates.size(),
      "checkpoint: the optimizer '",
      optimizer.kind(),
      "' was built over another model"
  );
  std::vector<std::vector<std::string>> names(updates.size());
  for (const optim::StateTensor& each : state) {
    names[each.update].push_back(each.name);
  }
  Json json = Json::object();
  for (std::size_t i = 0; i < updates.size(); ++i) {
    for (const shard::UpdatePiece& piece : updates[i].pieces) {
      json[piece.name] = {{"steps", steps[i]}, {"state", names[i]}};
    }
  }
  return json;
}

// What one rank writes; the result is what rank 0 needs to know of it.
std::string write_own(
    const std::string& folder,
    const shard::ShardedModel& model,
    optim::ShardedOptimizer* optimizer,
    const comm::ProcessMesh& mesh
) {
  Json json = {{"files", Json::array()}, {"optimizer", Json::object()}};
  const std::vector<shard::UpdateTensor> updates = model.update_parameters();
  std::vector<OwnedPiece> weights = internal::weight_pieces(updates);
  std::vector<OwnedPiece> state;
  if (optimizer != nullptr) {
    const std::vector<optim::StateTensor> tensors = optimizer->state_tensors();
    state = internal::state_pieces(updates, tensors);
    json["optimizer"] = optimizer_json(updates, *optimizer, tensors);
  }
  for (std::vector<OwnedPiece>* pieces : {&weights, &state}) {
    std::erase_if(*pieces, [](const OwnedPiece& piece) { return !piece.is_first; });
  }
  if (mesh.rank() == 0) {
    const std::vector<SavedParameter> parameters = internal::list_parameters(model);
    check_names(parameters);
    add_empty_parameters(weights, parameters);
  }
  if (internal::is_writer(model)) {
    if (!weights.empty()) {
      json["files"].push_back(
          file_json(write_pieces(folder, Holds::kWeights, mesh.rank(), std::move(weights)))
      );
    }
    if (!state.empty()) {
      json["files"].push_back(
          file_json(write_pieces(folder, Holds::kOptimizer, mesh.rank(), std::move(state)))
      );
    }
  }
  return json.dump();
}

void add_optimizer_columns(
    std::vector<SavedParameter>& parameters, const std::vector<Json>& ranks
) {
  std::map<std::string, SavedParameter*> by_name;
  for (SavedParameter& parameter : parameters) {
    by_name[parameter.name] = &parameter;
  }
  std::map<std::string, Json> known;
  for (const Json& rank : ranks) {
    for (const auto& [name, columns] : rank.at("optimizer").items()) {
      const auto [first, is_new] = known.emplace(name, columns);
      HS_CHECK(
          is_new || first->second == columns,
          "checkpoint: ranks disagree on the optimizer's state of parameter '",
          name,
          "': ",
          first->second.dump(),
          " and ",
          columns.dump(),
          HS_HINT("every rank must step the same optimizer equally often")
      );
      by_name.at(name)->steps = columns.at("steps");
      by_name.at(name)->state = columns.at("state").get<std::vector<std::string>>();
    }
  }
}

Manifest make_manifest(
    const shard::ShardedModel& model,
    const optim::ShardedOptimizer* optimizer,
    const TrainState& state,
    const comm::ProcessMesh& mesh,
    const std::vector<std::string>& results
) {
  std::vector<Json> ranks;
  for (const std::string& result : results) {
    ranks.push_back(Json::parse(result));
  }
  Manifest manifest;
  manifest.state = state;
  manifest.library_version = HS_LIBRARY_VERSION;
  manifest.world_size = mesh.mesh().size();
  for (const layout::MeshAxis& axis : mesh.mesh().axes()) {
    manifest.axes.emplace_back(axis.name, axis.size);
  }
  const shard::Engine& engine = model.engine();
  const layout::PlaneLayouts& layouts = engine.parallel().layouts;
  manifest.strategy =
      engine.options().layouts ? "stated" : layout::to_text(engine.options().strategy);
  manifest.layouts = {
      {"runtime", layout::to_text(layouts.runtime, mesh.mesh())},
      {"gradient", layout::to_text(layouts.gradient, mesh.mesh())},
      {"update", layout::to_text(layouts.update, mesh.mesh())}
  };
  manifest.parameters = internal::list_parameters(model);
  if (optimizer != nullptr) {
    manifest.optimizer =
        internal::SavedOptimizer{.kind = optimizer->kind(), .steps = optimizer->num_steps()};
    add_optimizer_columns(manifest.parameters, ranks);
  }
  for (const Json& rank : ranks) {
    for (const Json& file : rank.at("files")) {
      manifest.files.push_back(file_from(file));
    }
  }
  return manifest;
}

// From here on the checkpoint is whole, and after the last line it is the newest.
void commit(
    const std::string& directory,
    const std::string& name,
    const std::string& partial,
    const Manifest& manifest
) {
  internal::replace_text(
      partial + "/" + internal::kManifestFile, internal::write_manifest(manifest)
  );
  internal::replace_folder(partial, directory + "/" + name);
  internal::sync_folder(directory);
  internal::replace_text(directory + "/" + internal::kLatestFile, name + "\n");
}

}  // namespace

std::string save(
    const std::string& directory,
    const shard::ShardedModel& model,
    optim::ShardedOptimizer* optimizer,
    const TrainState& state,
    const comm::ProcessMesh& mesh
) {
  const ErrorContext context("checkpoint save");
  const c10::NoGradGuard no_grad;
  HS_CHECK_GE(state.step, 0, "checkpoint: TrainState::step counts steps");
  HS_CHECK(!directory.empty(), "checkpoint: the directory is '", directory, "'");
  comm::Communicator& ranks = *mesh.world().world_communicator();
  const std::string name = internal::step_name(state.step);
  const std::string partial = directory + "/" + name + internal::kPartialSuffix;
  const bool is_first = mesh.rank() == 0;
  internal::together(ranks, [&] {
    if (is_first) {
      internal::make_folders(directory);
      internal::remove_tree(partial);
      internal::make_folders(partial);
    }
    return std::string();
  });
  try {
    const std::vector<std::string> results =
        internal::together(ranks, [&] { return write_own(partial, model, optimizer, mesh); });
    internal::together(ranks, [&] {
      if (is_first) {
        commit(directory, name, partial, make_manifest(model, optimizer, state, mesh, results));
      }
      return std::string();
    });
  } catch (const Error& error) {
    // Not after a lost peer: others may still be writing.
    if (is_first && error.code() != ErrorCode::kComm) {
      std::error_code ignored;
      std::filesystem::remove_all(partial, ignored);
    }
    throw;
  }
  return directory + "/" + name;
}

}  // namespace hypershard::checkpoint
