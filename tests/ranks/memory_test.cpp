// Memory over many steps, as the kernel counts it: a training step keeps nothing, and touches no
// new page once it has run a few times.
#include <cstdint>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <sys/resource.h>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "hypershard/model/gpt.h"
#include "hypershard/nn/gradient_slot.h"
#include "hypershard/optim/adamw.h"
#include "hypershard/shard/fully_shard.h"
#include "hypershard/testing/run_ranks.h"
#include "hypershard/train/process_memory.h"

namespace hypershard {
namespace {

std::int64_t minor_faults() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

/// Bytes of the memory behind an address that the kernel counts for this process: pages that are
/// mapped here (each once a mapping), and pages divided by how often anybody maps them.
struct Mapped {
  std::int64_t resident = 0;
  std::int64_t proportional = 0;
};

/// Adds up all mappings of the file that is mapped at `address`.
Mapped mapped_at(const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  std::map<std::string, Mapped> by_file;
  std::string file;
  std::string wanted;
  std::ifstream smaps("/proc/self/smaps");
  for (std::string line; std::getline(smaps, line);) {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    char dash = 0;
    std::istringstream words(line);
    std::string permissions;
    std::string offset;
    std::string device;
    std::string inode;
    if (words >> std::hex >> begin >> dash >> end >> permissions >> offset >> device >> inode &&
        dash == '-') {
      file = device + " " + inode;
      wanted = begin <= at && at < end ? file : wanted;
    } else if (line.starts_with("Rss:")) {
      by_file[file].resident += std::stoll(line.substr(4)) * 1024;
    } else if (line.starts_with("Pss:")) {
      by_file[file].proportional += std::stoll(line.substr(4)) * 1024;
    }
  }
  return by_file[wanted];
}

/// Returns what the kernel finds resident of this process's private memory, page by page: RssAnon
/// is a sum that lags.
std::int64_t private_resident_bytes() {
  std::ifstream rollup("/proc/self/smaps_rollup");
  for (std::string line; std::getline(rollup, line);) {
    if (line.starts_with("Anonymous:")) {
      return std::stoll(line.substr(10)) * 1024;
    }
  }
  return 0;
}

/// Passes a parameter's slot on and remembers where its gradient was written.
class WatchedSlot : public nn::GradientSlot {
 public:
  explicit WatchedSlot(std::shared_ptr<nn::GradientSlot> slot) : slot_(std::move(slot)) {}
  Claim claim() override {
    Claim claim = slot_->claim();
    if (claim.destination.defined()) {
      last_ = claim.destination.const_data_ptr();
    }
    return claim;
  }
  const void* last() const { return last_; }

 private:
  std::shared_ptr<nn::GradientSlot> slot_;
  const void* last_ = nullptr;
};

TEST(MemoryTest, GradientBuffersAreWhatTheKernelCounts) {
  testing::run_ranks(
      3,
      [](const std::shared_ptr<comm::World>& world) {
        model::Gpt model(model::GptConfig{
            .vocab_size = 256, .num_layers = 4, .dim = 192, .num_heads = 2, .max_sequence = 16
        });
        const comm::ProcessMesh mesh(
            world, layout::DeviceMesh({{"shard", world->size()}}, world->topology())
        );
        shard::FullyShardOptions options;
        options.units = {"blocks.*"};
        const shard::ShardedModel sharded = shard::fully_shard(*model, mesh, options);
        std::vector<std::shared_ptr<WatchedSlot>> slots;
        for (const auto& item : model->named_parameters()) {
          slots.push_back(std::make_shared<WatchedSlot>(nn::slot_of(item.value())));
          nn::set_gradient_slot(item.value(), slots.back());
        }
        const at::Tensor batch = at::arange(34, at::kLong).mul(7).remainder(256).view({2, 17});
        model->loss(batch.narrow(1, 0, 16), batch.narrow(1, 1, 16)).backward();

        // Each rank maps the buffers of all, once to read and once to write.
        const std::int64_t mappings = 2 * world->size();
        constexpr std::int64_t kPage = 4096;
        const std::int64_t counted = sharded.counters().gradient_buffer_bytes;
        ASSERT_GT(counted, 0);
        for (const auto& slot : slots) {
          ASSERT_NE(slot->last(), nullptr);
          EXPECT_EQ(
              mapped_at(slot->last()).resident, mappings * ((counted + kPage - 1) / kPage * kPage)
          );
        }
        world->world_communicator()->barrier()->wait();
      },
      {.backend = testing::RankBackend::kShm}
  );
}

TEST(MemoryTest, UnshardedParametersAreWhatTheKernelCounts) {
  testing::run_ranks(
      2,
      [](const std::shared_ptr<comm::World>& world) {
        model::Gpt model(model::GptConfig{
            .vocab_size = 64, .num_layers = 5, .dim = 512, .num_heads = 2, .max_sequence = 16
        });
        const comm::ProcessMesh mesh(
            world, layout::DeviceMesh({{"shard", world->size()}}, world->topology())
        );
        shard::FullyShardOptions options;
        options.units = {"blocks.*"};
        options.share = shard::Share::kOff;
        const shard::ShardedModel sharded = shard::fully_shard(*model, mesh, options);
        sharded.unshard("blocks.0");  // what is made once
        world->world_communicator()->barrier()->wait();
        const std::int64_t counted = sharded.counters().peak_unsharded_bytes;
        const std::int64_t resident = private_resident_bytes();
        for (int i = 1; i < 5; ++i) {
          sharded.unshard("blocks." + std::to_string(i));
        }
        const std::int64_t more = sharded.counters().peak_unsharded_bytes - counted;
        EXPECT_EQ(more, 4 * counted);
        EXPECT_NEAR(
            static_cast<double>(private_resident_bytes() - resident),
            static_cast<double>(more),
            0.01 * static_cast<double>(more)
        );
        world->world_communicator()->barrier()->wait();
      },
      {.backend = testing::RankBackend::kShm}
  );
}

// Three ranks have every unit whole at once, and the host one copy.
TEST(MemoryTest, AnUnshardedUnitIsCountedOnceForTheHost) {
  testing::run_ranks(
      3,
      [](const std::shared_ptr<comm::World>& world) {
        model::Gpt model(model::GptConfig{
            .vocab_size = 1024, .num_layers = 4, .dim = 192, .num_heads = 2, .max_sequence = 16
        });
        const comm::ProcessMesh mesh(
            world, layout::DeviceMesh({{"shard", world->size()}}, world->topology())
        );
        shard::FullyShardOptions options;
        options.units = {"blocks.*"};
        options.share = shard::Share::kOn;
        const shard::ShardedModel sharded = shard::fully_shard(*model, mesh, options);
        sharded.unshard("root");
        for (int i = 0; i < 4; ++i) {
          sharded.unshard("blocks." + std::to_string(i));
        }
        std::int64_t bytes = 0;
        for (const at::Tensor& parameter : model->parameters()) {
          EXPECT_TRUE(at::isfinite(parameter).all().item<bool>());  // reads every page
          bytes += static_cast<std::int64_t>(parameter.nbytes());
        }
        const auto everyone = world->world_communicator();
        everyone->barrier()->wait();
        const Mapped here = mapped_at(model->embed->weight.const_data_ptr());
        at::Tensor sums = at::empty({2}, at::kDouble);
        sums[0] = static_cast<double>(here.proportional);
        sums[1] = static_cast<double>(here.resident);
        everyone->all_reduce(sums)->wait();
        const auto whole = static_cast<double>(bytes);
        EXPECT_GE(here.resident, bytes) << "this rank sees all of it";
        EXPECT_GE(sums[0].item<double>(), 0.98 * whole);  // thirds of pages are rounded
        EXPECT_LE(sums[0].item<double>(), 1.05 * whole) << "the host holds one copy";
        EXPECT_GE(sums[1].item<double>(), 3 * whole) << "each rank maps one";
        everyone->barrier()->wait();
      },
      {.backend = testing::RankBackend::kShm}
  );
}

TEST(MemoryTest, AThousandStepsNeedNoMoreThanAHundred) {
  testing::run_ranks(
      2,
      [](const std::shared_ptr<comm::World>& world) {
        train::keep_freed_memory();
        at::set_num_threads(1);
        model::Gpt model(model::GptConfig{
            .vocab_size = 64, .num_layers = 2, .dim = 32, .num_heads = 2, .max_sequence = 16
        });
        const comm::ProcessMesh mesh(
            world, layout::DeviceMesh({{"shard", world->size()}}, world->topology())
        );
        shard::FullyShardOptions options;
        options.units = {"blocks.*"};
        const shard::ShardedModel sharded = shard::fully_shard(*model, mesh, options);
        optim::AdamW optimizer(sharded, {});
        const auto step = [&](int number) {
          const at::Tensor batch =
              at::arange(34, at::kLong).mul(7).add(number).remainder(64).view({2, 17});
          model->loss(batch.narrow(1, 0, 16), batch.narrow(1, 1, 16)).backward();
          sharded.clip_grad_norm_(1.0);
          optimizer.step();
          sharded.zero_grad();
        };
        for (int i = 0; i < 100; ++i) {
          step(i);
        }
        const std::int64_t resident = train::resident_bytes();
        const std::int64_t faults = minor_faults();
        const auto buffers = sharded.counters().gradient_buffer_bytes;
        for (int i = 100; i < 1000; ++i) {
          step(i);
        }
        // The allocator may still settle by a few pages.
        EXPECT_LE(train::resident_bytes() - resident, 512 << 10);
        EXPECT_LE(minor_faults() - faults, 200);
        EXPECT_EQ(sharded.counters().gradient_buffer_bytes, buffers);
      },
      {.backend = testing::RankBackend::kShm, .deadline_s = 100}
  );
}

}  // namespace
}  // namespace hypershard
