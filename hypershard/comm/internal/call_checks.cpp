// Why: see call_checks.h.
#include "hypershard/comm/internal/call_checks.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <numeric>

#include "hypershard/comm/internal/dtype_text.h"
#include "hypershard/core/error.h"

namespace hypershard::comm::internal {
namespace {

bool is_arithmetic(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 ||
         dtype == at::kHalf;
}

/// Checks that a reduction of `input` values may be left in `output`: same dtype or a wider one.
void check_reduce_dtypes(const Subject& subject, at::ScalarType output, at::ScalarType input) {
  check_reducible(subject, input);
  const bool half = input == at::kBFloat16 || input == at::kHalf;
  const bool fits = output == input || output == at::kDouble || (output == at::kFloat && half);
  HS_CHECK(
      fits && is_arithmetic(output),
      subject,
      ": the output's dtype is narrower than the input's: output ",
      dtype_text(output),
      ", input ",
      dtype_text(input),
      " (expected the same or a wider floating dtype)"
  );
}

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}

const std::byte* address_of(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

}  // namespace

std::string to_text(const Subject& subject) {
  std::string text = "comm: " + to_text(subject.op);
  text += subject.unit.empty() ? "" : concat_text(" of unit '", subject.unit, "'");
  text += " on '" + subject.info.name + "'";
  text += subject.segment < 0 ? "" : concat_text(", segment ", subject.segment);
  return text;
}

void check_tensor(const Subject& subject, std::string_view name, const at::Tensor& tensor) {
  HS_CHECK(tensor.defined(), subject, ": `", name, "` is an undefined tensor");
  HS_CHECK(
      tensor.layout() == at::kStrided && tensor.is_contiguous(),
      subject,
      ": `",
      name,
      "` is not contiguous: sizes ",
      tensor.sizes(),
      tensor.layout() == at::kStrided ? concat_text(", strides ", tensor.strides())
                                      : ", not strided",
      HS_HINT("pass the flat buffer, or a contiguous copy")
  );
}

void check_wire(const Subject& subject, at::ScalarType dtype, Reduction& reduction) {
  if (!reduction.wire || *reduction.wire == dtype) {
    reduction.wire.reset();
    return;
  }
  HS_CHECK(
      dtype == at::kFloat && *reduction.wire == at::kBFloat16,
      subject,
      ": values of ",
      dtype_text(dtype),
      " cannot travel as ",
      dtype_text(*reduction.wire),
      " (expected bfloat16 for float32, or the tensors' own dtype)"
  );
}

at::Tensor flat(const at::Tensor& tensor) {
  if (tensor.dim() == 1 && !tensor.requires_grad()) {
    return tensor;
  }
  return tensor.detach().view({tensor.numel()});
}

void check_same(const Subject& subject, const at::Tensor& output, const at::Tensor& input) {
  HS_CHECK(
      output.device() == input.device(),
      subject,
      ": tensors on two devices: output on ",
      output.device().str(),
      ", input on ",
      input.device().str()
  );
  HS_CHECK(
      output.scalar_type() == input.scalar_type(),
      subject,
      ": dtypes differ: output ",
      dtype_text(output.scalar_type()),
      ", input ",
      dtype_text(input.scalar_type())
  );
}

void check_reducible(const Subject& subject, at::ScalarType dtype) {
  HS_CHECK(
      is_arithmetic(dtype),
      subject,
      ": cannot reduce ",
      dtype_text(dtype),
      " (expected float64, float32, bfloat16 or float16)",
      HS_HINT("convert to a floating dtype, or gather and reduce locally")
  );
}

void check_divisor(const Subject& subject, double divisor) {
  HS_CHECK(
      std::isfinite(divisor) && divisor != 0,
      subject,
      ": a result cannot be divided by ",
      divisor,
      " (expected a finite number other than 0)"
  );
}

std::vector<std::int64_t> full_counts(
    const Subject& subject,
    std::string_view name,
    std::span<const std::int64_t> counts,
    std::int64_t numel,
    std::string_view whole
) {
  const auto size = static_cast<std::int64_t>(subject.info.global_ranks.size());
  if (counts.empty()) {
    HS_CHECK(
        numel % size == 0,
        subject,
        ": `",
        whole,
        "` of ",
        numel,
        " elements cannot be cut evenly over ",
        size,
        " ranks",
        HS_HINT("pass `", name, "`")
    );
    return std::vector<std::int64_t>(static_cast<std::size_t>(size), numel / size);
  }
  HS_CHECK_EQ(
      static_cast<std::int64_t>(counts.size()),
      size,
      subject,
      ": `",
      name,
      "` needs one entry a rank, got ",
      counts
  );
  HS_CHECK(
      std::all_of(counts.begin(), counts.end(), [](std::int64_t count) { return count >= 0; }),
      subject,
      ": `",
      name,
      "` has a negative entry: ",
      counts
  );
  const std::int64_t total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  HS_CHECK_EQ(total, numel, subject, ": `", name, "` ", counts, " do not add up to `", whole, "`");
  return {counts.begin(), counts.end()};
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0 || a.is_meta() || b.is_meta()) {
    return false;
  }
  return address_of(a) < address_of(b) + bytes_of(b) && address_of(b) < address_of(a) + bytes_of(a);
}

void check_overlap(
    const Subject& subject,
    std::string_view part_name,
    const at::Tensor& part,
    std::string_view whole_name,
    const at::Tensor& whole,
    std::span<const std::int64_t> counts
) {
  if (!overlap(part, whole)) {
    return;
  }
  const std::int64_t offset =
      std::accumulate(counts.begin(), counts.begin() + subject.info.rank, std::int64_t{0});
  const auto slice = offset * static_cast<std::int64_t>(whole.element_size());
  const bool same = part.scalar_type() == whole.scalar_type();
  HS_CHECK(
      same && address_of(part) == address_of(whole) + slice,
      subject,
      ": `",
      part_name,
      "` overlaps `",
      whole_name,
      "` at byte ",
      address_of(part) - address_of(whole),
      " (in place it must be this rank's slice, at byte ",
      slice,
      ", of the same dtype)"
  );
}

ReduceSegment checked_segment(
    const Subject& subject,
    const at::Tensor& output,
    const at::Tensor& input,
    std::span<const std::int64_t> counts
) {
  check_tensor(subject, "output", output);
  check_tensor(subject, "input", input);
  check_reduce_dtypes(subject, output.scalar_type(), input.scalar_type());
  HS_CHECK(
      output.device() == input.device(),
      subject,
      ": tensors on two devices: output on ",
      output.device().str(),
      ", input on ",
      input.device().str()
  );
  ReduceSegment segment{flat(output), flat(input)};
  segment.counts = full_counts(subject, "counts", counts, input.numel(), "input");
  const int rank = subject.info.rank;
  HS_CHECK_EQ(
      output.numel(),
      segment.counts[static_cast<std::size_t>(rank)],
      subject,
      ": `output` does not have this rank's count of elements (counts ",
      segment.counts,
      ")"
  );
  check_overlap(subject, "output", segment.output, "input", segment.input, segment.counts);
  return segment;
}

void check_same_dtypes(
    const Subject& subject, const ReduceSegment& first, const ReduceSegment& segment
) {
  const bool same = segment.input.scalar_type() == first.input.scalar_type() &&
                    segment.output.scalar_type() == first.output.scalar_type() &&
                    segment.input.device() == first.input.device();
  HS_CHECK(
      same,
      subject,
      " is unlike the first: input ",
      dtype_text(segment.input.scalar_type()),
      " on ",
      segment.input.device().str(),
      ", output ",
      dtype_text(segment.output.scalar_type()),
      " (expected input ",
      dtype_text(first.input.scalar_type()),
      " on ",
      first.input.device().str(),
      ", output ",
      dtype_text(first.output.scalar_type()),
      ")",
      HS_HINT("reduce tensors of other dtypes in a call of their own")
  );
}

void check_segments_apart(const Subject& subject, const std::vector<ReduceSegment>& segments) {
  struct Span {
    const std::byte* begin;
    const std::byte* end;
    std::size_t segment;
  };
  std::vector<Span> spans;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    for (const at::Tensor* tensor : {&segments[i].input, &segments[i].output}) {
      if (tensor->numel() > 0 && !tensor->is_meta()) {
        const std::byte* const begin = address_of(*tensor);
        spans.push_back({begin, begin + bytes_of(*tensor), i});
      }
    }
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
    return a.begin != b.begin ? std::less<>()(a.begin, b.begin) : a.segment < b.segment;
  });
  const Span* furthest = nullptr;  // an output in place lies inside its input
  for (const Span& span : spans) {
    HS_CHECK(
        furthest == nullptr || furthest->segment == span.segment || span.begin >= furthest->end,
        subject,
        ": segments ",
        furthest->segment,
        " and ",
        span.segment,
        " overlap, by ",
        furthest->end - span.begin,
        " bytes (expected memory of their own)"
    );
    if (furthest == nullptr || span.end > furthest->end) {
      furthest = &span;
    }
  }
}

}  // namespace hypershard::comm::internal
