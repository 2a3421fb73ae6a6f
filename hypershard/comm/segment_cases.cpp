// Why: cases of fused reductions, wire dtypes and the counters of traffic, for every back end; see
// collective_cases.h.
#include <cmath>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>

#include "hypershard/comm/collective_cases.h"
#include "hypershard/comm/internal/case_values.h"
#include "hypershard/core/error.h"

namespace hypershard::comm::testing_cases {
namespace {

/// Values of very different size at indices that begin at `first`: every rounding shows.
at::Tensor rough(std::int64_t first, std::int64_t numel, int rank) {
  const at::Tensor base = at::arange(first, first + numel, at::kFloat).mul_(0.37F).add_(1 + rank);
  return at::sin(base).mul_(std::pow(10.0F, static_cast<float>((rank * 5) % 7)));
}

/// The sum of all ranks' rough values, each rounded to `wire` first.
at::Tensor rough_sum(int size, std::int64_t first, std::int64_t numel, at::ScalarType wire) {
  at::Tensor sum = rough(first, numel, 0).to(wire).to(at::kFloat);
  for (int rank = 1; rank < size; ++rank) {
    sum.add_(rough(first, numel, rank).to(wire).to(at::kFloat));
  }
  return sum;
}

/// Counts of a few segments: `scale` sets how large the largest is.
std::vector<Counts> segment_counts(int size, std::int64_t scale) {
  std::vector<Counts> segments = count_cases(size);
  Counts large;
  Counts one_rank(index(size), 0);
  for (int rank = 0; rank < size; ++rank) {
    large.push_back(scale + 301 * rank);
  }
  one_rank.back() = 5;
  segments.insert(segments.begin() + 1, large);
  segments.push_back(one_rank);
  segments.insert(segments.end(), 12, Counts(index(size), 3));
  return segments;
}

struct Segments {
  std::vector<ReduceSegment> parts;
  std::vector<at::Tensor> expected;
};

Segments filled_segments(
    Communicator& c,
    const std::vector<Counts>& counts,
    at::ScalarType dtype,
    at::ScalarType output_dtype,
    ReduceOp op
) {
  Segments made;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const std::int64_t begin = begin_of(counts[i], c.rank());
    const std::int64_t count = counts[i][index(c.rank())];
    const at::Tensor input = filled(total(counts[i]), c.rank(), dtype);
    const bool in_place = i % 2 == 0 && dtype == output_dtype;
    made.parts.push_back(
        {in_place ? input.narrow(0, begin, count) : garbage(count, output_dtype), input, counts[i]}
    );
    made.expected.push_back(joined(c.size(), begin, count, op));
  }
  return made;
}

}  // namespace

void check_segments(Communicator& c) {
  struct Case {
    at::ScalarType dtype, output_dtype;
    ReduceOp op;
    std::int64_t scale;
  };
  const Case cases[] = {
      {at::kFloat, at::kFloat, ReduceOp::kSum, 700'000},
      {at::kFloat, at::kFloat, ReduceOp::kMax, 1000},
      {at::kBFloat16, at::kBFloat16, ReduceOp::kSum, 5000},
      {at::kBFloat16, at::kFloat, ReduceOp::kSum, 200'000},
      {at::kDouble, at::kDouble, ReduceOp::kSum, 5000},
      {at::kFloat, at::kDouble, ReduceOp::kMin, 100},
  };
  for (const Case& tested : cases) {
    const Segments made = filled_segments(
        c, segment_counts(c.size(), tested.scale), tested.dtype, tested.output_dtype, tested.op
    );
    const auto logged = c.log().size();
    const WorkPtr work = c.reduce_scatter(made.parts, tested.op, "bucket");
    HS_ASSERT(c.log().size() == logged + 1, "log entries: ", c.log().size() - logged);
    work->wait();
    for (std::size_t i = 0; i < made.parts.size(); ++i) {
      expect_equal(c, concat_text("segment ", i), made.parts[i].output, made.expected[i]);
    }
    work->wait_released();
    for (const ReduceSegment& part : made.parts) {
      at::Tensor(part.input).zero_();
    }
  }
  // Several buckets at once, of a few units each, then of one.
  for (const std::size_t num_units : {std::size_t{3}, std::size_t{1}}) {
    std::vector<Segments> buckets;
    std::vector<WorkPtr> works;
    for (int bucket = 0; bucket < 5; ++bucket) {
      const std::vector<Counts> counts(num_units, Counts(index(c.size()), 2000 + bucket));
      buckets.push_back(filled_segments(c, counts, at::kFloat, at::kFloat, ReduceOp::kSum));
      works.push_back(c.reduce_scatter(buckets.back().parts, ReduceOp::kSum, "bucket"));
    }
    for (std::size_t bucket = buckets.size(); bucket-- > 0;) {
      works[bucket]->wait();
      for (std::size_t i = 0; i < num_units; ++i) {
        expect_equal(c, "bucket", buckets[bucket].parts[i].output, buckets[bucket].expected[i]);
      }
    }
  }
  c.barrier("end")->wait();
}

void check_wire_dtype(Communicator& c) {
  const Reduction mean{ReduceOp::kSum, 4, at::kBFloat16};
  // Two cuts of the same values: the bits must not depend on who owns a slice.
  for (const std::int64_t shift : {0, 900}) {
    Counts counts(index(c.size()), 150'001);
    counts.front() += shift;
    const Counts small(index(c.size()), 7);
    const std::int64_t begin = begin_of(counts, c.rank());
    const std::int64_t count = counts[index(c.rank())];
    const at::Tensor input = rough(0, total(counts), c.rank());
    const at::Tensor little = rough(50, total(small), c.rank());
    const std::vector<ReduceSegment> segments = {
        {garbage(count, at::kFloat), input, counts},
        {garbage(7, at::kFloat), little, small},
        {little.narrow(0, 7 * c.rank(), 7), little, small}
    };
    at::Tensor alone = garbage(count, at::kFloat);
    const CommStats before = c.stats();
    c.reduce_scatter({segments.data(), 2}, mean, "wire")->wait();
    c.reduce_scatter(alone, input, counts, mean, "wire")->wait();
    const CommStats after = c.stats();
    const LogEntry entry = c.log().entries().back();
    HS_ASSERT(entry.dtype == "bfloat16", entry.dtype);
    HS_ASSERT(entry.payload_bytes == 2 * total(counts), entry.payload_bytes);
    const std::int64_t sent = 2 * (2 * (total(counts) - count) + total(small) - 7);
    HS_ASSERT(after.sent_bytes - before.sent_bytes == sent, after.sent_bytes, " not ", sent);
    c.reduce_scatter({segments.data() + 2, 1}, mean, "wire")->wait();
    const at::Tensor expected = rough_sum(c.size(), begin, count, at::kBFloat16).div_(4);
    const at::Tensor few = rough_sum(c.size(), 50 + 7 * c.rank(), 7, at::kBFloat16).div_(4);
    expect_equal(c, "wire", segments[0].output, expected);
    expect_equal(c, "wire, small", segments[1].output, few);
    expect_equal(c, "wire, in place", segments[2].output, few);
    expect_equal(c, "wire, alone", alone, expected);
    at::Tensor wide = garbage(count, at::kDouble);
    c.reduce_scatter(wide, input, counts, {ReduceOp::kMax, 1, at::kBFloat16}, "wire")->wait();
  }
  for (const std::int64_t numel : {1, 5000, 400'003}) {
    at::Tensor all = rough(0, numel, c.rank());
    c.all_reduce(all, mean, "wire")->wait();
    const at::Tensor sum = rough_sum(c.size(), 0, numel, at::kBFloat16).div_(4);
    expect_equal(c, "wire of all_reduce", all, sum.to(at::kBFloat16).to(at::kFloat));
    HS_ASSERT(c.log().entries().back().payload_bytes == 2 * numel, numel);
  }
  // The tensors' own dtype is no rounding.
  at::Tensor same = rough(0, 10, c.rank());
  c.all_reduce(same, {ReduceOp::kSum, 1, at::kFloat}, "wire")->wait();
  expect_equal(c, "wire of its own", same, rough_sum(c.size(), 0, 10, at::kFloat));
  c.barrier("end")->wait();
}

void check_traffic(Communicator& c) {
  const std::int64_t others = c.size() - 1;
  CommStats before = c.stats();
  const auto expect_moved =
      [&](const char* what, std::int64_t sent, std::int64_t received, const WorkPtr& work) {
        work->wait();
        const CommStats now = c.stats();
        HS_ASSERT(
            now.sent_bytes - before.sent_bytes == sent &&
                now.received_bytes - before.received_bytes == received,
            what,
            " on rank ",
            c.rank(),
            " sent ",
            now.sent_bytes - before.sent_bytes,
            " and got ",
            now.received_bytes - before.received_bytes,
            " (expected ",
            sent,
            " and ",
            received,
            ")"
        );
        before = now;
      };
  Counts counts;
  for (int rank = 0; rank < c.size(); ++rank) {
    counts.push_back(10 + 1000 * rank);
  }
  const std::int64_t own = counts[index(c.rank())];
  const std::int64_t rest = total(counts) - own;
  at::Tensor whole = at::ones({total(counts)});
  const at::Tensor slice = at::ones({own});
  expect_moved("all_gather", 4 * own * others, 4 * rest, c.all_gather(whole, slice, counts));
  expect_moved(
      "reduce_scatter", 4 * rest, 4 * own * others, c.reduce_scatter(slice, whole, counts)
  );
  const std::vector<ReduceSegment> segments = {
      {at::ones({own}), at::ones({total(counts)}), counts}, {slice, whole, counts}
  };
  expect_moved("segments", 8 * rest, 8 * own * others, c.reduce_scatter(segments));
  const std::int64_t even = 64 * 2048;
  at::Tensor all = at::ones({even * c.size()});
  const std::int64_t slices = 4 * even * others;
  expect_moved("all_reduce", 2 * slices, 2 * slices, c.all_reduce(all));
  at::Tensor few = at::ones({10});
  expect_moved("small all_reduce", 40 * others, 40 * others, c.all_reduce(few));
  expect_moved("all_to_all", slices, slices, c.all_to_all(at::empty_like(all), all));
  const bool root = c.rank() == 0;
  expect_moved("broadcast", root ? 40 * others : 0, root ? 0 : 40, c.broadcast(few, 0));
  expect_moved("barrier", 0, 0, c.barrier());
}

}  // namespace hypershard::comm::testing_cases
