// See dtypes.h.
#include "hypershard/shard/internal/dtypes.h"

#include "hypershard/core/error.h"

namespace hypershard::shard::internal {

namespace {

bool is_half(c10::ScalarType dtype) {
  return c10::isFloatingType(dtype) && c10::elementSize(dtype) < 4;
}

}  // namespace

GroupDtypes settle_dtypes(const MixedPrecision& precision, const LogicalParam& param) {
  const c10::ScalarType own = param.tensor.scalar_type();
  if (!c10::isFloatingType(own)) {
    HS_CHECK(
        !param.tensor.requires_grad(),
        "shard: parameter '",
        param.name,
        "' of dtype ",
        c10::toString(own),
        " requires a gradient; only floating parameters can"
    );
    return {.storage = own, .compute = own, .reduce = own, .update = own};
  }
  const auto widen = [](c10::ScalarType dtype) { return is_half(dtype) ? c10::kFloat : dtype; };
  GroupDtypes dtypes;
  dtypes.compute = precision.compute.value_or(own);
  dtypes.storage = precision.storage.value_or(dtypes.compute);
  dtypes.reduce = precision.reduce.value_or(widen(dtypes.compute));
  dtypes.update = precision.update.value_or(widen(own));
  if (precision.wire && *precision.wire != dtypes.reduce) {
    HS_CHECK(
        *precision.wire == c10::kBFloat16 && dtypes.reduce == c10::kFloat,
        "shard: the gradients of parameter '",
        param.name,
        "' are reduced in ",
        c10::toString(dtypes.reduce),
        " and cannot travel as ",
        c10::toString(*precision.wire),
        HS_HINT("precision.wire is bfloat16 where they are reduced in float32, else the same dtype")
    );
    dtypes.wire = precision.wire;
  }
  return dtypes;
}

void check_precision(const MixedPrecision& precision) {
  const auto check = [](const std::optional<c10::ScalarType>& dtype, const char* what) {
    HS_CHECK(
        !dtype || *dtype == c10::kDouble || *dtype == c10::kFloat || *dtype == c10::kBFloat16 ||
            *dtype == c10::kHalf,
        "shard: precision.",
        what,
        " is ",
        c10::toString(dtype.value_or(c10::kFloat)),
        "; expected float64, float32, bfloat16 or float16"
    );
  };
  check(precision.storage, "storage");
  check(precision.compute, "compute");
  check(precision.reduce, "reduce");
  check(precision.wire, "wire");
  check(precision.update, "update");
  check(precision.output, "output");
}

}  // namespace hypershard::shard::internal
