// Why: some code needs all of a dimension on every rank. A rank cannot tell from its part that the
// plan cuts it: of one position, one of the ranks has all and goes on alone.
#pragma once

#include <string>

namespace hypershard::plan {

/// Refuses, while it lives, what would cut a dimension: boundaries of the calling thread.
///
/// A boundary that is to leave dimension `dim` cut throws before its collectives. Plan and global
/// shape alone decide, so that all ranks throw at one place, those too whose part would be the
/// whole. The text names the boundary, the sizes that this rank would get and needs, and
/// `needed_by`; `hint` says what to do. Scopes nest, the newest counts. A forward outside is not
/// affected. Errors: Unsupported, thrown by the module's forward.
class WholeDimensionScope {
 public:
  WholeDimensionScope(int dim, std::string needed_by, std::string hint);
  ~WholeDimensionScope();
  WholeDimensionScope(const WholeDimensionScope&) = delete;
  WholeDimensionScope& operator=(const WholeDimensionScope&) = delete;

  /// Returns the calling thread's newest scope, null if there is none.
  static const WholeDimensionScope* current();
  int dim() const { return dim_; }
  const std::string& needed_by() const { return needed_by_; }
  const std::string& hint() const { return hint_; }

 private:
  int dim_;
  std::string needed_by_;
  std::string hint_;
  const WholeDimensionScope* outer_;
};

}  // namespace hypershard::plan
