// See agreement.h.
#include "hypershard/shard/internal/agreement.h"

#include <algorithm>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "hypershard/core/error.h"
#include "hypershard/core/hash.h"
#include "hypershard/core/text.h"

namespace hypershard::shard::internal {

namespace {

// What is compared of one parameter: what it is, which part of it a rank holds, and its values.
constexpr std::size_t kNumbersEach = 3;

struct Described {
  std::vector<const LogicalParam*> params;
  std::vector<std::int64_t> signature;  // kNumbersEach a parameter
};

at::Tensor one_number(std::int64_t value) {
  at::Tensor tensor = at::empty({1}, at::TensorOptions().dtype(at::kLong));
  tensor.fill_(value);
  return tensor;
}

// A hash of the values' bits, eight bytes at a time; enough to catch a rank that was seeded
// otherwise.
std::int64_t hash_values(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().contiguous();
  const auto bytes = static_cast<std::size_t>(values.numel() * values.element_size());
  const auto* data = static_cast<const char*>(values.const_data_ptr());
  std::uint64_t hash = kHashSeed + bytes;
  std::size_t at = 0;
  for (; at + 8 <= bytes; at += 8) {
    std::uint64_t word = 0;
    std::copy_n(data + at, 8, reinterpret_cast<char*>(&word));
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
    hash ^= hash >> 32;
  }
  return static_cast<std::int64_t>(hash_memory(data + at, bytes - at, hash));
}

std::string description_of(const UnitParam& each, const std::string& unit) {
  const LogicalParam& param = each.param;
  std::string text = concat_text(
      param.name,
      param.part.block.shape,
      c10::toString(param.tensor.scalar_type()),
      " in ",
      unit,
      param.family,
      param.tensor.requires_grad(),
      static_cast<int>(each.dtypes.storage),
      static_cast<int>(each.dtypes.compute),
      static_cast<int>(each.dtypes.reduce),
      static_cast<int>(each.dtypes.wire.value_or(each.dtypes.reduce)),
      static_cast<int>(each.dtypes.update),
      param.part.reduce_axes
  );
  for (const layout::Block& block : param.part.of_ranks) {
    text += to_text(block);
  }
  return text;
}

Described describe(const std::vector<UnitSpec>& specs, InitialValues how) {
  Described described;
  for (const UnitSpec& spec : specs) {
    for (const UnitParam& each : spec.params) {
      const bool compare_values = how == InitialValues::kCheckEqual && !each.param.on_meta;
      described.params.push_back(&each.param);
      for (const std::string& text :
           {description_of(each, spec.path), to_text(each.param.part.block)}) {
        described.signature.push_back(static_cast<std::int64_t>(hash_bytes(text)));
      }
      described.signature.push_back(compare_values ? hash_values(each.param.tensor) : 0);
    }
  }
  return described;
}

void check_counts(const Described& described, comm::Communicator& ranks) {
  const auto mine = static_cast<std::int64_t>(described.params.size());
  const at::Tensor counts = gather_rows(ranks, one_number(mine));
  const auto* per_rank = counts.const_data_ptr<std::int64_t>();
  for (int r = 0; r < ranks.size(); ++r) {
    HS_CHECK_EQ(
        per_rank[r],
        per_rank[0],
        "shard: ranks were given different models: rank ",
        ranks.info().global_ranks[static_cast<std::size_t>(r)],
        " has another number of parameters than rank ",
        ranks.info().global_ranks[0]
    );
  }
}

[[noreturn]] void fail_difference(
    const LogicalParam& param, bool in_values, comm::Communicator& ranks, int first, int second
) {
  const auto global = [&](int rank) {
    return ranks.info().global_ranks[static_cast<std::size_t>(rank)];
  };
  HS_FAIL(
      InvalidArgument,
      "shard: parameter '",
      param.name,
      "' (shape ",
      param.shape,
      ") differs in ",
      in_values ? "initial values"
                : "name, shape, dtype, unit, update family, precision, requires_grad or layout",
      " between rank ",
      global(first),
      " and rank ",
      global(second),
      HS_HINT(
          in_values ? "seed every rank alike before building the model, or set initial_values = "
                      "broadcast to take rank 0's, or trust to take each rank's own part"
                    : "build the same model on every rank; if ranks hold parts of one parameter, "
                      "state its layout in options.parameters (plan::parameter_specs makes them)"
      )
  );
}

// Throws, naming the first parameter that is not the same on all ranks of a communicator.
void find_difference(const Described& described, comm::Communicator& ranks) {
  check_counts(described, ranks);
  const auto width = static_cast<std::int64_t>(described.signature.size());
  const at::Tensor mine = at::empty({width}, at::TensorOptions().dtype(at::kLong));
  std::copy(
      described.signature.begin(), described.signature.end(), mine.mutable_data_ptr<std::int64_t>()
  );
  const at::Tensor all = gather_rows(ranks, mine);
  const auto* rows = all.const_data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < described.params.size(); ++i) {
    const auto row = [&](int rank) { return rows + rank * width + kNumbersEach * i; };
    for (int r = 1; r < ranks.size(); ++r) {
      if (row(r)[0] != row(0)[0]) {
        fail_difference(*described.params[i], /*in_values=*/false, ranks, 0, r);
      }
      int same_part = 0;  // the first rank that holds this rank's part; itself at the latest
      while (row(same_part)[1] != row(r)[1]) {
        ++same_part;
      }
      if (row(r)[2] != row(same_part)[2]) {
        fail_difference(*described.params[i], /*in_values=*/true, ranks, same_part, r);
      }
    }
  }
}

// Tells whether the ranks along one axis hold the same part.
bool is_replicated(
    const ParameterPart& part,
    const std::vector<int>& along_axis,
    const std::vector<int>& plan_ranks
) {
  return part.of_ranks.empty() || std::all_of(along_axis.begin(), along_axis.end(), [&](int rank) {
           const auto at = std::find(plan_ranks.begin(), plan_ranks.end(), rank);
           return part.of_ranks[static_cast<std::size_t>(at - plan_ranks.begin())] == part.block;
         });
}

// From the rank with coordinate 0, axis by axis: parts that are cut over an axis stay apart.
void broadcast_values(
    const LogicalParam& param, const DataParallel& parallel, const comm::ProcessMesh& mesh
) {
  const c10::NoGradGuard no_grad;
  at::Tensor target = param.tensor;
  const at::Tensor values = target.detach().contiguous();
  if (parallel.plan) {
    const std::vector<int>& plan_ranks = parallel.plan->info().global_ranks;
    for (const layout::MeshAxis& axis : mesh.mesh().axes()) {
      const auto ranks = mesh.axis(axis.name);
      const std::vector<int>& along = ranks->info().global_ranks;
      const bool is_plan_axis = std::all_of(along.begin(), along.end(), [&](int rank) {
        return std::find(plan_ranks.begin(), plan_ranks.end(), rank) != plan_ranks.end();
      });
      if (axis.size > 1 && is_plan_axis && is_replicated(param.part, along, plan_ranks)) {
        ranks->broadcast(values, 0, param.name)->wait_released();
      }
    }
  }
  if (parallel.control->size() > 1) {
    parallel.control->broadcast(values, 0, param.name)->wait_released();
  }
  target.copy_(values);
}

}  // namespace

at::Tensor order_signature(const std::vector<int>& order) {
  at::Tensor signature = at::zeros({2}, at::TensorOptions().dtype(at::kLong));
  auto* data = signature.mutable_data_ptr<std::int64_t>();
  data[0] = static_cast<std::int64_t>(order.size());
  data[1] = static_cast<std::int64_t>(hash_memory(order.data(), order.size() * sizeof(int)));
  return signature;
}

at::Tensor gather_rows(comm::Communicator& communicator, const at::Tensor& mine) {
  // A communicator of planned ranks moves nothing: there all agree.
  const at::Tensor all =
      mine.view({1, -1}).expand({communicator.size(), mine.numel()}).contiguous();
  communicator.all_gather(all.view({-1}), mine, {}, "agreement")->wait_released();
  return all;
}

bool equal_on_all_ranks(comm::Communicator& communicator, const at::Tensor& mine) {
  if (communicator.size() == 1) {
    return true;
  }
  const at::Tensor all = gather_rows(communicator, mine);
  return at::equal(all, mine.view({1, -1}).expand_as(all));
}

// The data axes' verdict goes along, so that the plan axes spread it to all.
bool equal_on_all_ranks(const DataParallel& parallel, const at::Tensor& mine) {
  const bool equal = equal_on_all_ranks(*parallel.control, mine);
  if (!parallel.plan) {
    return equal;
  }
  const at::Tensor both = at::cat({mine, one_number(equal ? 1 : 0)});
  return equal_on_all_ranks(*parallel.plan, both) && equal;
}

void agree_on_options(
    const comm::ProcessMesh& mesh,
    const FullyShardOptions& options,
    const layout::PlaneLayouts& layouts
) {
  const std::string text = concat_text(
      "runtime ",
      to_text(layouts.runtime, mesh.mesh()),
      ", gradient ",
      to_text(layouts.gradient, mesh.mesh()),
      ", update ",
      to_text(layouts.update, mesh.mesh()),
      "; reshard_after_forward ",
      options.reshard_after_forward,
      ", forward_prefetch ",
      options.forward_prefetch,
      ", backward_prefetch ",
      options.backward_prefetch,
      ", gradient_buffers ",
      options.gradient_buffers,
      ", bucket_bytes ",
      options.bucket_bytes.value_or(-1),
      ", share ",
      static_cast<int>(options.share),
      ", initial_values ",
      static_cast<int>(options.initial_values)
  );
  const auto everyone = mesh.world().world_communicator();
  const at::Tensor all =
      gather_rows(*everyone, one_number(static_cast<std::int64_t>(hash_bytes(text))));
  const auto* rows = all.const_data_ptr<std::int64_t>();
  for (int rank = 1; rank < everyone->size(); ++rank) {
    HS_CHECK(
        rows[rank] == rows[0],
        "shard: rank ",
        rank,
        " was given other options of fully_shard than rank 0; this rank, ",
        mesh.rank(),
        ", has ",
        text,
        HS_HINT("give all ranks the same options")
    );
  }
}

void agree_on_parameters(
    const std::vector<UnitSpec>& specs,
    const DataParallel& parallel,
    const comm::ProcessMesh& mesh,
    InitialValues how
) {
  if (parallel.control->size() == 1 && !parallel.plan) {
    return;
  }
  const Described described = describe(specs, how);
  const auto hash = static_cast<std::int64_t>(hash_memory(
      described.signature.data(), described.signature.size() * sizeof(described.signature.front())
  ));
  if (parallel.plan) {
    // Parts differ by right, and all ranks must learn of a fault that only some data axes see.
    find_difference(described, *mesh.world().world_communicator());
  } else if (!equal_on_all_ranks(*parallel.control, one_number(hash))) {
    // One number tells whether all agree; only if not is it worth finding out who does not.
    find_difference(described, *parallel.control);
  }
  if (how == InitialValues::kBroadcast) {
    for (const LogicalParam* param : described.params) {
      if (!param->on_meta) {
        broadcast_values(*param, parallel, mesh);
      }
    }
  }
}

}  // namespace hypershard::shard::internal
