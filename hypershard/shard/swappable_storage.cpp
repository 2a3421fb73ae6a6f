// See swappable_storage.h. The calls on StorageImpl used here are those that functorch and
// FSDP-like tools rely on in Python; a test pins each of their effects.
#include "hypershard/shard/swappable_storage.h"

#include <utility>

#include <ATen/ops/empty.h>
#include <torch/version.h>

namespace hypershard::shard {

namespace {

// The text is stored by the storage, so that it outlives us.
void make_unreadable(c10::StorageImpl* storage, const std::string& message) {
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12
// torch 2.11 can make a storage unreadable but not readable again. An explicit instantiation may
// name the private flag; what depends on the flag is refreshed when the pointer is set after this.
void make_readable(c10::StorageImpl* storage);
template <bool c10::StorageImpl::*kUnreadable>
struct ReadableAgain {
  friend void make_readable(c10::StorageImpl* storage) { storage->*kUnreadable = false; }
};
template struct ReadableAgain<&c10::StorageImpl::throw_on_immutable_data_ptr_>;
#else
void make_readable(c10::StorageImpl* storage) {
  storage->clear_data_ptr_access_error_msg_();
}
#endif

}  // namespace

SwappableStorage::SwappableStorage(std::int64_t bytes, c10::Device device, std::string message)
    : storage_(
          c10::Storage::use_byte_size_t(),
          static_cast<std::size_t>(bytes),
          c10::DataPtr(nullptr, device),
          /*allocator=*/nullptr,
          /*resizable=*/false
      ),
      device_(device),
      message_(std::move(message)) {
  make_unreadable(storage_.unsafeGetStorageImpl(), message_);
}

void SwappableStorage::attach(void* data) {
  c10::StorageImpl* storage = storage_.unsafeGetStorageImpl();
  make_readable(storage);
  storage->set_data_ptr_noswap(c10::DataPtr(data, device_));
  attached_ = true;
}

void SwappableStorage::detach() {
  c10::StorageImpl* storage = storage_.unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, device_));
  make_unreadable(storage, message_);
  attached_ = false;
}

at::Tensor SwappableStorage::view(std::int64_t offset, at::IntArrayRef shape, c10::ScalarType dtype)
    const {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage_),
      c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(dtype)
  );
  tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return tensor;
}

at::Tensor make_tombstone(
    at::IntArrayRef shape, c10::ScalarType dtype, const std::string& message
) {
  at::Tensor tensor = at::empty(shape, at::TensorOptions().dtype(dtype));
  make_unreadable(tensor.storage().unsafeGetStorageImpl(), message);
  return tensor;
}

}  // namespace hypershard::shard
