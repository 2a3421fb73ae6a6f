// See the header. Labels are numbers of one map; nothing here outlives a call.
#include "hypershard/dtensor/rules/dim_building.h"

#include <algorithm>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "hypershard/core/error.h"

namespace hypershard::dtensor::rules {
namespace {

std::vector<std::string> split(std::string_view text, char mark) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(mark, begin), text.size());
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

bool is_zero_or_absent(const RuleCall& call, const std::string& argument) {
  return !call.has(argument) || (call.find(argument)->isScalar() && call.number(argument) == 0.0);
}

}  // namespace

DimMap whole_map(const RuleCall& call) {
  DimMap map;
  map.operands.resize(at(call.num_operands()));
  for (int i = 0; i < call.num_operands(); ++i) {
    map.operands[at(i)].dims.assign(at(call.rank(i)), Dim::whole());
  }
  return map;
}

Dim label_dim(DimMap& map, int operand, int dim, Reduction reduction) {
  const Dim made = Dim::of(map.new_label(reduction));
  map.operands[at(operand)].dims[at(dim)] = made;
  return made;
}

bool contains(std::span<const int> dims, int dim) {
  return std::find(dims.begin(), dims.end(), dim) != dims.end();
}

Dims label_all(DimMap& map, const RuleCall& call, int operand, std::span<const int> whole) {
  Dims dims;
  for (int dim = 0; dim < call.rank(operand); ++dim) {
    dims.push_back(
        contains(whole, dim) ? Dim::whole(call.shape(operand)[at(dim)])
                             : label_dim(map, operand, dim)
    );
  }
  return dims;
}

void share_dim(DimMap& map, int operand, int dim, const Dim& like) {
  map.operands[at(operand)].dims[at(dim)] = like;
}

std::int64_t global_size(const DimMap& map, const RuleCall& call, const Dim& dim) {
  for (int i = 0; dim.label != Dim::kWhole && i < call.num_operands(); ++i) {
    const Dims& dims = map.operands[at(i)].dims;
    for (std::size_t d = 0; d < dims.size(); ++d) {
      if (dims[d].label == dim.label) {
        return call.shape(i)[d] / dims[d].block * dim.block;
      }
    }
  }
  return dim.size;
}

Dims broadcast(DimMap& map, const RuleCall& call, std::span<const int> operands, int skip) {
  int rank = 0;
  for (const int operand : operands) {
    rank = operand < 0 ? rank : std::max(rank, call.rank(operand) - skip);
  }
  Dims dims;
  for (int i = 0; i < rank; ++i) {
    // -1 until some operand has more than one entry here.
    std::int64_t size = -1;
    const auto dim_of = [&](int operand) { return i - (rank - (call.rank(operand) - skip)); };
    for (const int operand : operands) {
      if (operand < 0 || dim_of(operand) < 0 || call.shape(operand)[at(dim_of(operand))] == 1) {
        continue;
      }
      const std::int64_t found = call.shape(operand)[at(dim_of(operand))];
      if (size >= 0 && size != found) {
        map.refusal = Refusal{
            concat_text(
                "'",
                call.operand_name(operand),
                "' has global shape ",
                call.shape(operand),
                ", which does not broadcast: its dimension ",
                dim_of(operand),
                " meets size ",
                size
            ),
            "local shapes fit by chance: redistribute the operands to layouts that cut the same "
            "dimension"
        };
        return dims;
      }
      size = found;
    }
    const Dim made = Dim::of(map.new_label());
    for (const int operand : operands) {
      if (operand >= 0 && dim_of(operand) >= 0 &&
          (size < 0 || call.shape(operand)[at(dim_of(operand))] == size)) {
        share_dim(map, operand, dim_of(operand), made);
      }
    }
    dims.push_back(made);
  }
  return dims;
}

Terms::Terms(std::string_view text) {
  for (const std::string& term : split(text, '|')) {
    terms_.push_back(split(term, '*'));
  }
}

void Terms::apply(DimMap& map, const RuleCall& call) const {
  for (const std::vector<std::string>& names : terms_) {
    std::vector<int> term;
    for (const std::string& name : names) {
      if (const int operand = call.operand(name); operand >= 0) {
        term.push_back(operand);
      }
    }
    const bool is_nothing = term.empty() && is_zero_or_absent(call, names.front());
    if (!is_nothing) {
      map.terms.push_back(std::move(term));
    }
  }
}

void moves(DimMap& map, int operand) {
  map.terms = {{operand}};
  map.passes = kMoves;
}

void linear(DimMap& map, int operand) {
  map.terms = {{operand}};
}

DimMap same_shape(const RuleCall& call) {
  DimMap map = whole_map(call);
  map.outputs = {{label_all(map, call, 0)}};
  return map;
}

bool casts_linearly(const RuleCall& call, int operand) {
  const bool is_real = at::isFloatingType(call.tensor(operand).scalar_type());
  const bool is_to_real =
      !call.has("dtype") || at::isFloatingType(static_cast<at::ScalarType>(call.integer("dtype")));
  return is_real && is_to_real;
}

}  // namespace hypershard::dtensor::rules
