// Why: see fake_world.h.
#include "hypershard/comm/fake/fake_world.h"

#include <algorithm>
#include <string>
#include <sys/mman.h>
#include <utility>
#include <vector>

#include "hypershard/core/error.h"

namespace hypershard::comm {
namespace {

/// Zeroed private memory that takes pages as it is written to.
class LazyMemory {
 public:
  LazyMemory(std::int64_t bytes, std::string_view what)
      : bytes_(std::max<std::int64_t>(1, bytes)),
        address_(mmap(
            nullptr,
            static_cast<std::size_t>(bytes_),
            PROT_READ | PROT_WRITE,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
            -1,
            0
        )) {
    if (address_ == MAP_FAILED) {
      HS_FAIL(CommError, "comm.fake: cannot reserve ", bytes, " bytes of addresses for ", what);
    }
  }
  LazyMemory(const LazyMemory&) = delete;
  LazyMemory& operator=(const LazyMemory&) = delete;
  ~LazyMemory() { munmap(address_, static_cast<std::size_t>(bytes_)); }

  std::byte* address() const { return static_cast<std::byte*>(address_); }

 private:
  std::int64_t bytes_;
  void* address_;
};

class FakeBuffer : public SharedBuffer {
 public:
  FakeBuffer(std::int64_t bytes, std::string_view what) : bytes_(bytes), memory_(bytes, what) {}
  const std::byte* read() const override { return memory_.address(); }
  std::byte* write() const override { return memory_.address(); }
  std::int64_t bytes() const override { return bytes_; }

 private:
  std::int64_t bytes_;
  LazyMemory memory_;
};

class FakeArena : public SymmetricArena {
 public:
  FakeArena(std::int64_t bytes, int rank, std::string_view what)
      : bytes_(bytes), rank_(rank), own_(bytes, what), peers_(bytes, what) {}
  std::byte* local() const override { return own_.address(); }
  const std::byte* peer(int rank) const override {
    return rank == rank_ ? own_.address() : peers_.address();
  }
  std::int64_t bytes() const override { return bytes_; }

 private:
  std::int64_t bytes_;
  int rank_;
  LazyMemory own_;
  LazyMemory peers_;  ///< one for all of them: nobody writes to it
};

class FakeEpochBoard : public EpochBoard {
 public:
  explicit FakeEpochBoard(int num_rows) : num_rows_(num_rows) {}
  int num_rows() const override { return num_rows_; }
  void publish(int, std::uint64_t) override {}
  bool reached(int, std::uint64_t) const override { return true; }
  void wait_all(int, std::uint64_t, std::string_view, std::string_view) override {}

 private:
  int num_rows_;
};

class DoneWork : public Work {
 public:
  bool test() override { return true; }
  void wait() override {}
};

class FakeCommunicator : public Communicator {
 public:
  FakeCommunicator(GroupInfo info, const FakeOptions& options)
      : Communicator(std::move(info)), options_(options) {}

  std::string backend() const override { return "fake"; }
  bool has_shared_memory() const override {
    return options_.shared_memory && info().tier == layout::Tier::kIntra;
  }
  std::shared_ptr<SharedBuffer> allocate_shared(std::int64_t bytes, std::string_view what)
      override {
    return has_shared_memory() ? std::make_shared<FakeBuffer>(bytes, what)
                               : Communicator::allocate_shared(bytes, what);
  }
  std::shared_ptr<SymmetricArena> allocate_symmetric(std::int64_t bytes, std::string_view what)
      override {
    return has_shared_memory() ? std::make_shared<FakeArena>(bytes, rank(), what)
                               : Communicator::allocate_symmetric(bytes, what);
  }
  std::shared_ptr<EpochBoard> make_epoch_board(int num_rows, std::string_view what) override {
    return has_shared_memory() ? std::make_shared<FakeEpochBoard>(num_rows)
                               : Communicator::make_epoch_board(num_rows, what);
  }

 protected:
  WorkPtr start(Call) override { return std::make_shared<DoneWork>(); }

 private:
  FakeOptions options_;
};

class FakeWorld : public World {
 public:
  FakeWorld(int rank, layout::Topology topology, const FakeOptions& options)
      : World(rank, std::move(topology), /*timeout_s=*/0), options_(options) {}

  std::string description() const override {
    return concat_text(
        "fake: rank ",
        rank(),
        " of ",
        size(),
        " in ",
        topology().num_supernodes(),
        " supernodes, none of which runs"
    );
  }
  void shutdown() override {}

 protected:
  std::shared_ptr<Communicator> make_communicator(GroupInfo info) override {
    return std::make_shared<FakeCommunicator>(std::move(info), options_);
  }

 private:
  FakeOptions options_;
};

}  // namespace

std::shared_ptr<World> make_fake_world(
    int rank, layout::Topology topology, const FakeOptions& options
) {
  return std::make_shared<FakeWorld>(rank, std::move(topology), options);
}

}  // namespace hypershard::comm
