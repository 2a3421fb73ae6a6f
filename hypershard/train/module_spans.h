// Why: a unit's time is too coarse to act on. While a trace is recorded, every hookable module of
// a model shows its own forward and backward.
#pragma once

#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace hypershard::train {

/// Adds hooks to every hookable module below `root` that record spans `forward PATH` and
/// `backward PATH` while tracing, and cost a branch otherwise.
///
/// Modules whose path is in `but` are left out: units, whose spans the engine records. A backward
/// begins with the gradient of a module's output and ends with that of its input, so modules with
/// one input in common end together.
/// Threads: as for the modules. Call once.
void add_module_spans(torch::nn::Module& root, const std::vector<std::string>& but);

}  // namespace hypershard::train
