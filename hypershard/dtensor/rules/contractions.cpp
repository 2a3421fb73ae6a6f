// Matrix products and their kin: a summed index that is cut in both factors gives Partial(sum), an
// index of one factor stays cut in the product. Linear in each factor.
#include <cctype>
#include <map>

#include "hypershard/dtensor/rules/dim_building.h"
#include "hypershard/dtensor/rules/families.h"

namespace hypershard::dtensor::rules {
namespace {

/// Labels `left` [..., m, k] and `right` [..., k, n] as torch's matmul does and returns the
/// product's dimensions; vectors lack m or n.
Dims multiply(DimMap& map, const RuleCall& call, int left, int right) {
  const bool left_is_vector = call.rank(left) == 1;
  const bool right_is_vector = call.rank(right) == 1;
  const Dim summed = Dim::of(map.new_label(Reduction::kSum));
  share_dim(map, left, call.rank(left) - 1, summed);
  share_dim(map, right, right_is_vector ? 0 : call.rank(right) - 2, summed);
  const int batched[] = {left_is_vector ? -1 : left, right_is_vector ? -1 : right};
  Dims dims = broadcast(map, call, batched, 2);
  if (!left_is_vector) {
    dims.push_back(label_dim(map, left, call.rank(left) - 2));
  }
  if (!right_is_vector) {
    dims.push_back(label_dim(map, right, call.rank(right) - 1));
  }
  return dims;
}

/// Lets `operand` be added to a result of dimensions `dims`, broadcasting.
void add_to(DimMap& map, const RuleCall& call, int operand, const Dims& dims) {
  const int added = static_cast<int>(dims.size()) - call.rank(operand);
  for (int dim = 0; operand >= 0 && dim < call.rank(operand); ++dim) {
    // Stretched only where the result is longer than 1.
    const bool is_inside = dim + added >= 0;
    if (is_inside &&
        (call.shape(operand)[at(dim)] != 1 || global_size(map, call, dims[at(dim + added)]) == 1)) {
      share_dim(map, operand, dim, dims[at(dim + added)]);
    }
  }
}

DimMap product(const RuleCall& call) {
  DimMap map = whole_map(call);
  Dims dims = multiply(map, call, 0, 1);
  map.outputs = {{std::move(dims)}};
  map.terms = {{0, 1}};
  return map;
}

/// `self + factor1 @ factor2`
DimMap added_product(const RuleCall& call) {
  DimMap map = whole_map(call);
  Dims dims = multiply(map, call, 1, 2);
  add_to(map, call, 0, dims);
  map.outputs = {{std::move(dims)}};
  map.terms = {{0}, {1, 2}};
  return map;
}

DimMap linear_layer(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int input = 0;
  const int weight = 1;
  const int bias = call.operand("bias");
  Dims dims;
  for (int dim = 0; dim + 1 < call.rank(input); ++dim) {
    dims.push_back(label_dim(map, input, dim));
  }
  const Dim summed = label_dim(map, input, call.rank(input) - 1, Reduction::kSum);
  share_dim(map, weight, call.rank(weight) - 1, summed);
  map.terms = {{input, weight}};
  if (call.rank(weight) == 2) {
    dims.push_back(label_dim(map, weight, 0));
  }
  if (bias >= 0) {
    add_to(map, call, bias, dims);
    map.terms.push_back({bias});
  }
  map.outputs = {{std::move(dims)}};
  return map;
}

DimMap outer(const RuleCall& call) {
  DimMap map = whole_map(call);
  map.outputs = {{{label_dim(map, 0, 0), label_dim(map, 1, 0)}}};
  map.terms = {{0, 1}};
  return map;
}

/// One operand's part of an equation.
struct Letters {
  std::string before;  ///< the ellipsis
  bool has_ellipsis = false;
  std::string after;
};

Letters parse_letters(const std::string& text) {
  Letters letters;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '.') {
      letters.has_ellipsis = true;
      i += 2;
    } else if (std::isalpha(static_cast<unsigned char>(text[i])) != 0) {
      (letters.has_ellipsis ? letters.after : letters.before) += text[i];
    }
  }
  return letters;
}

class Einsum {
 public:
  explicit Einsum(const RuleCall& call)
      : call_(call), map_(whole_map(call)), operands_(call.operand_list("tensors")) {}

  DimMap run() {
    const std::string equation = call_.text("equation");
    const std::size_t arrow = equation.find("->");
    std::vector<int> all;
    const std::string inputs = equation.substr(0, arrow);
    for (std::size_t begin = 0, i = 0; i < operands_.size(); ++i) {
      const std::size_t end = std::min(inputs.find(',', begin), inputs.size());
      label(operands_[i], parse_letters(inputs.substr(begin, end - begin)));
      all.push_back(operands_[i]);
      begin = end + 1;
    }
    const Letters result =
        arrow == std::string::npos ? implied() : parse_letters(equation.substr(arrow + 2));
    map_.outputs = {{result_dims(result)}};
    map_.terms = {all};
    return std::move(map_);
  }

 private:
  void label(int operand, const Letters& letters) {
    const int num_named = static_cast<int>(letters.before.size() + letters.after.size());
    const int num_rest = call_.rank(operand) - num_named;
    int dim = 0;
    for (const char letter : letters.before) {
      share(operand, dim++, letter);
    }
    for (int i = 0; i < num_rest; ++i) {
      // Ellipses are aligned at their ends; numbers from the end cannot meet letters.
      share(operand, dim++, static_cast<char>(num_rest - i));
      num_ellipsis_ = std::max(num_ellipsis_, num_rest);
    }
    for (const char letter : letters.after) {
      share(operand, dim++, letter);
    }
  }

  void share(int operand, int dim, char letter) {
    const std::int64_t size = call_.shape(operand)[at(dim)];
    ++uses_[letter];
    if (size == 1 && sizes_[letter] > 1) {
      return;  // stretched
    }
    if (size != 1 && sizes_[letter] == 1) {
      labels_.erase(letter);  // earlier operands were stretched, and keep a label of their own
    }
    sizes_[letter] = size;
    if (!labels_.contains(letter)) {
      labels_[letter] = map_.new_label(Reduction::kSum);
    }
    share_dim(map_, operand, dim, Dim::of(labels_[letter]));
  }

  Letters implied() const {
    Letters letters;
    letters.has_ellipsis = true;
    for (const auto& [letter, uses] : uses_) {
      if (uses == 1 && std::isalpha(static_cast<unsigned char>(letter)) != 0) {
        letters.after += letter;
      }
    }
    return letters;
  }

  Dims result_dims(const Letters& letters) {
    Dims dims;
    for (const char letter : letters.before) {
      dims.push_back(Dim::of(labels_[letter]));
    }
    for (int i = num_ellipsis_; letters.has_ellipsis && i > 0; --i) {
      dims.push_back(Dim::of(labels_[static_cast<char>(i)]));
    }
    for (const char letter : letters.after) {
      dims.push_back(Dim::of(labels_[letter]));
    }
    return dims;
  }

  const RuleCall& call_;
  DimMap map_;
  std::vector<int> operands_;
  std::map<char, int> labels_;
  std::map<char, std::int64_t> sizes_;
  std::map<char, int> uses_;
  int num_ellipsis_ = 0;
};

}  // namespace

void add_contractions(internal::RuleRegistry& registry) {
  const auto add = [&](const char* name, OpRule rule) {
    registry.add(std::string("aten::") + name, "contractions", std::move(rule));
  };
  for (const char* name : {"mm", "bmm", "matmul", "mv", "dot", "vdot", "linalg_matmul"}) {
    add(name, product);
  }
  for (const char* name : {"addmm", "baddbmm", "addmv"}) {
    add(name, added_product);
  }
  add("linear", linear_layer);
  for (const char* name : {"outer", "ger"}) {
    add(name, outer);
  }
  add("einsum", [](const RuleCall& call) { return Einsum(call).run(); });
}

}  // namespace hypershard::dtensor::rules
