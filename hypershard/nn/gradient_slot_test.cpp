// Tests that the slot table finds the right slot, forgets the dead, and that claims are checked.
#include "hypershard/nn/gradient_slot.h"

#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "hypershard/core/error.h"
#include "hypershard/nn/test_support.h"

namespace hypershard::nn {
namespace {

using testing::BufferSlot;

TEST(GradientSlotTest, FindsTheSlotByAnyHandleButNotByAnotherTensor) {
  const auto param = at::ones({2, 3});
  const auto slot = testing::attach_slot(param, at::kFloat);
  const at::Tensor handle = param;
  EXPECT_EQ(slot_of(handle), slot);
  EXPECT_EQ(slot_of(param.detach()), nullptr);
  EXPECT_EQ(slot_of(at::ones({2, 3})), nullptr);
  EXPECT_EQ(slot_of(at::Tensor()), nullptr);
}

TEST(GradientSlotTest, ReplacesAndDetaches) {
  const auto param = at::ones({2});
  const auto first = testing::attach_slot(param, at::kFloat);
  const auto second = testing::attach_slot(param, at::kFloat);
  EXPECT_EQ(slot_of(param), second);
  set_gradient_slot(param, nullptr);
  EXPECT_EQ(slot_of(param), nullptr);
}

TEST(GradientSlotTest, ForgetsASlotThatDied) {
  const auto param = at::ones({2});
  auto slot = testing::attach_slot(param, at::kFloat);
  slot.reset();
  EXPECT_EQ(slot_of(param), nullptr);
}

TEST(GradientSlotTest, DoesNotKeepParametersAliveAndSweepsTheDead) {
  auto slot = std::make_shared<BufferSlot>(at::ones({2}), at::kFloat);
  auto param = at::ones({2});
  const c10::weak_intrusive_ptr<at::TensorImpl> watched(param.getIntrusivePtr());
  set_gradient_slot(param, slot);
  param.reset();
  EXPECT_TRUE(watched.expired());
  for (int i = 0; i < 1000; ++i) {
    set_gradient_slot(at::ones({2}), slot);
  }
  EXPECT_LT(internal::slot_table_size(), 200);
}

TEST(GradientSlotTest, SurvivesManyTensorsAtReusedAddresses) {
  auto slot = std::make_shared<BufferSlot>(at::ones({2}), at::kFloat);
  for (int i = 0; i < 1000; ++i) {
    const auto fresh = at::ones({2});
    ASSERT_EQ(slot_of(fresh), nullptr);
    set_gradient_slot(fresh, slot);
    ASSERT_EQ(slot_of(fresh), slot);
  }
}

TEST(GradientSlotTest, IsSafeFromSeveralThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 300; ++i) {
        const auto param = at::ones({2});
        const auto slot = testing::attach_slot(param, at::kFloat);
        EXPECT_EQ(slot_of(param), slot);
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
}

TEST(GradientSlotTest, ClaimWithoutSlotIsUndefined) {
  EXPECT_FALSE(internal::claim_slot(at::ones({2})).destination.defined());
}

TEST(GradientSlotTest, AClaimThatDoesNotFitIsRefused) {
  const at::NoGradGuard no_grad;  // as in backward
  const auto param = at::ones({2, 3});
  const auto slot = testing::attach_slot(param, at::kFloat);
  slot->buffer = at::ones({3, 2});
  HS_EXPECT_THROWN(
      InvalidArgument, internal::claim_slot(param), "does not fit its parameter: shape [3, 2]"
  );
  slot->buffer = at::ones({3, 2}).t();
  HS_EXPECT_THROWN(InvalidArgument, internal::claim_slot(param), "expected contiguous [2, 3]");
}

TEST(GradientSlotTest, AnUndefinedParameterIsRefused) {
  HS_EXPECT_THROWN(InvalidArgument, set_gradient_slot(at::Tensor(), nullptr), "undefined tensor");
}

}  // namespace
}  // namespace hypershard::nn
