// See whole_dimension.h.
#include "hypershard/plan/whole_dimension.h"

#include <utility>

namespace hypershard::plan {
namespace {

thread_local const WholeDimensionScope* thread_scope = nullptr;

}  // namespace

WholeDimensionScope::WholeDimensionScope(int dim, std::string needed_by, std::string hint)
    : dim_(dim),
      needed_by_(std::move(needed_by)),
      hint_(std::move(hint)),
      outer_(std::exchange(thread_scope, this)) {}

WholeDimensionScope::~WholeDimensionScope() {
  thread_scope = outer_;
}

const WholeDimensionScope* WholeDimensionScope::current() {
  return thread_scope;
}

}  // namespace hypershard::plan
