// Why: what memory of tensors is for decides how its pages come; nothing else would show it.
#include "hypershard/comm/shm/internal/memfd.h"

#include <gtest/gtest.h>

#include "hypershard/core/test_mappings.h"

namespace hypershard::comm::internal {
namespace {

TEST(MemfdTest, HugePagesAreAskedForTensorsInBothMappings) {
  if (!test::kernel_has_huge_pages()) {
    GTEST_SKIP() << "this kernel has no transparent huge pages";
  }
  constexpr std::int64_t kBytes = std::int64_t{4} << 20;
  for (const RegionUse use : {RegionUse::kData, RegionUse::kSparse, RegionUse::kControl}) {
    const OwnedFd fd = create_memory(kBytes, "a test", use);
    const auto memory = map_memory(fd.get(), kBytes, "a test", use);
    const bool for_tensors = use != RegionUse::kControl;
    EXPECT_EQ(test::wants_huge_pages(memory->read()), for_tensors);
    EXPECT_EQ(test::wants_huge_pages(memory->write()), for_tensors);
  }
}

}  // namespace
}  // namespace hypershard::comm::internal
