// Text forms of placements and layouts.
// Messages, plans and the explain report all print layouts through these functions.
#include "hypershard/layout/placement.h"

#include "hypershard/core/error.h"

namespace hypershard::layout {
namespace {

std::string reduce_text(Placement::Reduce reduce) {
  switch (reduce) {
    case Placement::Reduce::kSum:
      return "sum";
    case Placement::Reduce::kAvg:
      return "avg";
    case Placement::Reduce::kMax:
      return "max";
    case Placement::Reduce::kMin:
      return "min";
  }
  HS_FAIL(InternalError, "layout.placement: no reduction has number ", static_cast<int>(reduce));
}

}  // namespace

std::string to_text(const Placement& placement) {
  switch (placement.kind) {
    case Placement::Kind::kReplicate:
      return "Replicate";
    case Placement::Kind::kShard:
      return "Shard(" + std::to_string(placement.dim) + ")";
    case Placement::Kind::kPartial:
      return "Partial(" + reduce_text(placement.reduce) + ")";
    case Placement::Kind::kFlat:
      return "Flat";
    case Placement::Kind::kOwned:
      return "Owned";
  }
  HS_FAIL(
      InternalError, "layout.placement: no placement has number ", static_cast<int>(placement.kind)
  );
}

std::string to_text(const Layout& layout, const DeviceMesh& mesh) {
  // Never throws for a layout that does not fit: it is called to say exactly that.
  std::string text;
  for (std::size_t i = 0; i < layout.placements.size(); ++i) {
    const bool is_named = i < mesh.axes().size();
    text += i == 0 ? "" : ", ";
    text += (is_named ? mesh.axes()[i].name : "axis " + std::to_string(i) + " (not in the mesh)");
    text += ": " + to_text(layout.placements[i]);
  }
  for (std::size_t i = layout.placements.size(); i < mesh.axes().size(); ++i) {
    text += (i == 0 ? "" : ", ") + mesh.axes()[i].name + ": missing";
  }
  return text;
}

}  // namespace hypershard::layout
