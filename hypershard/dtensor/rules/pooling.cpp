// Pooling and resampling of images: batch and channels are free, images whole.
#include <cmath>

#include "hypershard/dtensor/rules/dim_building.h"
#include "hypershard/dtensor/rules/families.h"
#include "hypershard/dtensor/rules/spatial_size.h"

namespace hypershard::dtensor::rules {
namespace {

/// Leaves the last dimensions whole, of the given sizes, and the others free.
DimMap images(const RuleCall& call, const std::vector<std::int64_t>& sizes, int num_outputs) {
  DimMap map = whole_map(call);
  Dims dims;
  for (int dim = 0; dim < call.rank(0) - static_cast<int>(sizes.size()); ++dim) {
    dims.push_back(label_dim(map, 0, dim));
  }
  for (const std::int64_t size : sizes) {
    dims.push_back(Dim::whole(size));
  }
  map.outputs.assign(at(num_outputs), {dims});
  map.takes_empty = false;
  return map;
}

DimMap pool(const RuleCall& call, int num_spatial, bool is_average, int num_outputs) {
  Window window{
      .kernel = repeated(call.integers("kernel_size"), num_spatial, 1),
      .stride = call.integers("stride"),
      .padding = repeated(call.integers("padding"), num_spatial, 0),
      .dilation = repeated(
          call.find("dilation") != nullptr ? call.integers("dilation")
                                           : std::vector<std::int64_t>{},
          num_spatial,
          1
      ),
      .is_ceil = call.flag("ceil_mode")
  };
  window.stride = window.stride.empty() ? window.kernel : repeated(window.stride, num_spatial, 1);
  std::vector<std::int64_t> sizes;
  for (int i = 0; i < num_spatial; ++i) {
    const int dim = call.rank(0) - num_spatial + i;
    sizes.push_back(window_count(call.shape(0)[at(dim)], window, at(i)));
  }
  DimMap map = images(call, sizes, num_outputs);
  if (is_average) {
    linear(map, 0);
  } else if (num_outputs == 1) {
    map.terms = {{0}};
    map.passes = {.sum = false, .max = true, .min = false};
  }
  return map;
}

DimMap adaptive(const RuleCall& call, int num_spatial, bool is_average, int num_outputs) {
  DimMap map = images(call, repeated(call.integers("output_size"), num_spatial, 1), num_outputs);
  if (is_average) {
    linear(map, 0);
  }
  return map;
}

DimMap upsample(const RuleCall& call, int num_spatial) {
  std::vector<std::int64_t> sizes;
  if (call.has("output_size")) {
    sizes = call.integers("output_size");
  } else {
    const std::vector<double> factors = call.numbers("scale_factors");
    for (int i = 0; i < num_spatial; ++i) {
      const int dim = call.rank(0) - num_spatial + i;
      const auto size = static_cast<double>(call.shape(0)[at(dim)]);
      sizes.push_back(static_cast<std::int64_t>(std::floor(size * factors[at(i)])));
    }
  }
  DimMap map = images(call, sizes, 1);
  linear(map, 0);
  return map;
}

DimMap channel_shuffle(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int whole[] = {1};
  Dims dims = label_all(map, call, 0, whole);
  map.outputs = {{std::move(dims)}};
  moves(map, 0);
  return map;
}

}  // namespace

void add_pooling(internal::RuleRegistry& registry) {
  const auto add = [&](const std::string& name, OpRule rule) {
    registry.add("aten::" + name, "pooling and resampling", std::move(rule));
  };
  for (int spatial = 1; spatial <= 3; ++spatial) {
    const std::string rank = std::to_string(spatial) + "d";
    add("avg_pool" + rank,
        [spatial](const RuleCall& call) { return pool(call, spatial, true, 1); });
    add("max_pool" + rank,
        [spatial](const RuleCall& call) { return pool(call, spatial, false, 1); });
    add("max_pool" + rank + "_with_indices",
        [spatial](const RuleCall& call) { return pool(call, spatial, false, 2); });
    add("adaptive_avg_pool" + rank,
        [spatial](const RuleCall& call) { return adaptive(call, spatial, true, 1); });
    add("adaptive_max_pool" + rank,
        [spatial](const RuleCall& call) { return adaptive(call, spatial, false, 2); });
    add("upsample_nearest" + rank,
        [spatial](const RuleCall& call) { return upsample(call, spatial); });
  }
  add("_adaptive_avg_pool2d", [](const RuleCall& call) { return adaptive(call, 2, true, 1); });
  add("upsample_linear1d", [](const RuleCall& call) { return upsample(call, 1); });
  for (const char* name : {"upsample_bilinear2d", "upsample_bicubic2d"}) {
    add(name, [](const RuleCall& call) { return upsample(call, 2); });
  }
  add("channel_shuffle", channel_shuffle);
  add("native_channel_shuffle", channel_shuffle);
}

}  // namespace hypershard::dtensor::rules
