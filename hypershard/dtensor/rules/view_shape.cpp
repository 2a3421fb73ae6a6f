// Matches runs of a tensor's dimensions with runs of its view's dimensions, by their sizes.
#include "hypershard/dtensor/rules/view_shape.h"

#include <algorithm>
#include <string_view>

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

class ViewShape {
 public:
  ViewShape(const RuleCall& call, Sizes sizes, std::vector<Run> runs)
      : call_(call), out_(std::move(sizes)), runs_(std::move(runs)), map_(whole_map(call)) {}

  DimMap run() {
    const bool is_clear = runs_.empty() ? fill_in() && !is_ambiguous() && match() : fill_in_runs();
    if (!is_clear) {
      return refuse(
          concat_text(
              "cannot tell which dimensions of local shape ",
              shown_,
              " come from which of '",
              call_.operand_name(0),
              "' ",
              local(),
              " (global shape ",
              call_.shape(0),
              ")"
          ),
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

  /// Gives empty dimensions sizes that multiply up, so that runs can be matched.
  void stand_in() {
    shown_ = out_;
    in_ = local();
    for (std::size_t i = 0; i < in_.size(); ++i) {
      if (in_[i] == 0) {
        in_[i] = call_.shape(0)[i] > 0 ? call_.shape(0)[i] : kStandIn;
      }
    }
    for (std::size_t i = 0; i < out_.size(); ++i) {
      was_zero_.push_back(out_[i] == 0 || (out_[i] == -1 && product(local()) == 0));
      stated_ = out_[i] == -1 ? static_cast<int>(i) : stated_;
    }
  }

  /// Several empty dimensions that stay several are matched in order.
  void pair_empty() {
    std::vector<std::size_t> from;
    std::vector<std::size_t> to;
    for (std::size_t i = 0; i < in_.size(); ++i) {
      if (call_.local_shape(0)[i] == 0) {
        from.push_back(i);
      }
    }
    for (std::size_t i = 0; i < out_.size(); ++i) {
      if (out_[i] == 0) {
        to.push_back(i);
      }
    }
    for (std::size_t k = 0; from.size() > 1 && from.size() == to.size() && k < to.size(); ++k) {
      out_[to[k]] = in_[from[k]];
    }
  }

  /// Sizes the one open entry of a run.
  bool fill_in_run(const Run& run) {
    int unknown = -1;
    std::int64_t numel = 1;
    for (int i = run.in_begin; i < run.in_end; ++i) {
      numel *= in_[at(i)];
    }
    std::int64_t known = 1;
    for (int i = run.out_begin; i < run.out_end; ++i) {
      if (out_[at(i)] > 0) {
        known *= out_[at(i)];
      } else if (unknown >= 0) {
        return false;
      } else {
        unknown = i;
      }
    }
    if (unknown >= 0) {
      out_[at(unknown)] = numel / known;
    }
    return unknown >= 0 ? numel % known == 0 : numel == known;
  }

  bool fill_in() {
    stand_in();
    pair_empty();
    return fill_in_run({0, static_cast<int>(in_.size()), 0, static_cast<int>(out_.size())});
  }

  bool fill_in_runs() {
    stand_in();
    return std::all_of(runs_.begin(), runs_.end(), [this](const Run& run) {
      return fill_in_run(run);
    });
  }

  /// Uneven pieces of 1 and 2 beside dimensions of 1 that come or go look alike on one rank and not
  /// on another.
  bool is_ambiguous() const {
    const auto ones =
        std::count(out_.begin(), out_.end(), 1) - std::count(in_.begin(), in_.end(), 1);
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

  bool refuse_cut(int dim, std::string_view why) {
    map_.refusal = Refusal{
        concat_text(
            "dimension ",
            dim,
            " of '",
            call_.operand_name(0),
            "' ",
            call_.shape(0),
            " is cut and, in the view of local shape ",
            shown_,
            ", ",
            why
        ),
        "cut the outermost of the dimensions that are merged or split, or redistribute to Replicate"
    };
    return false;
  }

  bool map_run(const Run& run, Dims& dims) {
    int cut = -1;
    for (int dim = run.in_begin; dim < run.in_end; ++dim) {
      if (call_.is_cut(0, dim)) {
        const bool is_outermost = cut < 0 && std::all_of(
                                                 call_.shape(0).begin() + run.in_begin,
                                                 call_.shape(0).begin() + dim,
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

  /// Returns which dimension of the view a cut one goes on in: the first that is not 1, but for
  /// what the header says of sizes that leave a choice.
  int outermost_of(const Run& run, int cut) const {
    int first = run.out_begin;
    while (first + 1 < run.out_end && out_[at(first)] == 1) {
      ++first;
    }
    if (stated_ >= run.out_begin && stated_ < first) {
      return stated_;
    }
    const bool is_split_into_one = run.in_begin > 0 && stated_ != first &&
                                   run.out_end - run.out_begin == 2 && first == run.out_end - 1 &&
                                   run.out_end == static_cast<int>(out_.size()) &&
                                   out_[at(first)] == in_[at(cut)] && in_[at(cut)] > 1;
    return is_split_into_one ? run.out_begin : first;
  }

  bool map_cut(const Run& run, int cut, Dims& dims) {
    if (run.out_begin == run.out_end) {
      return refuse_cut(cut, "dropped");
    }
    for (int dim = run.in_begin; dim < run.in_end; ++dim) {
      if (call_.shape(0)[at(dim)] == 0 && dim != cut) {
        return refuse_cut(cut, "merged with a dimension of size 0");
      }
    }
    const int outermost = outermost_of(run, cut);
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
  int stated_ = -1;  ///< the entry that the caller left to be computed
  std::vector<Run> runs_;
  DimMap map_;
};

}  // namespace

DimMap view_map(const RuleCall& call, std::vector<std::int64_t> sizes, std::vector<Run> runs) {
  return ViewShape(call, std::move(sizes), std::move(runs)).run();
}

}  // namespace hypershard::dtensor::rules
