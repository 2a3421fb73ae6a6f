// Why: what all worlds have in common: naming groups, making each communicator once, and the mesh
// over the job. How ranks reach each other is the business of the derived worlds.
#include "hypershard/comm/world.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "hypershard/core/error.h"

namespace hypershard::comm {
namespace {

std::string ranks_key(const std::vector<int>& ranks) {
  std::string key;  // not text_of, which cuts long lists
  for (const int rank : ranks) {
    key += std::to_string(rank) + ",";
  }
  return key;
}

void check_group(const std::string& name, const std::vector<int>& ranks, int rank, int world_size) {
  HS_CHECK(!ranks.empty(), "comm.world: communicator '", name, "' has no ranks");
  std::vector<int> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  HS_CHECK(
      sorted.front() >= 0 && sorted.back() < world_size,
      "comm.world: communicator '",
      name,
      "' names a rank that does not exist: ranks ",
      ranks,
      " (expected 0 to ",
      world_size - 1,
      ")"
  );
  HS_CHECK(
      std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(),
      "comm.world: communicator '",
      name,
      "' names a rank twice: ",
      ranks
  );
  HS_CHECK(
      std::binary_search(sorted.begin(), sorted.end(), rank),
      "comm.world: rank ",
      rank,
      " asks for communicator '",
      name,
      "' over ranks ",
      ranks,
      ", to which it does not belong",
      HS_HINT("only the ranks of a group make its communicator")
  );
}

}  // namespace

World::World(int rank, layout::Topology topology, double timeout_s)
    : rank_(rank), topology_(std::move(topology)), timeout_s_(timeout_s) {
  HS_CHECK(
      rank >= 0 && rank < topology_.world_size(),
      "comm.world: rank ",
      rank,
      " is out of range (expected 0 to ",
      topology_.world_size() - 1,
      ")"
  );
}

std::shared_ptr<Communicator> World::communicator(
    const std::string& name, const std::vector<int>& global_ranks
) {
  const std::string key = name + " " + ranks_key(global_ranks);
  for (const auto& [known, communicator] : communicators_) {
    if (known == key) {
      return communicator;
    }
  }
  check_group(name, global_ranks, rank_, size());
  GroupInfo info;
  info.name = name;
  info.global_ranks = global_ranks;
  info.rank = static_cast<int>(
      std::find(global_ranks.begin(), global_ranks.end(), rank_) - global_ranks.begin()
  );
  info.tier =
      topology_.all_in_one_supernode(global_ranks) ? layout::Tier::kIntra : layout::Tier::kInter;
  info.timeout_s = timeout_s_;
  auto made = make_communicator(std::move(info));
  communicators_.emplace_back(key, made);
  return made;
}

std::shared_ptr<Communicator> World::world_communicator() {
  std::vector<int> ranks(static_cast<std::size_t>(size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return communicator("world", ranks);
}

std::string World::last_collectives() const {
  std::string text;
  for (const auto& [key, communicator] : communicators_) {
    const std::vector<LogEntry> entries = communicator->log().entries();
    text += text.empty() ? "" : "; ";
    text +=
        entries.empty() ? "none on '" + communicator->info().name + "'" : to_text(entries.back());
  }
  return text.empty() ? "no communicator" : text;
}

ProcessMesh::ProcessMesh(std::shared_ptr<World> world, layout::DeviceMesh mesh)
    : world_(std::move(world)), mesh_(std::move(mesh)) {
  HS_CHECK(world_ != nullptr, "comm.mesh: the world is null");
  HS_CHECK_EQ(
      mesh_.size(), world_->size(), "comm.mesh: the mesh ", mesh_, " does not cover the job's ranks"
  );
  // All ranks make the communicators of all axes in one order, so that a later axis() needs no
  // peer.
  for (const layout::MeshAxis& axis : mesh_.axes()) {
    const std::string names[] = {axis.name};
    axes(names);
  }
}

std::shared_ptr<Communicator> ProcessMesh::axis(std::string_view name) const {
  const std::string names[] = {std::string(name)};
  return axes(names);
}

std::shared_ptr<Communicator> ProcessMesh::axes(std::span<const std::string> names) const {
  const std::vector<int> ranks = mesh_.group(names, rank());
  std::string name;
  for (const std::string& axis : names) {
    name += name.empty() ? axis : "+" + axis;
  }
  return world_->communicator(name.empty() ? "self" : name, ranks);
}

}  // namespace hypershard::comm
