// Links that are slower to answer than those of this machine: for clusters that are emulated where
// the kernel cannot delay packets.
#pragma once

#include <cstdint>

namespace hypershard::comm {

/// How long a message is held back before it is sent. Bandwidth and order stay as they are: what is
/// started meanwhile is held for as long, so messages are late together, not one after another.
struct LinkDelay {
  std::int64_t delay_us = 0;
  std::int64_t jitter_us = 0;  ///< each message's delay is off by up to this, either way
  std::uint64_t seed = 0;      ///< of the jitter
};

/// Reads HS_LINK_DELAY_US and HS_LINK_JITTER_US.
LinkDelay link_delay_from_env(std::uint64_t seed);

}  // namespace hypershard::comm
