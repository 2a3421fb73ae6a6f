// Pins what libtorch does at the seams that resharding stands on.
#include "hypershard/shard/swappable_storage.h"

#include <string>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

namespace hypershard::shard {
namespace {

std::string thrown_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(SwappableStorageTest, DetachedViewThrowsItsMessage) {
  SwappableStorage storage(64, c10::Device(c10::kCPU), "unit blocks.3 is resharded");
  const at::Tensor view = storage.view(4, {2, 3}, at::kFloat);
  EXPECT_NE(
      thrown_by([&] { (void)view.add(1); }).find("unit blocks.3 is resharded"), std::string::npos
  );
  EXPECT_NE(
      thrown_by([&] { (void)view.const_data_ptr(); }).find("unit blocks.3 is resharded"),
      std::string::npos
  );
  EXPECT_EQ(view.sizes(), (at::IntArrayRef{2, 3}));  // shapes stay readable
}

TEST(SwappableStorageTest, ViewsReadWhateverIsAttached) {
  SwappableStorage storage(40, c10::Device(c10::kCPU), "gone");
  const at::Tensor view = storage.view(2, {3}, at::kFloat);
  at::Tensor first = at::arange(10, at::kFloat);
  at::Tensor second = first.mul(10);
  storage.attach(first.mutable_data_ptr());
  EXPECT_TRUE(at::equal(view, at::tensor({2.F, 3.F, 4.F})));
  storage.detach();
  EXPECT_NE(thrown_by([&] { (void)view.sum(); }), "");
  storage.attach(second.mutable_data_ptr());
  EXPECT_TRUE(at::equal(view, at::tensor({20.F, 30.F, 40.F})));
}

TEST(SwappableStorageTest, SavedTensorsOfAutogradFollow) {
  SwappableStorage storage(16, c10::Device(c10::kCPU), "gone");
  at::Tensor memory = at::arange(1, 5, at::kFloat);
  at::Tensor leaf = at::ones({4});
  leaf.requires_grad_(true);
  leaf.set_data(storage.view(0, {4}, at::kFloat));
  storage.attach(memory.mutable_data_ptr());
  const at::Tensor loss = (leaf * leaf).sum();
  storage.detach();
  EXPECT_NE(
      thrown_by([&] { loss.backward({}, /*retain_graph=*/true); }).find("gone"), std::string::npos
  );
  at::Tensor copy = memory.clone();
  memory.fill_(77);  // the old memory must not be read again
  storage.attach(copy.mutable_data_ptr());
  loss.backward();
  EXPECT_TRUE(at::equal(leaf.grad(), at::tensor({2.F, 4.F, 6.F, 8.F})));
}

TEST(SwappableStorageTest, DtypeOfALeafMayChange) {
  SwappableStorage storage(8, c10::Device(c10::kCPU), "gone");
  at::Tensor memory = at::ones({4}, at::kBFloat16);
  at::Tensor leaf = at::ones({4});
  leaf.requires_grad_(true);
  const at::Tensor handle = leaf;
  leaf.set_data(storage.view(0, {4}, at::kBFloat16));
  storage.attach(memory.mutable_data_ptr());
  EXPECT_EQ(handle.scalar_type(), at::kBFloat16);
  handle.sum().backward();
  EXPECT_EQ(handle.grad().scalar_type(), at::kBFloat16);
}

TEST(SwappableStorageTest, EmptyViewsNeverThrow) {
  SwappableStorage storage(0, c10::Device(c10::kCPU), "gone");
  const at::Tensor view = storage.view(0, {0, 3}, at::kFloat);
  storage.attach(nullptr);
  EXPECT_EQ(view.sum().item<float>(), 0.F);
}

TEST(SwappableStorageTest, TombstoneIsDefinedButUnreadable) {
  const at::Tensor stone =
      make_tombstone({2, 2}, at::kFloat, "build the optimizer over update_parameters()");
  EXPECT_TRUE(stone.defined());
  EXPECT_NE(thrown_by([&] { (void)stone.mul(2); }).find("update_parameters()"), std::string::npos);
}

}  // namespace
}  // namespace hypershard::shard
