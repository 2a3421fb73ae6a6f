// Starting, waiting and failing; what each collective consists of is in message_collectives.cpp.
#include "hypershard/comm/c10d/internal/message_communicator.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "hypershard/comm/internal/dtype_text.h"
#include "hypershard/comm/internal/idle_work.h"
#include "hypershard/comm/internal/ordered_reduce.h"
#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"
#include "hypershard/core/hash.h"

namespace hypershard::comm::internal {
namespace {

// A wait that lasts this many heartbeats starts to ask why.
constexpr double kPatientBeats = 2;
constexpr double kDefaultHeartbeatS = 0.5;
constexpr double kMaxProbePauseS = 10;

class FinishedWork : public Work {
 public:
  bool test() override { return true; }
  void wait() override {}
};

class MessageWork : public Work {
 public:
  MessageWork(std::shared_ptr<MessageGroup> group, ExchangePtr exchange, CollectiveNote note)
      : group_(std::move(group)), exchange_(std::move(exchange)), note_(std::move(note)) {}

  bool test() override {
    const Progress progress = group_->engine.test(*exchange_);
    if (progress == Progress::kFailed) {
      group_->raise(note_, /*timed_out=*/false, /*waited_s=*/0);
    }
    return progress == Progress::kDone;
  }

  void wait() override {
    if (test()) {
      return;
    }
    const std::int64_t began_ns = now_ns();
    std::int64_t elsewhere_ns = 0;
    wait_long(Stopwatch(), elsewhere_ns);
    group_->stats.wait_ns += now_ns() - began_ns - elsewhere_ns;
    group_->stats.late_ns +=
        std::max<std::int64_t>(0, exchange_->done_ns - began_ns - elsewhere_ns);
  }

 private:
  // Waits in slices of a heartbeat and, once that takes long, listens to what the others say.
  void wait_long(const Stopwatch& stopwatch, std::int64_t& elsewhere_ns) {
    MessageEngine& engine = group_->engine;
    Health* health = group_->health.get();
    const double beat_s = health != nullptr ? health->heartbeat_s() : kDefaultHeartbeatS;
    const double timeout_s = group_->info.timeout_s;
    std::optional<Health::Watch> watch;
    double next_probe_s = kPatientBeats * beat_s;
    double probe_pause_s = beat_s;
    while (true) {
      const double left_s = timeout_s - stopwatch.elapsed_s();
      const double slice_s = std::min(beat_s, work_elsewhere(elsewhere_ns));
      const Progress progress = engine.wait_for(*exchange_, std::clamp(left_s, 0.0, slice_s));
      const double waited_s = stopwatch.elapsed_s();
      if (progress == Progress::kDone) {
        return;
      }
      if (progress == Progress::kFailed) {
        group_->raise(note_, /*timed_out=*/false, waited_s);
      }
      if (waited_s >= timeout_s) {
        group_->raise(note_, /*timed_out=*/true, waited_s);
      }
      if (waited_s < kPatientBeats * beat_s) {
        continue;
      }
      if (health != nullptr && !watch) {
        watch.emplace(health, group_->info.global_ranks);
      }
      if (health != nullptr && health->verdict(group_->info, Stall{.note = note_})) {
        group_->raise(note_, /*timed_out=*/false, waited_s);
      }
      if (waited_s >= next_probe_s) {
        engine.probe(static_cast<int>(group_->info.global_ranks.size()), group_->info.rank);
        next_probe_s = waited_s + probe_pause_s;
        probe_pause_s = std::min(2 * probe_pause_s, kMaxProbePauseS);
      }
    }
  }

  // Returns how long the wait may last until there may be more to do.
  static double work_elsewhere(std::int64_t& elsewhere_ns) {
    const IdleWorker::State state = IdleWork::work(nullptr, elsewhere_ns);
    return state == IdleWorker::State::kNothing ? std::numeric_limits<double>::infinity()
                                                : static_cast<double>(kIdleSliceNs) * 1e-9;
  }

  std::shared_ptr<MessageGroup> group_;
  ExchangePtr exchange_;
  CollectiveNote note_;
};

std::uint64_t hash_counts(std::uint64_t hash, const std::vector<std::int64_t>& counts) {
  for (const std::int64_t count : counts) {
    hash = hash_combine(hash, static_cast<std::uint64_t>(count));
  }
  return hash;
}

// Long lists of ranks or segments are cut short: this text travels with every heartbeat.
std::string cuts_text(const std::vector<ReduceSegment>& segments) {
  constexpr std::size_t kShown = 4;
  std::string text =
      segments.size() == 1 ? ", counts" : concat_text(", ", segments.size(), " segments");
  for (std::size_t i = 0; i < std::min(kShown, segments.size()); ++i) {
    const std::vector<std::int64_t>& counts = segments[i].counts;
    const auto end = counts.begin() + std::min<std::ptrdiff_t>(2 * kShown, std::ssize(counts));
    text += concat_text(" ", std::vector<std::int64_t>(counts.begin(), end));
    text += end == counts.end() ? "" : "…";
  }
  return text + (segments.size() > kShown ? " …" : "");
}

}  // namespace

MessageGroup::MessageGroup(
    GroupInfo group_info,
    c10::intrusive_ptr<::c10d::Backend> backend,
    std::shared_ptr<Health> group_health,
    const LinkDelay& link_delay
)
    : info(std::move(group_info)),
      health(std::move(group_health)),
      engine(std::move(backend), link_delay) {}

std::string MessageGroup::describe(const Stall& stall) const {
  std::string text = to_text(stall.note);
  if (stall.timed_out) {
    text += concat_text(" timed out after ", stall.waited_s, " s");
  } else {
    text += " failed";
  }
  if (stall.awaited_rank) {
    text += concat_text(" while it waited for a message of rank ", *stall.awaited_rank);
  }
  return text;
}

void MessageGroup::raise(const CollectiveNote& note, bool timed_out, double waited_s) {
  if (error == nullptr) {
    Stall stall;
    stall.note = note;
    stall.timed_out = timed_out;
    stall.waited_s = waited_s;
    stall.transport_text = engine.failure();
    if (const auto peer = engine.awaited_peer()) {
      stall.awaited_rank = info.global_ranks[static_cast<std::size_t>(*peer)];
    }
    const std::string why = health != nullptr ? health->explain(info, stall) : describe(stall);
    engine.fail("the communicator was given up: " + why);
    if (health != nullptr) {
      health->report_failure(why);
    }
    ErrorText text("comm.c10d: " + why);
    if (!stall.transport_text.empty()) {
      text.message += "; the back end said: " + stall.transport_text;
    }
    text.hint = timed_out
                    ? concat_text("a collective may wait ", info.timeout_s, " s (HS_TIMEOUT_S)")
                    : std::string();
    error = std::make_exception_ptr(CommError(text));
  }
  std::rethrow_exception(error);
}

MessageCommunicator::MessageCommunicator(
    GroupInfo info,
    c10::intrusive_ptr<::c10d::Backend> backend,
    std::string backend_name,
    std::shared_ptr<Health> health,
    const LinkDelay& link_delay
)
    : Communicator(info),
      group_(std::make_shared<MessageGroup>(
          std::move(info), std::move(backend), std::move(health), link_delay
      )),
      backend_name_(std::move(backend_name)) {}

MessageCommunicator::~MessageCommunicator() = default;

std::vector<int> MessageCommunicator::peers() const {
  std::vector<int> others;
  for (int distance = 1; distance < size(); ++distance) {
    others.push_back((rank() + distance) % size());
  }
  return others;
}

std::byte* MessageCommunicator::stage(const ExchangePtr& exchange, std::int64_t bytes) {
  exchange->staging.push_back(group_->engine.staging()->lend(bytes));
  group_->stats.staged_bytes += bytes;
  return exchange->staging.back().data();
}

void MessageCommunicator::run_alone(const Call& call) {
  const Stopwatch watch;
  const auto reduce_alone = [&](const at::Tensor& output, const at::Tensor& input) {
    const std::byte* const inputs[] = {static_cast<const std::byte*>(input.const_data_ptr())};
    ordered_reduce(
        static_cast<std::byte*>(output.data_ptr()),
        output.scalar_type(),
        inputs,
        input.scalar_type(),
        output.numel(),
        call.reduce,
        /*rounds_result=*/call.op == Op::kAllReduce
    );
  };
  if (call.op == Op::kReduceScatter) {
    for (const ReduceSegment& segment : call.segments) {
      reduce_alone(segment.output, segment.input);
    }
  } else if (call.op == Op::kAllReduce) {
    reduce_alone(call.output, call.input);
  } else if (call.op == Op::kAllGather || call.op == Op::kAllToAll) {
    if (call.output.numel() > 0 && call.output.data_ptr() != call.input.const_data_ptr()) {
      std::memcpy(call.output.data_ptr(), call.input.const_data_ptr(), call.output.nbytes());
    }
  }
  group_->stats.reduce_ns += watch.elapsed_ns();
}

CollectiveNote MessageCommunicator::note_of(const Call& call) const {
  CollectiveNote note;
  note.communicator = info().name;
  note.op = to_text(call.op);
  note.unit = call.unit;
  note.sequence = call.sequence;
  note.crosses_supernodes = info().tier == layout::Tier::kInter;
  note.signature = hash_combine(kHashSeed, static_cast<std::uint64_t>(call.op));
  note.signature = hash_combine(note.signature, static_cast<std::uint64_t>(call.reduce.op));
  note.signature = hash_combine(note.signature, std::bit_cast<std::uint64_t>(call.reduce.divisor));
  note.signature = hash_combine(note.signature, static_cast<std::uint64_t>(call.root));
  if (call.op == Op::kBarrier) {
    return note;
  }
  const at::Tensor& whole = call.op == Op::kAllGather       ? call.output
                            : call.op == Op::kReduceScatter ? call.segments.front().input
                                                            : call.input;
  HS_SUPPORTED(
      whole.device().is_cpu(),
      "comm.c10d: ",
      to_text(note),
      ": tensors on ",
      whole.device().str(),
      " (expected cpu)"
  );
  const at::ScalarType dtype = call.reduce.wire.value_or(whole.scalar_type());
  note.signature = hash_combine(note.signature, static_cast<std::uint64_t>(dtype));
  std::int64_t numel = whole.numel();
  std::string cuts;
  // Counts of an all-to-all differ between ranks; each pair's are compared by its message's tag.
  if (call.op == Op::kAllToAll) {
    note.detail = concat_text(dtype_text(dtype), ", ", whole.nbytes(), " bytes");
    return note;
  }
  if (call.op == Op::kReduceScatter) {
    numel = 0;
    for (const ReduceSegment& segment : call.segments) {
      numel += segment.input.numel();
      note.signature = hash_counts(note.signature, segment.counts);
    }
    cuts = cuts_text(call.segments);
  } else if (call.op == Op::kAllGather) {
    note.signature = hash_counts(note.signature, call.output_counts);
    cuts = cuts_text({ReduceSegment{.output = {}, .input = {}, .counts = call.output_counts}});
  }
  const auto bytes = numel * static_cast<std::int64_t>(at::elementSize(dtype));
  note.signature = hash_combine(note.signature, static_cast<std::uint64_t>(bytes));
  note.detail = concat_text(dtype_text(dtype), ", ", bytes, " bytes", cuts);
  return note;
}

CommStats MessageCommunicator::measured() const {
  CommStats stats = group_->stats;
  stats.busy_ns = group_->engine.busy_ns();
  return stats;
}

WorkPtr MessageCommunicator::start(Call call) {
  CollectiveNote note = note_of(call);
  auto exchange = std::make_shared<Exchange>();
  exchange->sequence = call.sequence;
  exchange->signature = note.signature;
  if (size() == 1) {
    run_alone(call);
    return std::make_shared<FinishedWork>();
  }
  if (group_->health != nullptr) {
    group_->health->note(note);
  }
  if (group_->error != nullptr) {
    std::rethrow_exception(group_->error);
  }
  exchange->tensors = {call.output, call.input};
  for (const ReduceSegment& segment : call.segments) {
    exchange->tensors.push_back(segment.output);
    exchange->tensors.push_back(segment.input);
  }
  std::vector<Step> steps = steps_of(call, exchange);
  group_->engine.start(exchange, std::move(steps));
  return std::make_shared<MessageWork>(group_, std::move(exchange), std::move(note));
}

}  // namespace hypershard::comm::internal
