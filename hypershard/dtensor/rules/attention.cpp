// Attention: batch and heads are free, and so are queries unless a mask is implied by their
// position; keys are summed over by a softmax and must be whole. Linear in the values.
#include "hypershard/dtensor/rules/dim_building.h"
#include "hypershard/dtensor/rules/families.h"

namespace hypershard::dtensor::rules {
namespace {

class Attention {
 public:
  explicit Attention(const RuleCall& call)
      : call_(call),
        map_(whole_map(call)),
        mask_(call.operand("attn_mask")),
        num_batch_(call.rank(kQuery) - 2) {}

  DimMap run() {
    Dims batch = label_batch();
    if (map_.refusal) {
      return std::move(map_);
    }
    Dims dims = batch;
    dims.push_back(label_queries());
    Dims queries = dims;
    // The fused kernel wants queries and values of one width, so neither may be cut.
    const int width = call_.rank(kValue) - 1;
    const bool is_fused = call_.name() == "aten::_scaled_dot_product_flash_attention_for_cpu";
    dims.push_back(
        is_fused ? Dim::whole(call_.shape(kValue)[at(width)]) : label_dim(map_, kValue, width)
    );
    map_.outputs = {{std::move(dims)}};
    map_.is_random = call_.number("dropout_p") > 0.0;
    if (call_.name() == "aten::scaled_dot_product_attention") {
      map_.terms = {{kValue}};
    } else if (call_.name() == "aten::_scaled_dot_product_attention_math") {
      queries.push_back(Dim::whole(call_.shape(kKey)[at(call_.rank(kKey) - 2)]));
      add_weights(std::move(queries));
    } else {
      add_weights(std::move(queries));
    }
    return std::move(map_);
  }

 private:
  static constexpr int kQuery = 0;
  static constexpr int kKey = 1;
  static constexpr int kValue = 2;

  /// A second output that does not depend on the values.
  void add_weights(Dims dims) {
    std::vector<int> from = {kQuery, kKey};
    if (mask_ >= 0) {
      from.push_back(mask_);
    }
    map_.terms = {{kValue}};
    map_.outputs.push_back({std::move(dims), true, std::move(from)});
  }

  Dims label_batch() {
    if (!call_.flag("enable_gqa") || num_batch_ < 1) {
      const int all[] = {kQuery, kKey, kValue, mask_};
      return broadcast(map_, call_, all, 2);
    }
    // Several query heads share one head of keys and values, side by side.
    Dims dims;
    for (int dim = 0; dim + 1 < num_batch_; ++dim) {
      dims.push_back(label_dim(map_, kQuery, dim));
      share_dim(map_, kKey, dim, dims.back());
      share_dim(map_, kValue, dim, dims.back());
    }
    const std::int64_t heads = call_.shape(kQuery)[at(num_batch_ - 1)];
    const std::int64_t shared_heads = call_.shape(kKey)[at(num_batch_ - 1)];
    const Dim shared = label_dim(map_, kKey, num_batch_ - 1);
    share_dim(map_, kValue, num_batch_ - 1, shared);
    dims.push_back(Dim::of(shared.label, shared_heads > 0 ? heads / shared_heads : 1));
    share_dim(map_, kQuery, num_batch_ - 1, dims.back());
    share_mask(dims);
    return dims;
  }

  void share_mask(const Dims& batch) {
    if (mask_ < 0) {
      return;
    }
    const int added = num_batch_ - (call_.rank(mask_) - 2);
    for (int dim = 0; dim + 2 < call_.rank(mask_); ++dim) {
      if (call_.shape(mask_)[at(dim)] != 1) {
        share_dim(map_, mask_, dim, batch[at(dim + added)]);
      }
    }
  }

  Dim label_queries() {
    const std::int64_t size = call_.shape(kQuery)[at(num_batch_)];
    if (call_.flag("is_causal")) {
      return Dim::whole(size);
    }
    const Dim queries = label_dim(map_, kQuery, num_batch_);
    if (mask_ >= 0 && call_.shape(mask_)[at(call_.rank(mask_) - 2)] == size && size != 1) {
      share_dim(map_, mask_, call_.rank(mask_) - 2, queries);
    }
    return queries;
  }

  const RuleCall& call_;
  DimMap map_;
  int mask_;
  int num_batch_;
};

}  // namespace

void add_attention(internal::RuleRegistry& registry) {
  for (const char* name :
       {"scaled_dot_product_attention",
        "_scaled_dot_product_attention_math",
        "_scaled_dot_product_flash_attention_for_cpu"}) {
    registry.add(std::string("aten::") + name, "attention", [](const RuleCall& call) {
      return Attention(call).run();
    });
  }
}

}  // namespace hypershard::dtensor::rules
