// Why: the one place where values of several ranks are joined, so that every back end that adds
// for itself gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <c10/core/ScalarType.h>

#include "hypershard/comm/communicator.h"

namespace hypershard::comm::internal {

/// Joins `inputs` element by element, from the first to the last, and writes the result to
/// `output`.
///
/// The result is divided by the reduction's divisor, if that is not 1, before it is rounded.
/// bf16 and fp16 are accumulated in fp32 (in fp64 if that is the output's dtype) and rounded once.
/// NaN wins in max and min. With a wire dtype every input counts as what that dtype makes of it
/// (inputs that are of it already: a plain reduction); `rounds_result`: the result, too.
/// Shapes: every input and the output have `numel` elements; one input is a plain (widening) copy.
/// Memory: `output` may be one of the inputs if the dtypes are equal; any other overlap is not
/// allowed. Errors: InternalError for a dtype that the communicator's checks should have kept out.
void ordered_reduce(
    std::byte* output,
    c10::ScalarType output_dtype,
    std::span<const std::byte* const> inputs,
    c10::ScalarType input_dtype,
    std::int64_t numel,
    Reduction reduction,
    bool rounds_result = false
);

/// Rounds fp32 values to bf16, the one wire dtype there is, to nearest even.
void round_to_wire(std::byte* output, const std::byte* input, std::int64_t numel);

}  // namespace hypershard::comm::internal
