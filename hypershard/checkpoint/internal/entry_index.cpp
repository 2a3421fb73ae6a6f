// See entry_index.h.
#include "hypershard/checkpoint/internal/entry_index.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include "hypershard/checkpoint/internal/files.h"
#include "hypershard/checkpoint/internal/model_table.h"
#include "hypershard/core/error.h"

namespace hypershard::checkpoint::internal {

namespace {

// Converted piece by piece, so that another dtype costs little memory.
constexpr std::int64_t kConvertNumel = std::int64_t{1} << 18;
constexpr const char* kOlderHint = "load an older checkpoint of the same folder";

bool parse_number(std::string_view text, std::int64_t& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() && number >= 0;
}

void copy_bytes(const at::Tensor& target, std::span<const std::byte> source) {
  if (!source.empty()) {
    std::memcpy(target.mutable_data_ptr(), source.data(), source.size());
  }
}

// Entries need not be aligned, so their bytes are copied and never viewed.
void copy_converting(
    const at::Tensor& target, std::span<const std::byte> source, c10::ScalarType dtype
) {
  if (target.scalar_type() == dtype && target.device().is_cpu()) {
    copy_bytes(target, source);
    return;
  }
  const c10::NoGradGuard no_grad;
  const auto item = c10::elementSize(dtype);
  const at::Tensor staged =
      at::empty({std::min(target.numel(), kConvertNumel)}, at::TensorOptions().dtype(dtype));
  for (std::int64_t done = 0; done < target.numel(); done += kConvertNumel) {
    const std::int64_t count = std::min(kConvertNumel, target.numel() - done);
    const at::Tensor part = staged.narrow(0, 0, count);
    copy_bytes(
        part,
        source.subspan(
            static_cast<std::size_t>(done) * item, static_cast<std::size_t>(count) * item
        )
    );
    target.narrow(0, done, count).copy_(part);
  }
}

void check_size(const MappedFile& file, const SavedFile& saved) {
  if (file.bytes().size() != saved.size_bytes) {
    HS_FAIL(
        IoError,
        "checkpoint: ",
        file.path(),
        ": torn or altered: ",
        file.bytes().size(),
        " bytes long; expected ",
        saved.size_bytes,
        HS_HINT(kOlderHint)
    );
  }
}

}  // namespace

std::string entry_name(const std::string& key, layout::Range range, std::int64_t numel) {
  if (range == layout::Range{0, numel}) {
    return key;
  }
  return key + "@" + std::to_string(range.begin) + ":" + std::to_string(range.end);
}

std::pair<std::string, layout::Range> parse_entry_name(std::string_view name) {
  const std::size_t at = name.rfind('@');
  const std::size_t colon = name.rfind(':');
  layout::Range range;
  if (at == std::string_view::npos || colon == std::string_view::npos || colon < at ||
      !parse_number(name.substr(at + 1, colon - at - 1), range.begin) ||
      !parse_number(name.substr(colon + 1), range.end) || range.end <= range.begin) {
    return {std::string(name), {}};
  }
  return {std::string(name.substr(0, at)), range};
}

std::string shape_key(const std::string& key) {
  return "shape:" + key;
}

SafetensorsFile open_file(const std::string& folder, const SavedFile& saved) {
  const std::string path = folder + "/" + saved.file;
  check_size(MappedFile(path), saved);  // first: a torn file should be called torn, not malformed
  return SafetensorsFile(path);
}

void verify_file(const std::string& folder, const SavedFile& saved) {
  const MappedFile file(folder + "/" + saved.file);
  check_size(file, saved);
  const auto* data = reinterpret_cast<const char*>(file.bytes().data());
  const std::string found = checksum_text(checksum_of({data, file.bytes().size()}));
  if (found != saved.checksum) {
    HS_FAIL(
        IoError,
        "checkpoint: ",
        file.path(),
        ": altered: its checksum is ",
        found,
        "; expected ",
        saved.checksum,
        HS_HINT(kOlderHint)
    );
  }
}

EntryIndex::EntryIndex(const std::string& folder, const Manifest& manifest, Holds holds) {
  for (const SavedParameter& parameter : manifest.parameters) {
    add_keys(parameter, holds);
  }
  for (const SavedFile& saved : manifest.files) {
    if (saved.holds == holds) {
      files_.push_back(open_file(folder, saved));
    }
  }
  for (const SafetensorsFile& file : files_) {
    for (const SafetensorsEntry& entry : file.entries()) {
      add_entry(file, entry);
    }
  }
  check_complete(folder);
}

void EntryIndex::add_keys(const SavedParameter& parameter, Holds holds) {
  const Tensor tensor{
      .shape = parameter.shape, .dtype = parameter.dtype, .numel = parameter.numel(), .sources = {}
  };
  if (holds == Holds::kWeights) {
    keys_.push_back(parameter.name);
    tensors_[parameter.name] = tensor;
    return;
  }
  for (const std::string& state : parameter.state) {
    keys_.push_back(state + "/" + parameter.name);
    tensors_[keys_.back()] = tensor;
  }
}

void EntryIndex::add_entry(const SafetensorsFile& file, const SafetensorsEntry& entry) {
  const std::string place = entry.name + " in " + file.path();
  layout::Range range;
  auto found = tensors_.find(entry.name);
  if (found != tensors_.end()) {
    range = {0, found->second.numel};
  } else {
    const auto [key, cut] = parse_entry_name(entry.name);
    range = cut;
    found = tensors_.find(key);
    if (found == tensors_.end() || cut.numel() == 0) {
      problems_.push_back("unexpected " + place);
      return;
    }
  }
  Tensor& tensor = found->second;
  const bool is_whole = range == layout::Range{0, tensor.numel};
  const std::vector<std::int64_t> shape =
      is_whole ? tensor.shape : std::vector<std::int64_t>{range.numel()};
  if (entry.dtype != tensor.dtype || entry.shape != shape || range.end > tensor.numel) {
    problems_.push_back(concat_text(
        place,
        " is ",
        safetensors_dtype(entry.dtype),
        " ",
        entry.shape,
        " (expected ",
        safetensors_dtype(tensor.dtype),
        " ",
        shape,
        ", elements below ",
        tensor.numel,
        ")"
    ));
    return;
  }
  if (range.numel() > 0) {
    tensor.sources.push_back({.range = range, .file = &file, .entry = &entry});
  }
}

void EntryIndex::check_complete(const std::string& folder) {
  for (const std::string& key : keys_) {
    Tensor& tensor = tensors_[key];
    std::sort(tensor.sources.begin(), tensor.sources.end(), [](const Source& a, const Source& b) {
      return a.range.begin < b.range.begin;
    });
    std::int64_t end = 0;
    for (const Source& source : tensor.sources) {
      if (source.range.begin != end) {
        break;
      }
      end = source.range.end;
    }
    const bool ends_last = tensor.sources.empty() || tensor.sources.back().range.end == end;
    if (end != tensor.numel || !ends_last) {
      problems_.push_back(concat_text(
          key, ": element ", end, " of ", tensor.numel, " is in no entry, or one before it in two"
      ));
    }
  }
  if (!problems_.empty()) {
    HS_FAIL(
        IoError,
        "checkpoint: ",
        folder,
        ": ",
        problems_.size(),
        " entries are not what the manifest says: ",
        list_text(problems_)
    );
  }
}

const EntryIndex::Tensor& EntryIndex::find(const std::string& key) const {
  const auto found = tensors_.find(key);
  if (found == tensors_.end()) {
    HS_FAIL(IoError, "checkpoint: there is no entry '", key, "' among ", keys_.size());
  }
  return found->second;
}

void EntryIndex::read(const std::string& key, layout::Range range, const at::Tensor& flat) const {
  const Tensor& tensor = find(key);
  HS_ASSERT(flat.numel() == range.numel() && flat.is_contiguous(), "checkpoint: ", key);
  const auto item = static_cast<std::int64_t>(c10::elementSize(tensor.dtype));
  auto source = std::upper_bound(
      tensor.sources.begin(),
      tensor.sources.end(),
      range.begin,
      [](std::int64_t begin, const Source& each) { return begin < each.range.end; }
  );
  for (; source != tensor.sources.end() && source->range.begin < range.end; ++source) {
    const layout::Range part = layout::intersect(range, source->range);
    const std::span<const std::byte> bytes = source->file->data(*source->entry);
    copy_converting(
        flat.narrow(0, part.begin - range.begin, part.numel()),
        bytes.subspan(
            static_cast<std::size_t>((part.begin - source->range.begin) * item),
            static_cast<std::size_t>(part.numel() * item)
        ),
        tensor.dtype
    );
  }
}

at::Tensor EntryIndex::read_whole(const std::string& key) const {
  const Tensor& tensor = find(key);
  const at::Tensor whole = at::empty(tensor.shape, at::TensorOptions().dtype(tensor.dtype));
  read(key, {0, tensor.numel}, whole.view({-1}));
  return whole;
}

}  // namespace hypershard::checkpoint::internal
