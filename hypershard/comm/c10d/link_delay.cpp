// Why: the environment is read in one place, so that an engine under test gets its delay as an
// argument.
#include "hypershard/comm/c10d/link_delay.h"

#include "hypershard/core/env.h"

namespace hypershard::comm {

LinkDelay link_delay_from_env(std::uint64_t seed) {
  return {
      .delay_us = env::get_int("HS_LINK_DELAY_US"),
      .jitter_us = env::get_int("HS_LINK_JITTER_US"),
      .seed = seed
  };
}

}  // namespace hypershard::comm
