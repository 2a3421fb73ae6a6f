// The cases of dual_mode_bench. Each returns a line of JSON.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hypershard/comm/world.h"

namespace hypershard::bench {

/// A tensor-parallel GPT under a plan beside the same by hand: paired step times, and whether the
/// operators are the same.
std::string measure_step(const std::shared_ptr<comm::World>& world, int pairs);
/// A step under validation beside the same step in production: paired times.
std::string measure_validation(const std::shared_ptr<comm::World>& world, int pairs);
/// A tensor-parallel MLP block of `dim`, 64 tokens: forward and backward, in microseconds.
std::string measure_mlp(const std::shared_ptr<comm::World>& world, std::int64_t dim, int repeats);
/// Resolving, and applying, a plan for 80 layers and 1,024 ranks that are not there.
std::string measure_resolve(int repeats);

template <class Body>
double seconds_of(const Body& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// What is kept of samples.
struct Spread {
  double min = 0;
  double median = 0;
  std::size_t n = 0;
};
Spread summary(std::vector<double> samples, double scale);

/// Two sides of a comparison; the ratio is the median of each pair's.
struct Paired {
  Spread first, second;
  double ratio = 0;
};

template <class Json>
void to_json(Json& json, const Spread& spread) {
  json = Json{{"min", spread.min}, {"median", spread.median}, {"n", spread.n}};
}
template <class Json>
void to_json(Json& json, const Paired& paired) {
  json = Json{{"first", paired.first}, {"second", paired.second}, {"ratio", paired.ratio}};
}

/// Times `first` and `second` in turn, who begins alternating, all ranks together. In milliseconds.
template <class First, class Second>
Paired paired(
    const std::shared_ptr<comm::World>& world, int pairs, const First& first, const Second& second
) {
  std::vector<double> firsts, seconds, ratios;
  const auto timed = [&](const auto& body) {
    world->world_communicator()->barrier("bench")->wait();
    return seconds_of(body);
  };
  for (int pair = -2; pair < pairs; ++pair) {
    const bool swaps = pair % 2 != 0;
    const double before = swaps ? timed(second) : 0;
    const double a = timed(first);
    const double b = swaps ? before : timed(second);
    if (pair >= 0) {
      firsts.push_back(a);
      seconds.push_back(b);
      ratios.push_back(a / b);
    }
  }
  return {
      .first = summary(firsts, 1e3),
      .second = summary(seconds, 1e3),
      .ratio = summary(ratios, 1).median
  };
}

}  // namespace hypershard::bench
