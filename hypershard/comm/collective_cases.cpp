// Why: see collective_cases.h. Values are small integers, exact in every dtype: the element at
// index i of rank r is (3 i + 5 r) mod 13, bool takes its parity.
#include "hypershard/comm/collective_cases.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>

#include "hypershard/comm/internal/case_values.h"
#include "hypershard/core/error.h"

namespace hypershard::comm::testing_cases {
namespace {

bool is_float(at::ScalarType dtype) {
  return at::isFloatingType(dtype);
}

void check_all_gather(Communicator& c, at::ScalarType dtype, const Counts& counts, bool in_place) {
  at::Tensor output = garbage(total(counts), dtype);
  at::Tensor input = filled(counts[index(c.rank())], c.rank(), dtype);
  if (in_place) {
    at::Tensor slice = output.narrow(0, begin_of(counts, c.rank()), input.numel());
    slice.copy_(input);
    input = slice;
  }
  c.all_gather(output, input, counts, "gather")->wait();
  for (int rank = 0; rank < c.size(); ++rank) {
    const auto got = output.narrow(0, begin_of(counts, rank), counts[index(rank)]);
    expect_equal(c, "all_gather", got, filled(counts[index(rank)], rank, dtype));
  }
}

void check_reduce_scatter(
    Communicator& c, at::ScalarType dtype, const Counts& counts, bool in_place, ReduceOp op
) {
  at::Tensor input = filled(total(counts), c.rank(), dtype);
  const std::int64_t begin = begin_of(counts, c.rank());
  const std::int64_t count = counts[index(c.rank())];
  at::Tensor output = in_place ? input.narrow(0, begin, count) : garbage(count, dtype);
  c.reduce_scatter(output, input, counts, op, "scatter")->wait();
  expect_equal(c, "reduce_scatter", output, joined(c.size(), begin, count, op));
}

void check_wide_output(Communicator& c, at::ScalarType dtype, at::ScalarType wide) {
  const Counts counts(index(c.size()), 37);
  at::Tensor output = garbage(37, wide);
  at::Tensor input = filled(total(counts), c.rank(), dtype);
  c.reduce_scatter(output, input, counts, ReduceOp::kSum, "wide")->wait();
  expect_equal(
      c, "reduce_scatter to wide", output, joined(c.size(), 37 * c.rank(), 37, ReduceOp::kSum)
  );
}

void check_all_reduce(Communicator& c, at::ScalarType dtype, std::int64_t numel, ReduceOp op) {
  at::Tensor tensor = filled(numel, c.rank(), dtype);
  c.all_reduce(tensor, op, "reduce")->wait();
  expect_equal(c, "all_reduce", tensor, joined(c.size(), 0, numel, op));
  tensor.fill_(7);  // the caller owns it again, even if a peer is late
}

void check_broadcast(Communicator& c, at::ScalarType dtype, std::int64_t numel) {
  for (int root = 0; root < c.size(); ++root) {
    at::Tensor tensor = c.rank() == root ? filled(numel, root, dtype) : garbage(numel, dtype);
    c.broadcast(tensor, root, "broadcast")->wait();
    expect_equal(c, "broadcast", tensor, filled(numel, root, dtype));
    tensor.zero_();
  }
}

/// Rank s sends (s + 2 d) mod 5 runs of `unit` elements to rank d.
void check_all_to_all(Communicator& c, at::ScalarType dtype, std::int64_t unit, bool even) {
  const auto runs = [&](int from, int to) { return even ? unit : (from + 2 * to) % 5 * unit; };
  Counts sent;
  Counts received;
  for (int peer = 0; peer < c.size(); ++peer) {
    sent.push_back(runs(c.rank(), peer));
    received.push_back(runs(peer, c.rank()));
  }
  at::Tensor input = filled(total(sent), c.rank(), dtype);
  at::Tensor output = garbage(total(received), dtype);
  if (even) {
    c.all_to_all(output, input, {}, {}, "exchange")->wait();
  } else {
    c.all_to_all(output, input, received, sent, "exchange")->wait();
  }
  for (int peer = 0; peer < c.size(); ++peer) {
    Counts theirs;
    for (int to = 0; to < c.size(); ++to) {
      theirs.push_back(runs(peer, to));
    }
    const std::int64_t count = received[index(peer)];
    const auto expected =
        filled(total(theirs), peer, dtype).narrow(0, begin_of(theirs, c.rank()), count);
    expect_equal(c, "all_to_all", output.narrow(0, begin_of(received, peer), count), expected);
  }
}

}  // namespace

void check_all_operations(Communicator& c, at::ScalarType dtype) {
  for (const Counts& counts : count_cases(c.size())) {
    for (const bool in_place : {false, true}) {
      check_all_gather(c, dtype, counts, in_place);
      if (is_float(dtype)) {
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
          check_reduce_scatter(c, dtype, counts, in_place, op);
        }
      }
    }
  }
  for (const std::int64_t numel : {0, 1, 63, 5000, 40'001}) {
    check_broadcast(c, dtype, numel);
    if (is_float(dtype)) {
      check_all_reduce(c, dtype, numel, ReduceOp::kSum);
      check_all_reduce(c, dtype, numel, ReduceOp::kMax);
    }
  }
  for (const std::int64_t unit : {0, 1, 77, 3000}) {
    check_all_to_all(c, dtype, unit, /*even=*/false);
    check_all_to_all(c, dtype, unit, /*even=*/true);
  }
  if (dtype == at::kBFloat16 || dtype == at::kHalf) {
    check_wide_output(c, dtype, at::kFloat);
  }
  if (is_float(dtype) && dtype != at::kDouble) {
    check_wide_output(c, dtype, at::kDouble);
  }
  c.barrier("end")->wait();
}

void check_large(Communicator& c) {
  Counts counts;
  for (int rank = 0; rank < c.size(); ++rank) {
    counts.push_back(150'000 + 30'007 * rank);
  }
  for (const bool in_place : {false, true}) {
    check_all_gather(c, at::kFloat, counts, in_place);
    check_reduce_scatter(c, at::kFloat, counts, in_place, ReduceOp::kSum);
  }
  check_reduce_scatter(c, at::kBFloat16, counts, false, ReduceOp::kSum);
  check_all_reduce(c, at::kFloat, 300'017, ReduceOp::kSum);
  check_broadcast(c, at::kDouble, 200'003);
  check_all_to_all(c, at::kFloat, 40'000, /*even=*/false);
}

void check_rank_order(Communicator& c) {
  // Values of very different size: any other order of additions gives other bits.
  const std::int64_t numel = 3000 * c.size();
  const auto row = [&](int rank) {
    const at::Tensor base = at::arange(numel, at::kFloat).mul_(0.37F).add_(1 + rank);
    return at::sin(base).mul_(std::pow(10.0F, static_cast<float>((rank * 5) % 7)));
  };
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    at::Tensor expected = row(0).to(dtype).to(at::kFloat).clone();
    for (int rank = 1; rank < c.size(); ++rank) {
      expected.add_(row(rank).to(dtype).to(at::kFloat));
    }
    expected = expected.to(dtype);
    const std::int64_t count = numel / c.size();
    at::Tensor output = garbage(count, dtype);
    c.reduce_scatter(output, row(c.rank()).to(dtype), {}, ReduceOp::kSum, "order")->wait();
    expect_equal(c, "rank order", output, expected.narrow(0, count * c.rank(), count));
    at::Tensor all = row(c.rank()).to(dtype);
    c.all_reduce(all, ReduceOp::kSum, "order")->wait();
    expect_equal(c, "rank order of all_reduce", all, expected);
  }
}

namespace {

/// One collective in flight and what it must give.
struct Flight {
  WorkPtr work;
  at::Tensor input;
  at::Tensor got;
  at::Tensor expected;
  std::string what;
};

Flight launch(Communicator& c, std::mt19937_64& random) {
  constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kBFloat16};
  const at::ScalarType dtype = kTypes[random() % 3];
  const auto scale = static_cast<std::int64_t>(random() % 8 == 0 ? 20'000 : 500);
  Counts counts;
  for (int rank = 0; rank < c.size(); ++rank) {
    counts.push_back(static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(scale)));
  }
  const std::int64_t begin = begin_of(counts, c.rank());
  const std::int64_t count = counts[index(c.rank())];
  const std::int64_t all = total(counts);
  Flight flight;
  switch (random() % 6) {
    case 0: {
      flight.what = "all_gather";
      flight.input = filled(count, c.rank(), dtype);
      flight.got = garbage(all, dtype);
      std::vector<at::Tensor> parts;
      for (int rank = 0; rank < c.size(); ++rank) {
        parts.push_back(filled(counts[index(rank)], rank, dtype));
      }
      flight.expected = at::cat(parts);
      flight.work = c.all_gather(flight.got, flight.input, counts, "soak");
      break;
    }
    case 1:
      flight.what = "reduce_scatter";
      flight.input = filled(all, c.rank(), dtype);
      flight.got = garbage(count, dtype);
      flight.expected = joined(c.size(), begin, count, ReduceOp::kSum);
      flight.work = c.reduce_scatter(flight.got, flight.input, counts, ReduceOp::kSum, "soak");
      break;
    case 2:
      flight.what = "all_reduce";
      flight.got = filled(all, c.rank(), dtype);
      flight.expected = joined(c.size(), 0, all, ReduceOp::kSum);
      flight.work = c.all_reduce(flight.got, ReduceOp::kSum, "soak");
      break;
    case 4: {
      // The same counts three times, with a segment of nothing between.
      flight.what = "segments";
      const Counts none(index(c.size()), 0);
      flight.input = filled(3 * all, c.rank(), dtype);
      flight.got = garbage(3 * count, dtype);
      std::vector<ReduceSegment> segments;
      std::vector<at::Tensor> parts;
      for (int i = 0; i < 3; ++i) {
        segments.push_back(
            {flight.got.narrow(0, i * count, count), flight.input.narrow(0, i * all, all), counts}
        );
        segments.push_back({garbage(0, dtype), garbage(0, dtype), none});
        parts.push_back(joined(c.size(), i * all + begin, count, ReduceOp::kSum));
      }
      flight.expected = at::cat(parts);
      flight.work = c.reduce_scatter(segments, ReduceOp::kSum, "soak");
      break;
    }
    case 3: {
      const int root = static_cast<int>(random() % static_cast<std::uint64_t>(c.size()));
      flight.what = "broadcast";
      flight.got = c.rank() == root ? filled(all, root, dtype) : garbage(all, dtype);
      flight.expected = filled(all, root, dtype);
      flight.work = c.broadcast(flight.got, root, "soak");
      break;
    }
    default:
      flight.what = "barrier";
      flight.got = garbage(0, dtype);
      flight.expected = flight.got;
      flight.work = c.barrier("soak");
      break;
  }
  return flight;
}

}  // namespace

void check_random(Communicator& c, std::uint64_t seed, int rounds) {
  std::mt19937_64 random(seed);
  std::mt19937_64 own(
      seed * 31 + static_cast<std::uint64_t>(c.rank())
  );  // order of this rank's waits
  for (int round = 0; round < rounds; ++round) {
    std::vector<Flight> flights;
    const std::uint64_t num_flights = 1 + random() % 6;
    for (std::uint64_t i = 0; i < num_flights; ++i) {
      flights.push_back(launch(c, random));
    }
    std::shuffle(flights.begin(), flights.end(), own);
    for (Flight& flight : flights) {
      if (own() % 2 == 0) {
        flight.work->test();
      }
      flight.work->wait();
      expect_equal(c, "soak " + flight.what, flight.got, flight.expected);
      if (own() % 2 == 0) {
        flight.work->wait_released();
        if (flight.input.defined()) {
          flight.input.fill_(1);
        }
      }
    }
  }
}

namespace {

at::Tensor floats_at(const std::byte* address, std::int64_t numel) {
  // from_blob wants a mutable address; tensors over read() are not written to here.
  return at::from_blob(const_cast<std::byte*>(address), {numel}, at::TensorOptions(at::kFloat));
}

void check_buffer(Communicator& c) {
  constexpr std::int64_t kNumel = 3000;
  const auto buffer = c.allocate_shared(kNumel * c.size() * 4, "buffer");
  const at::Tensor before = floats_at(buffer->read(), kNumel * c.size());
  expect_equal(c, "zeros at birth", before, at::zeros({kNumel * c.size()}));
  c.barrier()->wait();
  floats_at(buffer->write(), kNumel * c.size())
      .narrow(0, kNumel * c.rank(), kNumel)
      .copy_(filled(kNumel, c.rank(), at::kFloat));
  c.barrier()->wait();
  for (int rank = 0; rank < c.size(); ++rank) {
    const auto got = floats_at(buffer->read(), kNumel * c.size()).narrow(0, kNumel * rank, kNumel);
    expect_equal(c, "shared buffer", got, filled(kNumel, rank, at::kFloat));
  }
  c.barrier()->wait();
}

void check_arena(Communicator& c) {
  const std::int64_t numel = 50'000 * c.size();
  const auto arena = c.allocate_symmetric(numel * 4, "arena");
  const std::int64_t staged = c.stats().staged_bytes;
  at::Tensor mine = floats_at(arena->local(), numel);
  const std::int64_t count = numel / c.size();
  for (int round = 0; round < 3; ++round) {
    mine.copy_(filled(numel, c.rank(), at::kFloat));
    at::Tensor slice = mine.narrow(0, count * c.rank(), count);
    const WorkPtr work = c.reduce_scatter(slice, mine, {}, ReduceOp::kSum, "arena");
    work->wait();
    expect_equal(
        c, "reduce in arena", slice, joined(c.size(), count * c.rank(), count, ReduceOp::kSum)
    );
    work->wait_released();
    const WorkPtr gather = c.all_gather(mine, slice, {}, "arena");
    gather->wait();
    expect_equal(c, "gather in arena", mine, joined(c.size(), 0, numel, ReduceOp::kSum));
    gather->wait_released();
  }
  mine.copy_(filled(numel, c.rank(), at::kFloat));
  c.barrier()->wait();
  for (int rank = 0; rank < c.size(); ++rank) {
    expect_equal(
        c, "peer's arena", floats_at(arena->peer(rank), numel), filled(numel, rank, at::kFloat)
    );
  }
  c.barrier()->wait();
  HS_ASSERT(c.stats().staged_bytes == staged, "staged ", c.stats().staged_bytes - staged, " bytes");
}

void check_epochs(Communicator& c) {
  const auto board = c.make_epoch_board(3, "epochs");
  const auto buffer = c.allocate_shared(8 * c.size(), "values");
  auto* values = reinterpret_cast<std::int64_t*>(buffer->write());
  for (std::uint64_t epoch = 1; epoch <= 200; ++epoch) {
    values[c.rank()] = static_cast<std::int64_t>(epoch) * 10 + c.rank();
    board->publish(0, epoch);
    board->wait_all(0, epoch, "values", "blocks.0");
    HS_ASSERT(board->reached(0, epoch) && !board->reached(2, 1), "epoch ", epoch);
    for (int rank = 0; rank < c.size(); ++rank) {
      const std::int64_t expected = static_cast<std::int64_t>(epoch) * 10 + rank;
      HS_ASSERT(values[rank] == expected, "epoch ", epoch, ": ", values[rank], " of rank ", rank);
    }
    board->publish(1, epoch);
    board->publish(1, epoch - 1);  // never lowers
    board->wait_all(1, epoch, "readers", "blocks.0");
  }
  c.barrier()->wait();
}

}  // namespace

void check_waits_work_elsewhere(Communicator& first, Communicator& second) {
  constexpr std::int64_t kNumel = 5000;
  for (int round = 0; round < 5; ++round) {
    const at::Tensor input = filled(kNumel * second.size(), second.rank(), at::kFloat);
    const at::Tensor output = at::empty({kNumel});
    const WorkPtr sum = second.reduce_scatter(output, input, {}, ReduceOp::kSum, "elsewhere");
    if (second.rank() == 0) {
      sum->wait_released();  // the others must have read
    }
    first.barrier("first")->wait();
    sum->wait_released();
    const std::int64_t begin = kNumel * second.rank();
    expect_equal(second, "elsewhere", output, joined(second.size(), begin, kNumel, ReduceOp::kSum));
  }
}

void check_shared_memory(Communicator& c) {
  check_buffer(c);
  check_arena(c);
  check_epochs(c);
}

}  // namespace hypershard::comm::testing_cases
