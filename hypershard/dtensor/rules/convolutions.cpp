// Convolutions: a contraction over input channels, with batch, output channels and groups free.
// Spatial dimensions are whole: a piece would need its neighbours' borders.
#include <algorithm>

#include <ATen/core/ivalue.h>

#include "hypershard/dtensor/rules/dim_building.h"
#include "hypershard/dtensor/rules/families.h"
#include "hypershard/dtensor/rules/spatial_size.h"

namespace hypershard::dtensor::rules {
namespace {

class Convolution {
 public:
  explicit Convolution(const RuleCall& call)
      : call_(call),
        map_(whole_map(call)),
        bias_(call.operand("bias")),
        num_spatial_(call.rank(kWeight) - 2),
        channel_(call.rank(kInput) - num_spatial_ - 1),
        is_transposed_(
            call.name().find("transpose") != std::string_view::npos || call.flag("transposed")
        ) {}

  DimMap run() {
    Dims dims;
    if (channel_ > 0) {
      dims.push_back(label_dim(map_, kInput, 0));
    }
    dims.push_back(label_channels());
    for (int i = 0; i < num_spatial_; ++i) {
      dims.push_back(Dim::whole(spatial_size(i)));
    }
    map_.terms = {{kInput, kWeight}};
    if (bias_ >= 0) {
      share_dim(map_, bias_, 0, dims[at(channel_)]);
      map_.terms.push_back({bias_});
    }
    map_.outputs = {{std::move(dims)}};
    map_.takes_empty = false;
    return std::move(map_);
  }

 private:
  static constexpr int kInput = 0;
  static constexpr int kWeight = 1;

  /// Labels channels of input and weight, and returns the output's.
  Dim label_channels() {
    const std::int64_t in = call_.shape(kInput)[at(channel_)];
    const std::int64_t weight_in = call_.shape(kWeight)[is_transposed_ ? 0 : 1];
    const std::int64_t weight_out = call_.shape(kWeight)[is_transposed_ ? 1 : 0];
    if (call_.integer("groups", 1) == 1 && in == weight_in) {
      const Dim summed = label_dim(map_, kInput, channel_, Reduction::kSum);
      share_dim(map_, kWeight, is_transposed_ ? 0 : 1, summed);
      return label_dim(map_, kWeight, is_transposed_ ? 1 : 0);
    }
    // Groups are independent, so they may be cut; a group may not. The number of groups in the call
    // is this rank's own.
    const std::int64_t local_in = call_.local_shape(kInput)[at(channel_)];
    const std::int64_t block_in = std::max<std::int64_t>(local_in / call_.integer("groups", 1), 1);
    const std::int64_t groups = in / block_in;
    const int label = map_.new_label();
    const std::int64_t block_out =
        is_transposed_ ? weight_out : std::max<std::int64_t>(weight_out / groups, 1);
    share_dim(map_, kInput, channel_, Dim::of(label, block_in));
    share_dim(map_, kWeight, 0, Dim::of(label, is_transposed_ ? block_in : block_out));
    return Dim::of(label, block_out);
  }

  std::int64_t spatial_size(int i) const {
    const auto entry = [&](std::string_view name, std::int64_t otherwise) {
      const bool is_there = call_.has(name) && !call_.find(name)->isString();
      return repeated(
          is_there ? call_.integers(name) : std::vector<std::int64_t>{}, num_spatial_, otherwise
      );
    };
    const std::int64_t size = call_.shape(kInput)[at(channel_ + 1 + i)];
    Window window{
        .kernel = {call_.shape(kWeight).begin() + 2, call_.shape(kWeight).end()},
        .stride = entry("stride", 1),
        .padding = entry("padding", 0),
        .dilation = entry("dilation", 1)
    };
    if (is_transposed_) {
      return (size - 1) * window.stride[at(i)] - 2 * window.padding[at(i)] +
             window.dilation[at(i)] * (window.kernel[at(i)] - 1) +
             entry("output_padding", 0)[at(i)] + 1;
    }
    const bool keeps_size = call_.find("padding") != nullptr && call_.find("padding")->isString() &&
                            call_.text("padding") == "same";
    return keeps_size ? size : window_count(size, window, at(i));
  }

  const RuleCall& call_;
  DimMap map_;
  int bias_;
  int num_spatial_;
  int channel_;
  bool is_transposed_;
};

/// Unfolds patches: [N, C, H, W] -> [N, C k, L], channels outermost.
DimMap im2col(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int channel = call.rank(0) - 3;
  Window window{
      .kernel = repeated(call.integers("kernel_size"), 2, 1),
      .stride = repeated(call.integers("stride"), 2, 1),
      .padding = repeated(call.integers("padding"), 2, 0),
      .dilation = repeated(call.integers("dilation"), 2, 1)
  };
  std::int64_t windows = 1;
  for (std::size_t i = 0; i < 2; ++i) {
    windows *= window_count(call.shape(0)[at(channel + 1) + i], window, i);
  }
  Dims dims;
  for (int dim = 0; dim <= channel; ++dim) {
    dims.push_back(label_dim(map, 0, dim));
  }
  dims.back().block = window.kernel[0] * window.kernel[1];
  dims.push_back(Dim::whole(windows));
  map.outputs = {{std::move(dims)}};
  linear(map, 0);
  return map;
}

}  // namespace

void add_convolutions(internal::RuleRegistry& registry) {
  for (const char* name :
       {"conv1d",
        "conv2d",
        "conv3d",
        "convolution",
        "_convolution",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d"}) {
    registry.add(std::string("aten::") + name, "convolutions", [](const RuleCall& call) {
      return Convolution(call).run();
    });
  }
  registry.add("aten::im2col", "convolutions", im2col);
}

}  // namespace hypershard::dtensor::rules
