// Why: what fails on one rank must fail on all, with the same words, or the others would wait for
// it or carry on with half a checkpoint.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "hypershard/comm/communicator.h"

namespace hypershard::checkpoint::internal {

/// Returns every rank's text, by rank. Collective: yes.
std::vector<std::string> exchange_texts(comm::Communicator& ranks, const std::string& mine);

/// Runs `body` on every rank and returns what each returned, by rank. If it throws on any, all
/// ranks throw an error of that type, naming the first rank that failed and how many others did.
/// `body` may not communicate. Collective: yes.
std::vector<std::string> together(
    comm::Communicator& ranks, const std::function<std::string()>& body
);

}  // namespace hypershard::checkpoint::internal
