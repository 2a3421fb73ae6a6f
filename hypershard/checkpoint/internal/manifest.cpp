// See manifest.h. Keys keep their order, so that the same state gives the same bytes.
#include "hypershard/checkpoint/internal/manifest.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <set>

#include <nlohmann/json.hpp>

#include "hypershard/checkpoint/internal/checksum.h"
#include "hypershard/checkpoint/internal/files.h"
#include "hypershard/checkpoint/internal/safetensors_format.h"
#include "hypershard/checkpoint/safetensors.h"
#include "hypershard/core/error.h"

namespace hypershard::checkpoint::internal {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "hypershard.checkpoint";
constexpr int kVersion = 1;

template <class... Parts>
[[noreturn]] void broken(const std::string& path, const Parts&... parts) {
  HS_FAIL(IoError, "checkpoint: ", path, ": ", parts...);
}

Json parameters_json(const Manifest& manifest) {
  Json list = Json::array();
  for (const SavedParameter& parameter : manifest.parameters) {
    Json row = {
        {"name", parameter.name},
        {"shape", parameter.shape},
        {"dtype", safetensors_dtype(parameter.dtype)}
    };
    if (!parameter.aliases.empty()) {
      row["aliases"] = parameter.aliases;
    }
    if (manifest.optimizer) {
      row["optimizer_steps"] = parameter.steps;
      row["state"] = parameter.state;
    }
    list.push_back(std::move(row));
  }
  return list;
}

Json files_json(const Manifest& manifest) {
  Json list = Json::array();
  for (const SavedFile& file : manifest.files) {
    list.push_back(
        {{"file", file.file},
         {"holds", to_text(file.holds)},
         {"rank", file.rank},
         {"bytes", file.size_bytes},
         {"checksum", file.checksum}}
    );
  }
  return list;
}

Json mesh_json(const Manifest& manifest) {
  Json axes = Json::array();
  for (const auto& [name, size] : manifest.axes) {
    axes.push_back({{"name", name}, {"size", size}});
  }
  Json layouts = Json::object();
  for (const auto& [plane, layout] : manifest.layouts) {
    layouts[plane] = layout;
  }
  return {
      {"world_size", manifest.world_size},
      {"axes", std::move(axes)},
      {"strategy", manifest.strategy},
      {"layouts", std::move(layouts)}
  };
}

// The product of a shape's sizes must stay far from overflow in every later computation.
void check_shape(const SavedParameter& parameter, const std::string& path) {
  constexpr std::int64_t kMost = std::int64_t{1} << 56;
  std::int64_t numel = 1;
  for (const std::int64_t size : parameter.shape) {
    if (size < 0 || __builtin_mul_overflow(numel, size, &numel) || numel > kMost) {
      broken(path, "parameter '", parameter.name, "' has shape ", parameter.shape);
    }
  }
}

SavedParameter parameter_from(const Json& row, const std::string& path) {
  SavedParameter parameter{
      .name = row.at("name"),
      .aliases = row.value("aliases", std::vector<std::string>()),
      .shape = row.at("shape"),
      .steps = row.value("optimizer_steps", std::int64_t{0}),
      .state = row.value("state", std::vector<std::string>())
  };
  const std::string dtype = row.at("dtype");
  const auto known = find_dtype(dtype);
  if (!known) {
    broken(
        path, "parameter '", parameter.name, "' has dtype ", dtype, "; known are ", dtype_names()
    );
  }
  parameter.dtype = *known;
  check_shape(parameter, path);
  if (parameter.steps < 0) {
    broken(path, "parameter '", parameter.name, "' has ", parameter.steps, " optimizer steps");
  }
  return parameter;
}

SavedFile file_from(const Json& row, const std::string& path) {
  SavedFile file{
      .file = row.at("file"),
      .rank = row.at("rank"),
      .size_bytes = row.at("bytes"),
      .checksum = row.at("checksum")
  };
  const std::string holds = row.at("holds");
  file.holds = holds == "optimizer" ? Holds::kOptimizer : Holds::kWeights;
  // A name that differs could point outside the checkpoint's folder.
  if (holds != to_text(file.holds) || file.rank < 0 ||
      file.file != file_name(file.holds, file.rank)) {
    broken(path, "names a file '", file.file, "' of rank ", file.rank, " for ", holds);
  }
  return file;
}

void check_names(const Manifest& manifest, const std::string& path) {
  std::set<std::string> names;
  const auto add = [&](const std::string& name) {
    if (!names.insert(name).second) {
      broken(path, "names '", name, "' twice");
    }
  };
  for (const SavedParameter& parameter : manifest.parameters) {
    add(parameter.name);
    std::for_each(parameter.aliases.begin(), parameter.aliases.end(), add);
  }
  names.clear();
  for (const SavedFile& file : manifest.files) {
    add(file.file);
  }
}

Manifest manifest_from(const Json& json, const std::string& path) {
  Manifest manifest;
  manifest.library_version = json.at("library");
  manifest.state.step = json.at("step");
  manifest.state.seed = json.at("seed");
  manifest.state.config_toml = json.at("config");
  const Json& mesh = json.at("mesh");
  manifest.world_size = mesh.at("world_size");
  for (const Json& axis : mesh.at("axes")) {
    manifest.axes.emplace_back(axis.at("name"), axis.at("size"));
  }
  manifest.strategy = mesh.at("strategy");
  for (const auto& [plane, layout] : mesh.at("layouts").items()) {
    manifest.layouts.emplace_back(plane, layout);
  }
  if (const Json& optimizer = json.at("optimizer"); !optimizer.is_null()) {
    manifest.optimizer =
        SavedOptimizer{.kind = optimizer.at("kind"), .steps = optimizer.at("steps")};
  }
  for (const Json& row : json.at("parameters")) {
    manifest.parameters.push_back(parameter_from(row, path));
  }
  for (const Json& row : json.at("files")) {
    manifest.files.push_back(file_from(row, path));
  }
  check_names(manifest, path);
  return manifest;
}

}  // namespace

std::int64_t SavedParameter::numel() const {
  std::int64_t numel = 1;
  for (const std::int64_t size : shape) {
    numel *= size;
  }
  return numel;
}

std::string to_text(Holds holds) {
  return holds == Holds::kWeights ? "weights" : "optimizer";
}

std::string file_name(Holds holds, int rank) {
  std::array<char, 32> digits{};
  const int length = std::snprintf(digits.data(), digits.size(), "-%05d.safetensors", rank);
  return to_text(holds) + std::string(digits.data(), static_cast<std::size_t>(length));
}

std::string write_manifest(const Manifest& manifest) {
  Json json;
  json["format"] = kFormat;
  json["version"] = kVersion;
  json["library"] = manifest.library_version;
  json["step"] = manifest.state.step;
  json["seed"] = manifest.state.seed;
  json["config"] = manifest.state.config_toml;
  json["mesh"] = mesh_json(manifest);
  json["optimizer"] = nullptr;
  if (manifest.optimizer) {
    json["optimizer"] = {{"kind", manifest.optimizer->kind}, {"steps", manifest.optimizer->steps}};
  }
  json["parameters"] = parameters_json(manifest);
  json["files"] = files_json(manifest);
  json["checksum"] = checksum_text(checksum_of(json.dump()));
  return json.dump(2) + "\n";
}

Manifest parse_manifest(std::string_view text, const std::string& path) {
  Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || json.value("format", Json()) != kFormat) {
    broken(path, "is no manifest of a checkpoint, or a torn one (", text.size(), " bytes)");
  }
  const Json version = json.value("version", Json());
  if (version != kVersion) {
    broken(
        path,
        "has format version ",
        version.dump(),
        "; this build reads ",
        kVersion,
        HS_HINT("load it with the version of the library that wrote it")
    );
  }
  const Json written = json.value("checksum", Json());
  json.erase("checksum");
  const std::string found = checksum_text(checksum_of(json.dump()));
  if (written != found) {
    broken(path, "was altered or torn: its checksum is ", found, ", not ", written.dump());
  }
  try {
    return manifest_from(json, path);
  } catch (const nlohmann::json::exception& error) {
    broken(path, "is no manifest of version ", kVersion, ": ", error.what());
  }
}

Manifest read_manifest(const std::string& folder) {
  const std::string path = folder + "/" + kManifestFile;
  return parse_manifest(read_text(path), path);
}

}  // namespace hypershard::checkpoint::internal
