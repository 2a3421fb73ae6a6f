// See model_table.h.
#include "hypershard/checkpoint/internal/model_table.h"

#include <algorithm>
#include <map>

#include "hypershard/core/error.h"
#include "hypershard/shard/engine.h"

namespace hypershard::checkpoint::internal {

namespace {

constexpr std::size_t kListed = 10;

std::vector<std::string> names_of(const SavedParameter& parameter) {
  std::vector<std::string> names = parameter.aliases;
  names.push_back(parameter.name);
  std::sort(names.begin(), names.end());
  return names;
}

// Says what differs between two parameters of one name; "" if nothing does.
std::string difference(const SavedParameter& model, const SavedParameter& saved) {
  if (model.shape != saved.shape) {
    return concat_text(
        model.name, " has shape ", saved.shape, " in the checkpoint, ", model.shape, " in the model"
    );
  }
  if (names_of(model) != names_of(saved)) {
    return concat_text(
        model.name,
        " is one tensor under the names ",
        names_of(saved),
        " in the checkpoint, ",
        names_of(model),
        " in the model"
    );
  }
  if (c10::isFloatingType(model.dtype) != c10::isFloatingType(saved.dtype)) {
    return concat_text(
        model.name,
        " is ",
        c10::toString(saved.dtype),
        " in the checkpoint, ",
        c10::toString(model.dtype),
        " in the model"
    );
  }
  return {};
}

void add_pieces(
    std::vector<OwnedPiece>& pieces,
    const shard::UpdateTensor& update,
    const at::Tensor& tensor,
    const std::string& prefix
) {
  for (const shard::UpdatePiece& piece : update.pieces) {
    pieces.push_back(
        {.prefix = prefix,
         .name = piece.name,
         .block = piece.block,
         .range = piece.range,
         .flat = tensor.narrow(0, piece.offset, piece.range.numel()),
         .is_first = piece.is_first}
    );
  }
}

}  // namespace

std::vector<SavedParameter> list_parameters(const shard::ShardedModel& model) {
  std::vector<SavedParameter> parameters;
  for (const auto& unit : model.engine().units()) {
    for (const auto& group : unit->groups()) {
      for (const shard::LogicalParam& param : group->params()) {
        parameters.push_back(
            {.name = param.name,
             .aliases = param.aliases,
             .shape = param.part.block.shape,
             .dtype = group->dtypes().update}
        );
      }
    }
  }
  return parameters;
}

std::vector<OwnedPiece> weight_pieces(const std::vector<shard::UpdateTensor>& updates) {
  std::vector<OwnedPiece> pieces;
  for (const shard::UpdateTensor& update : updates) {
    add_pieces(pieces, update, update.tensor, "");
  }
  return pieces;
}

std::vector<OwnedPiece> state_pieces(
    const std::vector<shard::UpdateTensor>& updates, const std::vector<optim::StateTensor>& state
) {
  std::vector<OwnedPiece> pieces;
  for (const optim::StateTensor& each : state) {
    HS_CHECK_LT(
        each.update,
        updates.size(),
        "checkpoint: optimizer state '",
        each.name,
        "' is of another model"
    );
    const shard::UpdateTensor& update = updates[each.update];
    HS_CHECK_EQ(
        each.tensor.numel(),
        update.tensor.numel(),
        "checkpoint: optimizer state '",
        each.name,
        "' does not lie like update tensor '",
        update.name,
        "'",
        HS_HINT("pass the optimizer that was built over this model")
    );
    add_pieces(pieces, update, each.tensor, each.name + "/");
  }
  return pieces;
}

bool is_writer(const shard::ShardedModel& model) {
  const shard::DataParallel& parallel = model.engine().parallel();
  const auto levels = static_cast<std::ptrdiff_t>(parallel.update_levels);
  // What the update plane is not cut along, the gradient plane is not either.
  return std::all_of(parallel.summed.begin(), parallel.summed.end(), [&](const auto& axis) {
    const bool split =
        std::any_of(parallel.cuts.begin(), parallel.cuts.begin() + levels, [&](const auto& cut) {
          return cut.name == axis.name;
        });
    return split || axis.coordinate == 0;
  });
}

Match match_parameters(
    const std::vector<SavedParameter>& model, const std::vector<SavedParameter>& saved
) {
  std::map<std::string, std::size_t> by_name;
  for (std::size_t i = 0; i < saved.size(); ++i) {
    for (const std::string& name : names_of(saved[i])) {
      by_name[name] = i;
    }
  }
  Match match;
  std::vector<char> used(saved.size(), 0);
  for (const SavedParameter& parameter : model) {
    const std::vector<std::string> names = names_of(parameter);
    const auto name = std::find_if(names.begin(), names.end(), [&](const std::string& each) {
      return by_name.count(each) > 0;
    });
    match.saved_of.push_back(name == names.end() ? 0 : by_name[*name]);
    if (name == names.end()) {
      match.missing.push_back(parameter.name);
      continue;
    }
    used[match.saved_of.back()] = 1;
    const std::string text = difference(parameter, saved[match.saved_of.back()]);
    if (!text.empty()) {
      match.different.push_back(text);
    }
  }
  for (std::size_t i = 0; i < saved.size(); ++i) {
    if (used[i] == 0) {
      match.unexpected.push_back(saved[i].name);
    }
  }
  return match;
}

std::string list_text(const std::vector<std::string>& items) {
  std::string text;
  for (std::size_t i = 0; i < std::min(items.size(), kListed); ++i) {
    text += (i == 0 ? "" : ", ") + items[i];
  }
  if (items.size() > kListed) {
    text += concat_text(" and ", items.size() - kListed, " more");
  }
  return text;
}

}  // namespace hypershard::checkpoint::internal
