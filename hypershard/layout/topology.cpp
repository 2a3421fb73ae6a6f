// Builds the map from ranks to supernodes.
// Ids are dense and ordered by lowest rank, so that every rank numbers the supernodes alike.
#include "hypershard/layout/topology.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "hypershard/core/error.h"

namespace hypershard::layout {

Topology::Topology(std::vector<int> supernode_of) : supernode_of_(std::move(supernode_of)) {
  for (int rank = 0; rank < world_size(); ++rank) {
    const auto supernode = static_cast<std::size_t>(supernode_of_[static_cast<std::size_t>(rank)]);
    if (supernode >= ranks_of_.size()) {
      ranks_of_.resize(supernode + 1);
    }
    ranks_of_[supernode].push_back(rank);
  }
}

Topology Topology::single_supernode(int world_size) {
  HS_CHECK(
      world_size >= 1,
      "layout.topology: world size ",
      world_size,
      " (expected at least 1)",
      HS_HINT("a job has at least one rank: check WORLD_SIZE or --ranks")
  );
  return Topology(std::vector<int>(static_cast<std::size_t>(world_size), 0));
}

Topology Topology::from_labels(const std::vector<std::string>& labels) {
  HS_CHECK(
      !labels.empty(),
      "layout.topology: no supernode labels: 0 labels (expected one a rank)",
      HS_HINT("pass one label for each rank of the job")
  );
  std::unordered_map<std::string, int> id_of_label;
  std::vector<int> supernode_of;
  supernode_of.reserve(labels.size());
  for (const std::string& label : labels) {
    const auto next_id = static_cast<int>(id_of_label.size());
    supernode_of.push_back(id_of_label.try_emplace(label, next_id).first->second);
  }
  return Topology(std::move(supernode_of));
}

int Topology::supernode_of(int rank) const {
  HS_CHECK(
      rank >= 0 && rank < world_size(),
      "layout.topology: rank ",
      rank,
      " is out of range (expected 0 to ",
      world_size() - 1,
      ")"
  );
  return supernode_of_[static_cast<std::size_t>(rank)];
}

const std::vector<int>& Topology::ranks_of(int supernode) const {
  HS_CHECK(
      supernode >= 0 && supernode < num_supernodes(),
      "layout.topology: supernode ",
      supernode,
      " is out of range (expected 0 to ",
      num_supernodes() - 1,
      ")"
  );
  return ranks_of_[static_cast<std::size_t>(supernode)];
}

bool Topology::all_in_one_supernode(const std::vector<int>& ranks) const {
  return std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
    return supernode_of(rank) == supernode_of(ranks.front());
  });
}

}  // namespace hypershard::layout
