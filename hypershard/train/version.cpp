// Why: see version.h. The definitions come from the build.
#include "hypershard/train/version.h"

#include "hypershard/core/text.h"

#ifndef HS_VERSION
#define HS_VERSION "unknown"
#endif
#ifndef HS_BUILD_TYPE
#define HS_BUILD_TYPE "unknown"
#endif

namespace hypershard::train {

std::string version() {
  return HS_VERSION;
}

std::string build_description() {
  return concat_text(HS_BUILD_TYPE, ", compiler ", __VERSION__);
}

}  // namespace hypershard::train
