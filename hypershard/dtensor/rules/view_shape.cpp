// Matches runs of a tensor's dimensions with runs of its view's dimensions, by their sizes.
#include "hypershard/dtensor/rules/view_shape.h"

#include <algorithm>

#include "hypershard/dtensor/rules/dim_building.h"

namespace hypershard::dtensor::rules {
namespace {

using Sizes = std::vector<std::int64_t>;

// Stands for a dimension that is empty on all ranks: any split of it works out.
constexpr std::int64_t kStandIn = 2 * 2 * 2 * 2 * 3 * 3 * 5 * 7 * 11;

std::int64_t product(const Sizes& sizes) {
  std::int64_t numel = 1;
  for (const std::int64_t size : sizes) {
    numel *= size;
  }
  return numel;
}

/// One run of dimensions that hold the same entries: [in_begin, in_end) became [out_begin, out_end).
struct Run {
  int in_begin = 0;
  int in_end = 0;
  int out_begin = 0;
  int out_end = 0;
};

class ViewShape {
 public:
  ViewShape(const RuleCall& call, Sizes sizes)
      : call_(call), out_(std::move(sizes)), map_(whole_map(call)) {}

  DimMap run() {
    if (!fill_in() || is_ambiguous() || !match()) {
      return refuse(
          concat_text("cannot tell which dimensions of local shape ", shown_, " come from which of '",
                      call_.operand_name(0), "' ", local(), " (global shape ", call_.shape(0), ")"),
          "name dimensions (flatten, unflatten, unsqueeze) instead of sizes, or redistribute to "
          "Replicate"
      );
    }
    Dims dims(out_.size());
    for (std::size_t i = 0; i < out_.size(); ++i) {
      dims[i] = Dim::whole(was_zero_[i] ? 0 : out_[i]);
    }
    for (const Run& run : runs_) {
      if (!map_run(run, dims)) {
        return std::move(map_);
      }
    }
    map_.outputs = {{std::move(dims)}};
    moves(map_, 0);
    return std::move(map_);
  }

 private:
  Sizes local() const {
    const auto sizes = call_.local_shape(0);
    return {sizes.begin(), sizes.end()};
  }

  /// Gives empty and unknown dimensions sizes that multiply up, so that runs can be matched.
  bool fill_in() {
    shown_ = out_;
    in_ = local();
    for (std::size_t i = 0; i < in_.size(); ++i) {
      if (in_[i] == 0) {
        in_[i] = call_.shape(0)[i] > 0 ? call_.shape(0)[i] : kStandIn;
      }
    }
    int unknown = -1;
    for (std::size_t i = 0; i < out_.size(); ++i) {
      was_zero_.push_back(out_[i] == 0 || (out_[i] == -1 && product(local()) == 0));
      if (out_[i] <= 0) {
        if (unknown >= 0) {
          return false;
        }
        unknown = static_cast<int>(i);
        out_[i] = 1;
      }
    }
    const std::int64_t known = product(out_);
    if (unknown >= 0) {
      if (product(in_) % known != 0) {
        return false;
      }
      out_[at(unknown)] = product(in_) / known;
    }
    return product(in_) == product(out_);
  }

  /// Uneven pieces of 1 and 2 beside dimensions of 1 that come or go look alike on one rank and not
  /// on another.
  bool is_ambiguous() const {
    const auto ones = std::count(out_.begin(), out_.end(), 1) - std::count(in_.begin(), in_.end(), 1);
    for (int dim = 0; dim < call_.rank(0) && ones != 0; ++dim) {
      const RuleCall::Sizes sizes = call_.piece_sizes(0, dim);
      if (sizes.least != sizes.most && sizes.least <= 1) {
        return true;
      }
    }
    return false;
  }

  bool match() {
    const int num_in = static_cast<int>(in_.size());
    const int num_out = static_cast<int>(out_.size());
    for (int i = 0, o = 0; i < num_in || o < num_out;) {
      Run run{i, i, o, o};
      std::int64_t entries_in = i < num_in ? in_[at(i++)] : 1;
      std::int64_t entries_out = o < num_out ? out_[at(o++)] : 1;
      while (entries_in != entries_out) {
        if (entries_in < entries_out) {
          if (i == num_in) {
            return false;
          }
          entries_in *= in_[at(i++)];
        } else {
          if (o == num_out) {
            return false;
          }
          entries_out *= out_[at(o++)];
        }
      }
      run.in_end = i;
      run.out_end = o;
      runs_.push_back(run);
    }
    return true;
  }

  bool refuse_cut(int dim, std::string why) {
    map_.refusal = Refusal{
        concat_text("dimension ", dim, " of '", call_.operand_name(0), "' ", call_.shape(0),
                    " is cut and, in the view of local shape ", shown_, ", ", why),
        "cut the outermost of the dimensions that are merged or split, or redistribute to Replicate"
    };
    return false;
  }

  bool map_run(const Run& run, Dims& dims) {
    int cut = -1;
    for (int dim = run.in_begin; dim < run.in_end; ++dim) {
      if (call_.is_cut(0, dim)) {
        const bool is_outermost = cut < 0 && std::all_of(
            call_.shape(0).begin() + run.in_begin, call_.shape(0).begin() + dim,
            [](std::int64_t size) { return size == 1; }
        );
        if (!is_outermost) {
          return refuse_cut(dim, "merged behind another dimension: pieces would interleave");
        }
        cut = dim;
      }
    }
    return cut < 0 || map_cut(run, cut, dims);
  }

  bool map_cut(const Run& run, int cut, Dims& dims) {
    if (run.out_begin == run.out_end) {
      return refuse_cut(cut, "dropped");
    }
    int outermost = run.out_begin;
    while (outermost + 1 < run.out_end && out_[at(outermost)] == 1) {
      ++outermost;
    }
    const std::int64_t from = in_[at(cut)];
    const std::int64_t to = out_[at(outermost)];
    const int label = map_.new_label();
    Dim& made = map_.operands[0].dims[at(cut)];
    if (to % from == 0) {
      made = Dim::of(label);
      dims[at(outermost)] = Dim::of(label, to / from);
    } else if (from % to == 0 && call_.shape(0)[at(cut)] % (from / to) == 0) {
      made = Dim::of(label, from / to);
      dims[at(outermost)] = Dim::of(label);
    } else {
      return refuse_cut(cut, "split into pieces that are not whole blocks");
    }
    return true;
  }

  const RuleCall& call_;
  Sizes in_;
  Sizes out_;
  Sizes shown_;
  std::vector<bool> was_zero_;
  std::vector<Run> runs_;
  DimMap map_;
};

}  // namespace

DimMap view_map(const RuleCall& call, std::vector<std::int64_t> sizes) {
  return ViewShape(call, std::move(sizes)).run();
}

}  // namespace hypershard::dtensor::rules
