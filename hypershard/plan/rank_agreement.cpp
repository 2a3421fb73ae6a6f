// See rank_agreement.h.
#include "hypershard/plan/rank_agreement.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>

#include "hypershard/core/error.h"
#include "hypershard/core/hash.h"
#include "hypershard/core/log.h"

namespace hypershard::plan {
namespace {

// Positions in a header; hashes by axis follow.
enum : std::size_t {
  kFarewellLength,
  kFarewellCode,
  kNumEvents,
  kEventHash,
  kNumValues,
  kNumDiffering,
  kFixed
};

constexpr std::uint64_t kMix = 0x9e3779b97f4a7c15ULL;

at::Tensor numbers(const std::vector<std::int64_t>& values) {
  at::Tensor tensor =
      at::empty({static_cast<std::int64_t>(values.size())}, at::TensorOptions().dtype(at::kLong));
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<std::int64_t>());
  return tensor;
}

at::Tensor gather(comm::Communicator& ranks, const std::vector<std::int64_t>& mine) {
  const auto columns = static_cast<std::int64_t>(mine.size());
  // A communicator of planned ranks moves nothing: there all agree.
  at::Tensor all = numbers(mine).view({1, columns}).expand({ranks.size(), columns}).contiguous();
  if (ranks.size() > 1 && columns > 0) {
    ranks.all_gather(all.view({-1}), numbers(mine), {}, "validation")->wait_released();
  }
  return all;
}

std::uint64_t hash_event(const AgreedEvent& event) {
  std::uint64_t hash = hash_bytes(event.name, hash_bytes(event.module));
  for (const layout::TensorSpec& spec : event.specs) {
    hash = hash_combine(hash, spec.shape.size());
    for (const std::int64_t size : spec.shape) {
      hash = (hash ^ static_cast<std::uint64_t>(size)) * kMix;
    }
    for (const layout::Placement& placement : spec.layout.placements) {
      const auto kind = static_cast<std::uint64_t>(placement.kind);
      const auto reduce = static_cast<std::uint64_t>(placement.reduce);
      hash = (hash ^ (kind + 16 * reduce + 256 * static_cast<std::uint64_t>(placement.dim))) * kMix;
    }
  }
  for (const c10::ScalarType dtype : event.dtypes) {
    hash = (hash ^ static_cast<std::uint64_t>(dtype)) * kMix;
  }
  return hash ^ (hash >> 29);
}

std::string event_text(const AgreedEvent& event, const layout::DeviceMesh& mesh) {
  std::string text = concat_text(event.name, " in ", event.module);
  for (std::size_t i = 0; i < event.specs.size(); ++i) {
    text += concat_text(
        i == 0 ? " on {" : ", {",
        layout::to_text(event.specs[i].layout, mesh),
        "} global ",
        event.specs[i].shape
    );
  }
  for (std::size_t i = 0; i < event.dtypes.size(); ++i) {
    text += concat_text(i == 0 ? " (" : ", ", c10::toString(event.dtypes[i]));
  }
  return event.dtypes.empty() ? text : text + ")";
}

// Eight bytes at a time in four lanes, so that hashing costs about as much as reading.
std::uint64_t hash_run(const char* data, std::size_t bytes) {
  std::array<std::uint64_t, 4> lanes{1, 2, 3, 4};
  std::size_t at = 0;
  for (; at + 32 <= bytes; at += 32) {
    for (std::size_t lane = 0; lane < 4; ++lane) {
      std::uint64_t word = 0;
      std::memcpy(&word, data + at + 8 * lane, 8);
      lanes[lane] = (lanes[lane] ^ word) * kMix;
      lanes[lane] ^= lanes[lane] >> 32;
    }
  }
  std::uint64_t hash = hash_memory(data + at, bytes - at);
  for (const std::uint64_t lane : lanes) {
    hash = hash_combine(hash, lane);
  }
  return hash;
}

}  // namespace

std::uint64_t fingerprint(const at::Tensor& tensor) {
  std::uint64_t hash = kHashSeed;
  for (const std::int64_t size : tensor.sizes()) {
    hash = hash_combine(hash, static_cast<std::uint64_t>(size));
  }
  if (tensor.is_meta() || tensor.numel() == 0) {
    return hash;
  }
  const at::Tensor values = tensor.detach().contiguous();
  return hash_combine(
      hash, hash_run(static_cast<const char*>(values.const_data_ptr()), values.nbytes())
  );
}

RankAgreement::RankAgreement(
    std::shared_ptr<comm::Communicator> everyone, const layout::DeviceMesh& mesh
)
    : everyone_(std::move(everyone)), mesh_(mesh) {
  value_hashes_.assign(mesh.axes().size(), kHashSeed);
}

void RankAgreement::add_event(AgreedEvent event) {
  event_hashes_.push_back(hash_event(event));
  event_hash_ = hash_combine(event_hash_, event_hashes_.back());
  events_.push_back(std::move(event));
}

void RankAgreement::add_value(AgreedValue value) {
  bool differs = false;
  for (std::size_t axis = 0; axis < value.axes.size(); ++axis) {
    if (mesh_.axes()[axis].size == 1) {
      value.axes[axis] = Along::kFree;
    }
    if (value.axes[axis] == Along::kEqual) {
      value_hashes_[axis] = hash_combine(value_hashes_[axis], value.hash);
    }
    differs = differs || value.axes[axis] == Along::kDiffer;
  }
  num_differing_ += differs ? 1 : 0;
  ++num_values_;
  values_.push_back(std::move(value));
}

std::vector<std::int64_t> RankAgreement::header(const Farewell& farewell) const {
  std::vector<std::int64_t> header{
      static_cast<std::int64_t>(farewell.text.size()),
      farewell.code,
      static_cast<std::int64_t>(events_.size()),
      static_cast<std::int64_t>(event_hash_),
      static_cast<std::int64_t>(values_.size()),
      num_differing_
  };
  for (const std::uint64_t hash : value_hashes_) {
    header.push_back(static_cast<std::int64_t>(hash));
  }
  return header;
}

void RankAgreement::meet() {
  if (!is_over_) {
    exchange({});
  }
}

void RankAgreement::fail(const LayoutFault& fault) {
  if (!is_over_) {
    exchange({.text = to_text(fault) + "\n" + fault.fix});
  }
  throw LayoutError(fault);  // raw-throw: carries the fault's fields
}

bool RankAgreement::tell_failure(ErrorCode code, const std::string& text) noexcept {
  if (is_over_) {
    return false;
  }
  try {
    const bool is_silent = text.empty();  // a length of zero would be an ordinary meeting
    exchange(
        {.text = is_silent ? "it gave no reason" : text, .code = 1 + static_cast<std::int64_t>(code)
        }
    );
    return true;
  } catch (const std::exception& error) {
    HS_LOG_WARN("plan: the other ranks could not be told of a failure: ", error.what());
    return false;
  }
}

void RankAgreement::exchange(const Farewell& farewell) {
  ++num_meetings_;
  // Set back at the end: whatever goes wrong here leaves the ranks out of step.
  is_over_ = true;
  const at::Tensor headers = gather(*everyone_, header(farewell));
  hear_farewells(headers, farewell);
  if (!farewell.text.empty()) {
    return;
  }
  compare_events(headers);
  if (values_differ(headers)) {
    compare_values();
  }
  forget_records();
  is_over_ = false;
}

// The lowest rank that leaves is heard by all; those that leave too go with their own words.
void RankAgreement::hear_farewells(const at::Tensor& headers, const Farewell& own) {
  const auto rows = headers.accessor<std::int64_t, 2>();
  int rank = 0;
  while (rank < everyone_->size() && rows[rank][kFarewellLength] == 0) {
    ++rank;
  }
  if (rank == everyone_->size()) {
    return;
  }
  std::string told = own.text;
  told.resize(static_cast<std::size_t>(rows[rank][kFarewellLength]));
  told = text_of_rank(rank, told);
  if (!own.text.empty()) {
    return;
  }
  if (rows[rank][kFarewellCode] > 0) {
    const auto code = static_cast<ErrorCode>(rows[rank][kFarewellCode] - 1);
    throw PeerFailure(  // raw-throw: has the other rank's code
        code,
        concat_text("plan: rank ", rank, " failed in a validated program: ", told)
    );
  }
  const std::size_t end = told.find('\n');
  throw LayoutError(  // raw-throw: carries the fault's fields
      {.module = "(root)",
       .subject = concat_text("rank ", rank),
       .operands = {},
       .what = concat_text("it refused: ", told.substr(0, end)),
       .fix = told.substr(end + 1)}
  );
}

bool RankAgreement::values_differ(const at::Tensor& headers) const {
  const auto rows = headers.accessor<std::int64_t, 2>();
  for (int rank = 0; rank < everyone_->size(); ++rank) {
    if (rows[rank][kNumDiffering] > 0) {
      return true;
    }
    for (std::size_t axis = 0; axis < value_hashes_.size(); ++axis) {
      const auto column = static_cast<std::int64_t>(kFixed + axis);
      const std::vector<std::string> axes{mesh_.axes()[axis].name};
      if (rows[rank][column] != rows[mesh_.group(axes, rank).front()][column]) {
        return true;
      }
    }
  }
  return false;
}

void RankAgreement::forget_records() {
  events_.clear();
  event_hashes_.clear();
  values_.clear();
  event_hash_ = 0;
  num_differing_ = 0;
  value_hashes_.assign(value_hashes_.size(), kHashSeed);
}

std::string RankAgreement::text_of_rank(int rank, const std::string& mine) const {
  at::Tensor bytes =
      at::empty({static_cast<std::int64_t>(mine.size())}, at::TensorOptions().dtype(at::kByte));
  std::memcpy(bytes.mutable_data_ptr(), mine.data(), mine.size());
  if (everyone_->size() > 1) {
    everyone_->broadcast(bytes, rank, "validation")->wait();
  }
  return std::string(static_cast<const char*>(bytes.const_data_ptr()), mine.size());
}

void RankAgreement::compare_events(const at::Tensor& headers) {
  const auto rows = headers.accessor<std::int64_t, 2>();
  int other = 0;
  while (other < everyone_->size() && rows[other][kEventHash] == rows[0][kEventHash] &&
         rows[other][kNumEvents] == rows[0][kNumEvents]) {
    ++other;
  }
  if (other == everyone_->size()) {
    for (int rank = 1; rank < other; ++rank) {
      HS_ASSERT(
          rows[rank][kNumValues] == rows[0][kNumValues],
          "plan: rank ",
          rank,
          " compares ",
          rows[rank][kNumValues],
          " values where rank 0 compares ",
          rows[0][kNumValues]
      );
    }
    return;
  }
  std::int64_t longest = 0;
  for (int rank = 0; rank < everyone_->size(); ++rank) {
    longest = std::max(longest, rows[rank][kNumEvents]);
  }
  std::vector<std::int64_t> mine(static_cast<std::size_t>(longest), 0);
  for (std::size_t i = 0; i < event_hashes_.size(); ++i) {
    mine[i] = static_cast<std::int64_t>(event_hashes_[i]);
  }
  const at::Tensor all = gather(*everyone_, mine);
  const auto hashes = all.accessor<std::int64_t, 2>();
  std::int64_t first = 0;
  while (first + 1 < longest && hashes[other][first] == hashes[0][first]) {
    ++first;
  }
  const auto index = static_cast<std::size_t>(first);
  std::string text = index < events_.size() ? event_text(events_[index], mesh_) : "nothing more";
  text.resize(1024, '\0');  // one length for all, so that any rank's fits the broadcast
  const std::string here = text_of_rank(0, text);
  const std::string there = text_of_rank(other, text);
  const bool known = index < events_.size();
  throw LayoutError(  // raw-throw: carries the fault's fields
      {.module = known ? events_[index].module : "(root)",
       .subject = concat_text("step ", first + 1, " since the ranks last met"),
       .operands = {},
       .what = concat_text(
           "ranks do different things: rank 0 ran ",
           here.c_str(),
           ", rank ",
           other,
           " ran ",
           there.c_str()
       ),
       .fix = "let nothing that differs between ranks (their number, data, time) decide which "
              "operators run, on which shapes and dtypes"}
  );
}

void RankAgreement::compare_values() {
  std::vector<std::int64_t> mine;
  for (const AgreedValue& value : values_) {
    mine.push_back(static_cast<std::int64_t>(value.hash));
  }
  const at::Tensor hashes = gather(*everyone_, mine);
  for (std::size_t i = 0; i < values_.size(); ++i) {
    check_value(i, hashes);
  }
}

void RankAgreement::check_value(std::size_t index, const at::Tensor& all) {
  const AgreedValue& value = values_[index];
  const auto hashes = all.accessor<std::int64_t, 2>();
  const auto column = static_cast<std::int64_t>(index);
  for (std::size_t axis = 0; axis < value.axes.size(); ++axis) {
    if (value.axes[axis] == Along::kFree) {
      continue;
    }
    const bool must_equal = value.axes[axis] == Along::kEqual;
    const std::vector<std::string> axes{mesh_.axes()[axis].name};
    for (int rank = 0; rank < everyone_->size(); ++rank) {
      for (const int peer : mesh_.group(axes, rank)) {
        const bool is_equal = hashes[rank][column] == hashes[peer][column];
        if (peer <= rank || is_equal == must_equal) {
          continue;
        }
        throw LayoutError(  // raw-throw: carries the fault's fields
            {.module = value.module,
             .subject = value.what,
             .operands = {},
             .what = concat_text(
                 "ranks ",
                 rank,
                 " and ",
                 peer,
                 must_equal ? " hold different values" : " hold the same values",
                 " along axis '",
                 axes[0],
                 must_equal ? "', on which it is Replicate" : "', on which it is cut"
             ),
             .fix = value.fix}
        );
      }
    }
  }
}

}  // namespace hypershard::plan
