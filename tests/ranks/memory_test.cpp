// Memory over many steps, as the kernel counts it: a training step keeps nothing, and touches no
// new page once it has run a few times.
#include <memory>
#include <sys/resource.h>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "hypershard/model/gpt.h"
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
