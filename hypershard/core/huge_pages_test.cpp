// Why: advice beyond a buffer would reach its neighbours on the heap.
#include "hypershard/core/huge_pages.h"

#include <cstddef>
#include <sys/mman.h>

#include <gtest/gtest.h>

#include "hypershard/core/test_mappings.h"

namespace hypershard {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
constexpr std::int64_t kPage = 4096;

class HugePagesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!test::kernel_has_huge_pages()) {
      GTEST_SKIP() << "this kernel has no transparent huge pages";
    }
    void* mapped = ::mmap(
        nullptr,
        static_cast<std::size_t>(kBytes),
        PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS,
        -1,
        0
    );
    ASSERT_NE(mapped, MAP_FAILED);
    memory_ = static_cast<std::byte*>(mapped);
  }
  void TearDown() override {
    if (memory_ != nullptr) {
      ::munmap(memory_, static_cast<std::size_t>(kBytes));
    }
  }

  static constexpr std::int64_t kBytes = 16 * kMiB;
  std::byte* memory_ = nullptr;
};

TEST_F(HugePagesTest, WholePagesInsideTheBufferAreAdvisedAndNoOthers) {
  constexpr std::int64_t kSize = 5 * kMiB;
  std::byte* const buffer = memory_ + kMiB + 100;
  advise_huge_pages(buffer, kSize);
  EXPECT_FALSE(test::wants_huge_pages(buffer));  // its first page begins before it
  EXPECT_TRUE(test::wants_huge_pages(memory_ + kMiB + kPage));
  EXPECT_TRUE(test::wants_huge_pages(buffer + kSize - kPage));
  EXPECT_FALSE(test::wants_huge_pages(buffer + kSize));
}

TEST_F(HugePagesTest, ABufferOfOneIsAdvisedAndASmallerOneIsNot) {
  advise_huge_pages(memory_, kHugePageBytes - 1);
  EXPECT_FALSE(test::wants_huge_pages(memory_));
  advise_huge_pages(memory_, kHugePageBytes);
  EXPECT_TRUE(test::wants_huge_pages(memory_));
  advise_huge_pages(nullptr, 0);
}

}  // namespace
}  // namespace hypershard
