// Why: the one table of environment variables. To add a variable, add a row: nothing else is
// needed. Rows are sorted by name, which a test checks; `doc` is a whole sentence.
#include "hypershard/core/env.h"

namespace hypershard::env {
namespace {

constexpr Variable kVariables[] = {
    {.name = "HS_BOOTSTRAPPED",
     .default_value = "",
     .doc = "Set by scripts/test to say that dependencies are in place; the program ignores it."},
    {.name = "HS_COMM",
     .default_value = "auto",
     .doc = "Back end of the collectives; auto takes shm inside a host and c10d between hosts.",
     .choices = "auto|shm|c10d"},
    {.name = "HS_DEBUG_RESHARD",
     .default_value = "throw",
     .doc = "How a read of a resharded parameter is caught: it throws; with nan, memory that "
            "nobody owns is also filled with NaN, for reads through a pointer kept from before.",
     .choices = "throw|nan"},
    {.name = "HS_HEARTBEAT_MS",
     .type = Type::kDuration,
     .default_value = "500",
     .doc = "How often a rank shows its peers that it lives.",
     .min = 10,
     .max = 3'600'000},
    {.name = "HS_JOB_NONCE",
     .default_value = "",
     .doc = "Name that the ranks of one job share and no other job on the host has; the launcher "
            "sets it."},
    {.name = "HS_LINK_DELAY_US",
     .type = Type::kInt,
     .default_value = "0",
     .doc =
         "Microseconds that messages of groups which cross supernodes are held back: a slow link "
         "for emulated clusters (scripts/cluster-emulate sets it where the kernel has no netem).",
     .min = 0,
     .max = 60'000'000},
    {.name = "HS_LINK_JITTER_US",
     .type = Type::kInt,
     .default_value = "0",
     .doc = "By how much HS_LINK_DELAY_US is off at random, either way.",
     .min = 0,
     .max = 60'000'000},
    {.name = "HS_LOG_LEVEL",
     .default_value = "info",
     .doc = "Least severe level that is logged.",
     .choices = "error|warn|info|debug"},
    {.name = "HS_LOG_RANKS",
     .default_value = "0",
     .doc =
         "Ranks that log info and debug lines: all, or a list such as 0,4-7. Warnings and errors "
         "are logged by every rank."},
    {.name = "HS_PIP_ARGS",
     .default_value = "",
     .doc = "More arguments for pip install in scripts/bootstrap; the program ignores it."},
    {.name = "HS_REQUIRE_NETNS",
     .type = Type::kBool,
     .default_value = "false",
     .doc =
         "Makes tests that need an emulated cluster fail, not skip, where network namespaces are "
         "not permitted; the program ignores it."},
    {.name = "HS_SEED",
     .type = Type::kInt,
     .default_value = "-1",
     .doc = "Seed of weights, data order and sampling where run.seed (or sample --seed) is not "
            "given; -1: none.",
     .min = -1},
    {.name = "HS_SHARE",
     .default_value = "auto",
     .doc =
         "Whether ranks of one supernode share parameter memory: off gives each its own (the same "
         "bits, more memory), on fails where sharing is impossible.",
     .choices = "auto|on|off"},
    {.name = "HS_SUPERNODE",
     .type = Type::kInt,
     .default_value = "-1",
     .doc = "Number of this rank's supernode; -1 puts ranks of one host into one supernode.",
     .min = -1,
     .max = 2'147'483'647},
    {.name = "HS_THREADS",
     .type = Type::kInt,
     .default_value = "0",
     .doc = "Threads inside an operator, a rank; 0 divides the host's cores by its ranks.",
     .min = 0,
     .max = 4096},
    {.name = "HS_TIMEOUT_S",
     .type = Type::kDuration,
     .default_value = "300",
     .doc = "How long a collective waits for its peers before it fails.",
     .min = 0.001,
     .max = 31'536'000},
    {.name = "HS_TORCH_ROOT",
     .default_value = "",
     .doc = "Folder of the torch package that the scripts build against; the program ignores it."},
    {.name = "HS_TRACE",
     .default_value = "",
     .doc = "Folder or file for a trace of the run in Chrome's format; empty records none."},
};

}  // namespace

std::span<const Variable> variables() {
  return kVariables;
}

}  // namespace hypershard::env
