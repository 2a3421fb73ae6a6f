// See buckets.h.
#include "hypershard/shard/buckets.h"

#include <algorithm>
#include <utility>

#include "hypershard/core/error.h"
#include "hypershard/shard/group.h"

namespace hypershard::shard {

namespace {

/// Sums that go together: one collective can carry them.
struct Fused {
  std::vector<SumBetween> sums;
  std::vector<GroupReduction*> groups;

  bool takes(const SumBetween& sum) const {
    const SumBetween& first = sums.front();
    return sum.segment.input.scalar_type() == first.segment.input.scalar_type() &&
           sum.segment.output.scalar_type() == first.segment.output.scalar_type() &&
           sum.how.divisor == first.how.divisor && sum.how.wire == first.how.wire;
  }
  void start(const std::string& name) {
    std::vector<comm::ReduceSegment> segments;
    segments.reserve(sums.size());
    for (SumBetween& sum : sums) {
      segments.push_back(std::move(sum.segment));
    }
    const comm::WorkPtr work = sums.front().ranks->reduce_scatter(segments, sums.front().how, name);
    for (GroupReduction* group : groups) {
      group->work = work;
    }
  }
};

void add(std::vector<Fused>& fused, SumBetween sum, GroupReduction* group) {
  auto at = std::find_if(fused.begin(), fused.end(), [&](const Fused& f) { return f.takes(sum); });
  if (at == fused.end()) {
    at = fused.emplace(fused.end());
  }
  at->sums.push_back(std::move(sum));
  at->groups.push_back(group);
}

}  // namespace

Buckets::Buckets(
    const std::vector<std::unique_ptr<Unit>>& units, const std::vector<layout::Bucket>& buckets
)
    : bucket_of_(units.size()) {
  for (const layout::Bucket& bucket : buckets) {
    const auto first = static_cast<std::size_t>(bucket.begin);
    const auto end = static_cast<std::size_t>(bucket.end);
    std::fill(bucket_of_.begin() + bucket.begin, bucket_of_.begin() + bucket.end, buckets_.size());
    State state;
    state.name =
        units[first]->path() + (end - first == 1 ? std::string() : " … " + units[end - 1]->path());
    buckets_.push_back(std::move(state));
  }
}

int Buckets::most_units() const {
  int most = 0;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const auto count = std::count(bucket_of_.begin(), bucket_of_.end(), b);
    most = std::max(most, static_cast<int>(count));
  }
  return most;
}

void Buckets::begin(const std::vector<std::unique_ptr<Unit>>& units) {
  for (State& bucket : buckets_) {
    bucket = {.name = std::move(bucket.name), .expected = 0, .posted = {}, .complete = 0};
  }
  for (const auto& unit : units) {
    buckets_[bucket_of_[static_cast<std::size_t>(unit->index())]].expected +=
        unit->has_trainable() ? 1 : 0;
  }
}

Buckets::State& Buckets::of(const UnitReduction& reduction) {
  return buckets_[bucket_of_[static_cast<std::size_t>(reduction.unit().index())]];
}

void Buckets::post(UnitReduction& reduction) {
  State& bucket = of(reduction);
  HS_ASSERT(
      static_cast<int>(bucket.posted.size()) < bucket.expected,
      "shard: unit '",
      reduction.unit().path(),
      "' was reduced twice in one backward"
  );
  bucket.posted.push_back(&reduction);
  const bool is_last = static_cast<int>(bucket.posted.size()) == bucket.expected;
  for (UnitReduction* each : bucket.posted) {
    each->set_held_up(!is_last);
  }
}

void Buckets::cross(UnitReduction& reduction) {
  State& bucket = of(reduction);
  reduction.inside_done();
  if (++bucket.complete == bucket.expected) {
    start(bucket);
  }
}

void Buckets::start(State& bucket) {
  std::vector<Fused> fused;
  for (UnitReduction* each : bucket.posted) {
    for (GroupReduction& group : each->groups()) {
      if (std::optional<SumBetween> sum = group.group->sum_between(group)) {
        add(fused, std::move(*sum), &group);
      }
    }
  }
  for (Fused& each : fused) {
    each.start(bucket.name);
  }
  for (UnitReduction* each : bucket.posted) {
    each->crosses();
  }
}

}  // namespace hypershard::shard
