// Compares what redistributions send with what PyTorch's DTensor sends for the same pairs
// (tests/golden/make_dtensor_traffic.py), and keeps docs/redistribution.md, which shows both.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "hypershard/layout/redistribution.h"
#include "hypershard/testing/worker.h"

namespace hypershard::layout {
namespace {

using Shape = std::vector<std::int64_t>;

std::string source_path(const std::string& name) {
  const char* folder = std::getenv("HS_TEST_SOURCE_DIR");
  return std::string(folder == nullptr ? "." : folder) + "/" + name;
}

std::string contents_of(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << "cannot read " << path
                           << "; run from the repository or set HS_TEST_SOURCE_DIR";
  return {std::istreambuf_iterator<char>(file), {}};
}

/// One mesh and shape with all pairs of layouts: [source][target] elements of the busiest rank.
struct Case {
  std::vector<int> mesh;
  Shape shape;
  std::vector<Layout> layouts;
  std::vector<std::vector<std::optional<std::int64_t>>> theirs = {};
  std::vector<std::vector<std::int64_t>> ours = {};
};

Placement placement_named(const std::string& name) {
  using Reduce = Placement::Reduce;
  for (const Placement& placement :
       {Placement::replicate(),
        Placement::shard(0),
        Placement::shard(1),
        Placement::partial(),
        Placement::partial(Reduce::kAvg),
        Placement::partial(Reduce::kMax),
        Placement::partial(Reduce::kMin)}) {
    if (to_text(placement) == name) {
      return placement;
    }
  }
  ADD_FAILURE() << "the golden file has the unknown placement " << name;
  return {};
}

DeviceMesh mesh_of(const std::vector<int>& sizes) {
  std::vector<MeshAxis> axes;
  int size = 1;
  for (const int axis_size : sizes) {
    axes.push_back({std::string(1, static_cast<char>('a' + axes.size())), axis_size});
    size *= axis_size;
  }
  return DeviceMesh(axes, Topology::single_supernode(size));
}

std::int64_t busiest(
    const Shape& shape, const Layout& from, const Layout& to, const DeviceMesh& mesh
) {
  const auto steps = plan_redistribution(shape, from, to, mesh);
  std::int64_t most = 0;
  for (int rank = 0; rank < mesh.size(); ++rank) {
    std::int64_t sent = 0;
    for (const RedistributionStep& step : steps) {
      sent += step_traffic(step, shape, mesh, rank).sent;
    }
    most = std::max(most, sent);
  }
  return most;
}

Case read_case(const nlohmann::json& golden, const std::vector<Placement>& placements) {
  Case result{.mesh = golden.at("mesh"), .shape = golden.at("shape"), .layouts = {{}}};
  for (std::size_t axis = 0; axis < result.mesh.size(); ++axis) {
    std::vector<Layout> longer;
    for (const Layout& layout : result.layouts) {
      for (const Placement& placement : placements) {
        longer.push_back(layout);
        longer.back().placements.push_back(placement);
      }
    }
    result.layouts = std::move(longer);
  }
  const DeviceMesh mesh = mesh_of(result.mesh);
  for (std::size_t i = 0; i < result.layouts.size(); ++i) {
    auto& theirs = result.theirs.emplace_back();
    auto& ours = result.ours.emplace_back();
    for (std::size_t j = 0; j < result.layouts.size(); ++j) {
      const auto& cell = golden.at("sent").at(i).at(j);
      theirs.push_back(cell.is_null() ? std::nullopt : std::optional<std::int64_t>(cell));
      ours.push_back(busiest(result.shape, result.layouts[i], result.layouts[j], mesh));
    }
  }
  return result;
}

struct Golden {
  std::string torch;
  std::vector<Case> cases;
};

const Golden& golden() {
  static const Golden golden = [] {
    const auto json =
        nlohmann::json::parse(contents_of(source_path("tests/golden/dtensor_traffic.json")));
    std::vector<Placement> placements;
    for (const std::string name : json.at("placements")) {
      placements.push_back(placement_named(name));
    }
    Golden made{.torch = json.at("torch"), .cases = {}};
    for (const auto& item : json.at("cases")) {
      made.cases.push_back(read_case(item, placements));
    }
    return made;
  }();
  return golden;
}

std::string short_text(const Layout& layout) {
  std::string text;
  for (const Placement& placement : layout.placements) {
    std::string name = to_text(placement);
    text += text.empty() ? "" : " ";
    switch (placement.kind) {
      case Placement::Kind::kReplicate:
        text += "R";
        break;
      case Placement::Kind::kShard:
        text += "S" + std::to_string(placement.dim);
        break;
      default:
        text += name.substr(8, name.size() - 9);  // what stands in Partial(...)
    }
  }
  return text;
}

std::string sizes_text(const std::vector<int>& sizes) {
  std::string text;
  for (const int size : sizes) {
    text += (text.empty() ? "" : " x ") + std::to_string(size);
  }
  return text;
}

/// Averages, maxima and minima on two axes cost what sums cost: the page leaves them out there.
bool is_shown(const Case& item, const Layout& layout) {
  return item.mesh.size() == 1 ||
         std::all_of(layout.placements.begin(), layout.placements.end(), [](const Placement& p) {
           return p.kind != Placement::Kind::kPartial || p == Placement::partial();
         });
}

std::string table(const Case& item) {
  constexpr std::int64_t kElementBytes = 4;
  std::string head = "| from \\ to |";
  std::string rule = "|---|";
  std::string rows;
  for (std::size_t i = 0; i < item.layouts.size(); ++i) {
    if (!is_shown(item, item.layouts[i])) {
      continue;
    }
    head += " " + short_text(item.layouts[i]) + " |";
    rule += "---|";
    rows += "| " + short_text(item.layouts[i]) + " |";
    for (std::size_t j = 0; j < item.layouts.size(); ++j) {
      if (is_shown(item, item.layouts[j])) {
        const auto& theirs = item.theirs[i][j];
        rows += " " + std::to_string(item.ours[i][j] * kElementBytes) + "/" +
                (theirs ? std::to_string(*theirs * kElementBytes) : "-") + " |";
      }
    }
    rows += "\n";
  }
  return head + "\n" + rule + "\n" + rows;
}

struct Counts {
  int pairs = 0;
  int fewer = 0;
  int equal = 0;
  int more = 0;
  int refused = 0;
};

Counts count(const Case& item) {
  Counts counts;
  for (std::size_t i = 0; i < item.layouts.size(); ++i) {
    for (std::size_t j = 0; j < item.layouts.size(); ++j) {
      ++counts.pairs;
      const auto& theirs = item.theirs[i][j];
      counts.refused += theirs ? 0 : 1;
      counts.fewer += theirs && item.ours[i][j] < *theirs ? 1 : 0;
      counts.equal += theirs && item.ours[i][j] == *theirs ? 1 : 0;
      counts.more += theirs && item.ours[i][j] > *theirs ? 1 : 0;
    }
  }
  return counts;
}

std::string page() {
  std::string text =
      "# What redistributions move\n\n"
      "Generated and checked by the test `golden.redistribution`; do not edit. Cells are bytes "
      "that "
      "the\nbusiest rank sends for an fp32 tensor: Hypershard's / those of the best of PyTorch "
      "DTensor's plans\n(torch " +
      golden().torch +
      ", `tests/golden/make_dtensor_traffic.py`), `-` where DTensor refuses. One supernode.\n"
      "`R` Replicate, `S0` Shard(0), `sum` Partial(sum) and so on, one word a mesh axis. How they "
      "are\n"
      "counted: `step_traffic` in `hypershard/layout/redistribution.h`.\n\n"
      "| mesh | tensor | pairs | fewer bytes | equal | more | DTensor refuses |\n"
      "|---|---|---|---|---|---|---|\n";
  const auto name = [](const Case& item) {
    return sizes_text(item.mesh) + " | " + std::to_string(item.shape[0]) + " x " +
           std::to_string(item.shape[1]);
  };
  for (const Case& item : golden().cases) {
    const Counts counts = count(item);
    text += "| " + name(item);
    for (const int number :
         {counts.pairs, counts.fewer, counts.equal, counts.more, counts.refused}) {
      text += " | " + std::to_string(number);
    }
    text += " |\n";
  }
  for (const Case& item : golden().cases) {
    text += "\n## Mesh " + sizes_text(item.mesh) + ", tensor " + std::to_string(item.shape[0]) +
            " x " + std::to_string(item.shape[1]) + "\n\n" + table(item);
  }
  return text;
}

const bool kCanWritePage = hypershard::testing::register_worker(
    "write_page",
    [](const std::vector<std::string>& arguments) {
      std::ofstream(arguments.at(0)) << page();
      return 0;
    }
);

TEST(RedistributionGoldenTest, NeverSendsMoreThanDTensor) {
  int compared = 0;
  for (const Case& item : golden().cases) {
    const DeviceMesh mesh = mesh_of(item.mesh);
    for (std::size_t i = 0; i < item.layouts.size(); ++i) {
      for (std::size_t j = 0; j < item.layouts.size(); ++j) {
        const auto& theirs = item.theirs[i][j];
        compared += theirs ? 1 : 0;
        EXPECT_TRUE(!theirs || item.ours[i][j] <= *theirs)
            << to_text(mesh) << ", " << to_text(item.layouts[i], mesh) << " -> "
            << to_text(item.layouts[j], mesh) << ": " << item.ours[i][j] << " elements, DTensor "
            << *theirs << "\n"
            << to_text(
                   plan_redistribution(item.shape, item.layouts[i], item.layouts[j], mesh),
                   item.shape,
                   mesh,
                   0,
                   1
               );
      }
    }
  }
  EXPECT_GT(compared, 1400);
}

TEST(RedistributionGoldenTest, ThePageIsCurrent) {
  ASSERT_TRUE(kCanWritePage);
  EXPECT_TRUE(contents_of(source_path("docs/redistribution.md")) == page())
      << "docs/redistribution.md is stale: run this program from the repository with --worker "
         "write_page docs/redistribution.md";
}

}  // namespace
}  // namespace hypershard::layout
