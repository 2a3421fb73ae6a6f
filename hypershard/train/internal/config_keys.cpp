// See config_keys.h.
#include "hypershard/train/internal/config_keys.h"

#include <string>
#include <vector>

namespace hypershard::train::internal {
namespace {

using Strategy = layout::Strategy;

const std::vector<std::string>& dtype_words() {
  static const std::vector<std::string> words = {"auto", "fp64", "fp32", "bf16", "fp16"};
  return words;
}

}  // namespace

void bind_parallel(Schema& schema, ParallelSection& parallel) {
  schema.section("parallel", "How the model is spread over ranks.")
      .bind_choice(
          "strategy",
          &parallel.strategy,
          {{"ddp", Strategy::kDdp},
           {"zero1", Strategy::kZero1},
           {"zero2", Strategy::kZero2},
           {"zero3", Strategy::kZero3},
           {"fsdp", Strategy::kZero3},
           {"hsdp", Strategy::kHsdp},
           {"hierarchical", Strategy::kHierarchical}},
          {.doc = "What is sharded: ddp nothing, zero1 optimizer state, zero2 gradients too, zero3 "
                  "(or fsdp) parameters too; hsdp shards inside `shard` and repeats over "
                  "`replicate`; hierarchical is hsdp with optimizer state sharded over both."}
      )
      .bind(
          "split_runtime",
          &parallel.layouts.runtime,
          {.doc = "Axes, of \"replicate\" and \"shard\", that runtime parameters are split along, "
                  "instead of what the strategy says; given together with the next two."}
      )
      .bind(
          "split_gradient",
          &parallel.layouts.gradient,
          {.doc = "Axes that reduced gradients are split along."}
      )
      .bind(
          "split_update",
          &parallel.layouts.update,
          {.doc = "Axes that update parameters and optimizer state are split along."}
      )
      .bind(
          "replicate",
          &parallel.replicate,
          {.min = -1, .doc = "Size of the mesh axis between supernodes; -1 takes what is left."}
      )
      .bind(
          "shard",
          &parallel.shard,
          {.min = -1, .doc = "Size of the mesh axis inside a supernode; -1 takes what is left."}
      )
      .bind(
          "tp",
          &parallel.tp,
          {.min = 1,
           .max = 1 << 16,
           .doc =
               "Size of the innermost mesh axis, whose ranks share their rows of data and divide "
               "the model by a plan."}
      )
      .bind(
          "plan",
          &parallel.plan,
          {.doc =
               "Ready-made plans over `tp`: \"tensor\" cuts heads and hidden units, \"sequence\" "
               "positions between them, \"vocabulary\" embedding, head and loss; if not given, "
               "[\"tensor\"] for tp > 1. The rules of section plan are added."}
      )
      .bind(
          "units",
          &parallel.units,
          {.doc = "Patterns of module paths; what matches is unsharded as one unit."}
      )
      .bind(
          "reshard_after_forward",
          &parallel.reshard_after_forward,
          {.doc = "Free a unit's unsharded parameters between its forward and its backward."}
      )
      .bind(
          "forward_prefetch",
          &parallel.forward_prefetch,
          {.min = 0, .max = 1 << 16, .doc = "Units whose unshard starts ahead of need in forward."}
      )
      .bind(
          "backward_prefetch",
          &parallel.backward_prefetch,
          {.min = 0, .max = 1 << 16, .doc = "Units whose unshard starts ahead of need in backward."}
      )
      .bind(
          "gradient_buffers",
          &parallel.gradient_buffers,
          {.min = 1, .max = 1 << 16, .doc = "Units whose reduction may be under way at once."}
      )
      .bind(
          "bucket_bytes",
          &parallel.bucket_bytes,
          {.min = -1,
           .doc =
               "Bytes that a rank's consecutive units have together before their gradients cross "
               "between supernodes; 0: unit by unit; -1: so many that the link's latency, which "
               "is measured at the start, costs a tenth of their time."}
      )
      .bind_choice(
          "share",
          &parallel.share,
          {{"auto", shard::Share::kAuto}, {"on", shard::Share::kOn}, {"off", shard::Share::kOff}},
          {.doc = "Whether ranks of one supernode read one copy of the parameters; on is an error "
                  "where that cannot be, off is for comparison."}
      )
      .bind_choice(
          "backend",
          &parallel.backend,
          {{"auto", comm::Backend::kAuto},
           {"shm", comm::Backend::kShm},
           {"c10d", comm::Backend::kC10d}},
          {.doc = "auto: shared memory inside a supernode and c10d between; c10d: everywhere."}
      )
      .bind(
          "supernodes",
          &parallel.supernodes,
          {.min = 0,
           .doc = "Pretend that the ranks form so many supernodes of equal size; 0 goes by host."}
      )
      .bind(
          "timeout_s",
          &parallel.timeout_s,
          {.min = 0,
           .max = 31536000,  // a year, as for HS_TIMEOUT_S; clocks in nanoseconds hold it
           .doc = "Seconds a collective waits for its peers; 0 takes HS_TIMEOUT_S."}
      );
}

void bind_precision(Schema& schema, PrecisionSection& precision) {
  schema.section("precision", "The dtypes of a parameter's life. auto: fp32.")
      .bind_choice(
          "compute",
          &precision.compute,
          dtype_words(),
          {.doc = "What kernels read; fp16 is refused, for "
                  "there is no loss scaling."}
      )
      .bind_choice(
          "storage",
          &precision.storage,
          dtype_words(),
          {.doc = "What is kept and gathered; auto: as compute."}
      )
      .bind_choice(
          "reduce",
          &precision.reduce,
          dtype_words(),
          {.doc =
               "What gradients are summed in over ranks; auto: at least fp32; fp16 is refused as "
               "in `compute`."}
      )
      .bind_choice(
          "wire",
          &precision.wire,
          dtype_words(),
          {.doc = "What gradients are rounded to between supernodes, where they are summed in fp32 "
                  "all the same: bf16, or auto: as reduce."}
      )
      .bind_choice(
          "update",
          &precision.update,
          dtype_words(),
          {.doc = "Parameters that the optimizer owns, and its state; auto: at least fp32."}
      )
      .bind_choice(
          "output",
          &precision.output,
          dtype_words(),
          {.doc = "The model's result; auto: as the model makes it."}
      );
}

}  // namespace hypershard::train::internal
