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

// `BEGIN:END`, not empty.
bool parse_range(std::string_view text, layout::Range& range) {
  const std::size_t colon = text.find(':');
  return colon != std::string_view::npos && parse_number(text.substr(0, colon), range.begin) &&
         parse_number(text.substr(colon + 1), range.end) && range.begin < range.end;
}

// `BEGIN:END,BEGIN:END`, one or more.
bool parse_ranges(std::string_view text, std::vector<layout::Range>& ranges) {
  while (true) {
    const std::size_t comma = text.find(',');
    layout::Range range;
    if (!parse_range(text.substr(0, comma), range)) {
      return false;
    }
    ranges.push_back(range);
    if (comma == std::string_view::npos) {
      return true;
    }
    text = text.substr(comma + 1);
  }
}

bool lies_inside(const layout::Block& block) {
  return std::equal(
      block.ranges.begin(),
      block.ranges.end(),
      block.shape.begin(),
      block.shape.end(),
      [](const layout::Range& range, std::int64_t size) { return range.end <= size; }
  );
}

bool overlap(const layout::Block& a, const layout::Block& b) {
  return std::equal(
      a.ranges.begin(),
      a.ranges.end(),
      b.ranges.begin(),
      [](const layout::Range& one, const layout::Range& other) {
        return layout::intersect(one, other).numel() > 0;
      }
  );
}

std::vector<std::int64_t> begins_of(const layout::Block& block) {
  std::vector<std::int64_t> begins;
  for (const layout::Range& range : block.ranges) {
    begins.push_back(range.begin);
    begins.push_back(range.end);
  }
  return begins;
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

std::string entry_name(const std::string& key, const layout::Block& block, layout::Range range) {
  std::string name = block.is_whole() ? key : key + to_text(block);
  if (range != layout::Range{0, block.numel()}) {
    name += "@" + std::to_string(range.begin) + ":" + std::to_string(range.end);
  }
  return name;
}

EntryName parse_entry_name(std::string_view name) {
  EntryName entry;
  const std::size_t at = name.rfind('@');
  if (at != std::string_view::npos && parse_range(name.substr(at + 1), entry.range)) {
    name = name.substr(0, at);
  } else {
    entry.range = {};
  }
  const std::size_t open = name.rfind('[');
  if (open != std::string_view::npos && name.ends_with(']') &&
      parse_ranges(name.substr(open + 1, name.size() - open - 2), entry.ranges)) {
    name = name.substr(0, open);
  } else {
    entry.ranges.clear();
  }
  entry.key = std::string(name);
  return entry;
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
  auto found = tensors_.find(entry.name);
  EntryName name{.key = entry.name};
  if (found == tensors_.end()) {
    name = parse_entry_name(entry.name);
    found = tensors_.find(name.key);
  }
  if (found == tensors_.end()) {
    problems_.push_back("unexpected " + place);
    return;
  }
  Tensor& tensor = found->second;
  layout::Block block = layout::whole_block(tensor.shape);
  if (!name.ranges.empty()) {
    block.ranges = name.ranges;
  }
  if (!lies_inside(block)) {
    problems_.push_back(concat_text(place, " is outside of shape ", tensor.shape));
    return;
  }
  const layout::Range all{0, block.numel()};
  const layout::Range range = name.range.numel() > 0 ? name.range : all;
  const std::vector<std::int64_t> shape =
      range == all ? block.local_shape() : std::vector<std::int64_t>{range.numel()};
  if (entry.dtype != tensor.dtype || entry.shape != shape || range.end > all.end) {
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
        all.end,
        ")"
    ));
    return;
  }
  if (range.numel() > 0) {
    tensor.sources.push_back(
        {.block = std::move(block), .range = range, .file = &file, .entry = &entry}
    );
  }
}

// Every element of the tensor must lie in one block, every element of a block in one range.
std::string EntryIndex::find_gap(const std::string& key, const Tensor& tensor) {
  if (tensor.sources.empty() && tensor.numel > 0) {
    return concat_text(key, ": element 0 of ", tensor.numel, " is in no entry");
  }
  std::vector<const layout::Block*> blocks;
  std::int64_t held = 0;
  for (auto at = tensor.sources.begin(); at != tensor.sources.end();) {
    const layout::Block& block = at->block;
    std::int64_t end = 0;
    while (at != tensor.sources.end() && at->block == block && at->range.begin == end) {
      end = at->range.end;
      ++at;
    }
    if (end != block.numel() || (at != tensor.sources.end() && at->block == block)) {
      return concat_text(
          key,
          block.is_whole() ? "" : to_text(block),
          ": element ",
          end,
          " of ",
          block.numel(),
          " is in no entry, or one before it in two"
      );
    }
    for (const layout::Block* other : blocks) {
      if (overlap(*other, block)) {
        return concat_text(key, ": the parts ", *other, " and ", block, " overlap");
      }
    }
    blocks.push_back(&block);
    held += end;
  }
  return held == tensor.numel
             ? ""
             : concat_text(key, ": its parts hold ", held, " of ", tensor.numel, " elements");
}

void EntryIndex::check_complete(const std::string& folder) {
  for (const std::string& key : keys_) {
    Tensor& tensor = tensors_[key];
    std::sort(tensor.sources.begin(), tensor.sources.end(), [](const Source& a, const Source& b) {
      const auto in_a = begins_of(a.block);
      const auto in_b = begins_of(b.block);
      return in_a != in_b ? in_a < in_b : a.range.begin < b.range.begin;
    });
    const std::string gap = find_gap(key, tensor);
    if (!gap.empty()) {
      problems_.push_back(gap);
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

void EntryIndex::read(
    const std::string& key, const layout::Block& block, layout::Range range, const at::Tensor& flat
) const {
  const Tensor& tensor = find(key);
  HS_ASSERT(flat.numel() == range.numel() && flat.is_contiguous(), "checkpoint: ", key);
  const auto item = static_cast<std::int64_t>(c10::elementSize(tensor.dtype));
  for (const Source& source : tensor.sources) {
    const std::span<const std::byte> bytes = source.file->data(*source.entry);
    for (const layout::BlockRun& run :
         layout::common_runs(block, range, source.block, source.range)) {
      copy_converting(
          flat.narrow(0, run.first - range.begin, run.numel),
          bytes.subspan(
              static_cast<std::size_t>((run.second - source.range.begin) * item),
              static_cast<std::size_t>(run.numel * item)
          ),
          tensor.dtype
      );
    }
  }
}

at::Tensor EntryIndex::read_whole(const std::string& key) const {
  const Tensor& tensor = find(key);
  const at::Tensor whole = at::empty(tensor.shape, at::TensorOptions().dtype(tensor.dtype));
  read(key, layout::whole_block(tensor.shape), {0, tensor.numel}, whole.view({-1}));
  return whole;
}

}  // namespace hypershard::checkpoint::internal
