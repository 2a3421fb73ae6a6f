// See NOTE [message engine] in the header. Locks: mutex_ guards all of our state and is never held
// during a call into the back end, except for abort(), which only raises a flag.
#include "hypershard/comm/c10d/internal/message_engine.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "hypershard/comm/c10d/internal/backend_text.h"
#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"
#include "hypershard/core/hash.h"
#include "hypershard/core/random.h"

namespace hypershard::comm::internal {
namespace {

// Ours to decide when to give up: Gloo's own timeout closes every connection.
constexpr auto kForever = std::chrono::hours(24 * 365);
// A send of this size fits the socket's buffer, so the caller may post it itself.
constexpr std::int64_t kInlineBytes = 64 * 1024;

// A tag is 9 bits of sequence number, 13 of signature, 9 of message index; the top one is the
// probes'.
constexpr std::uint64_t kSequenceMask = 0x1ff;
constexpr std::uint64_t kSignatureMask = 0x1fff;
constexpr int kProbeTag = 0x7fffffff;
constexpr int kMaxInFlight = 500;

constexpr std::uint64_t kJitterStream = 0x6a69747465720000;  // nobody else's

int tag_of(const Exchange& exchange, const Message& message) {
  std::uint64_t hash = hash_combine(exchange.signature, static_cast<std::uint64_t>(message.bytes));
  hash ^= (hash >> 32) ^ (hash >> 16);
  const std::uint64_t tag =
      ((exchange.sequence & kSequenceMask) << 22) | ((hash & kSignatureMask) << 9) | message.index;
  return static_cast<int>(tag);
}

std::int64_t bytes_to_send(const Step& step) {
  std::int64_t bytes = 0;
  for (const Message& message : step.sends) {
    bytes += message.bytes;
  }
  return bytes;
}

}  // namespace

MessageEngine::MessageEngine(
    c10::intrusive_ptr<::c10d::Backend> backend, const LinkDelay& link_delay
)
    : backend_(std::move(backend)),
      probe_byte_(at::zeros({1}, at::kByte)),
      link_delay_(link_delay) {
  if (backend_ != nullptr) {
    poster_ = std::thread([this] { post_loop(); });
    waiter_ = std::thread([this] { wait_loop(); });
  }
}

MessageEngine::~MessageEngine() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
    abort_locked();
  }
  to_post_.notify_all();
  to_wait_.notify_all();
  changed_.notify_all();
  for (std::thread* thread : {&poster_, &waiter_}) {
    if (thread->joinable()) {
      thread->join();
    }
  }
}

void MessageEngine::start(const ExchangePtr& exchange, std::vector<Step> steps) {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_in_flight_ < kMaxInFlight || failure_ || is_stopping_; });
    if (failure_) {
      return;
    }
    exchange->num_open_steps = static_cast<int>(steps.size());
    exchange->is_done = steps.empty();
    if (!steps.empty()) {
      ++num_in_flight_;
      busy_.begin();
    }
  }
  if (steps.empty()) {
    exchange->tensors.clear();
    exchange->staging.clear();
  }
  for (Step& step : steps) {
    submit(exchange, std::move(step), /*on_own_thread=*/false);
  }
}

void MessageEngine::add(const ExchangePtr& exchange, Step step) {
  HS_ASSERT(
      step.receives.empty(),
      "comm.c10d: a step added later must not receive: that could wait for a step behind it"
  );
  {
    const std::lock_guard lock(mutex_);
    ++exchange->num_open_steps;
  }
  submit(exchange, std::move(step), /*on_own_thread=*/true);
}

void MessageEngine::submit(const ExchangePtr& exchange, Step step, bool on_own_thread) {
  Item item{exchange, std::move(step), {}};
  const bool is_small =
      bytes_to_send(item.step) <= kInlineBytes && !item.step.meanwhile && link_delay_.delay_us == 0;
  {
    const std::lock_guard lock(mutex_);
    // First steps must be posted in program order on all ranks; later ones only send, so may
    // overtake.
    if (!is_small || (!on_own_thread && (is_posting_ || !post_queue_.empty()))) {
      item.due_ns = next_due_ns_locked();
      post_queue_.push_back(std::move(item));
      to_post_.notify_one();
      return;
    }
  }
  post(std::move(item));
}

// Delays never let one message overtake another, as a link does not.
std::int64_t MessageEngine::next_due_ns_locked() {
  if (link_delay_.delay_us == 0) {
    return 0;
  }
  const double jitter = 2 * uniform_at(link_delay_.seed, kJitterStream, num_delayed_++) - 1;
  const auto delay_us =
      link_delay_.delay_us +
      static_cast<std::int64_t>(jitter * static_cast<double>(link_delay_.jitter_us));
  last_due_ns_ = std::max(last_due_ns_, now_ns() + std::max<std::int64_t>(delay_us, 0) * 1000);
  return last_due_ns_;
}

MessageEngine::WorkPtr MessageEngine::post_message(
    const Exchange& exchange, const Message& message, bool is_send
) {
  HS_DCHECK(message.index < kMaxMessageIndex - 1, "message index ", message.index);
  std::vector<at::Tensor> tensors = {
      at::from_blob(message.data, {message.bytes}, at::TensorOptions().dtype(at::kByte))
  };
  const std::lock_guard lock(backend_mutex_);
  return is_send ? backend_->send(tensors, message.peer, tag_of(exchange, message))
                 : backend_->recv(tensors, message.peer, tag_of(exchange, message));
}

void MessageEngine::post(Item item) {
  try {
    for (const Message& message : item.step.receives) {
      item.receives.push_back(post_message(*item.exchange, message, /*is_send=*/false));
    }
    if (item.step.prepare) {
      item.step.prepare();
    }
    for (const Message& message : item.step.sends) {
      sent_bytes_ += message.bytes;
      WorkPtr work = post_message(*item.exchange, message, /*is_send=*/true);
      const std::lock_guard lock(mutex_);
      item.exchange->sends.push_back(std::move(work));
    }
    if (item.step.meanwhile) {
      item.step.meanwhile();
    }
  } catch (const std::exception& error) {
    {
      const std::lock_guard lock(mutex_);
      abandoned_.push_back(std::move(item));
    }
    fail(backend_text(error));
    return;
  }
  const std::lock_guard lock(mutex_);
  if (failure_ || is_stopping_) {
    abandoned_.push_back(std::move(item));
  } else {
    wait_queue_.push_back(std::move(item));
    to_wait_.notify_one();
  }
}

void MessageEngine::post_loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    to_post_.wait(lock, [&] { return is_stopping_ || (!failure_ && !post_queue_.empty()); });
    if (is_stopping_) {
      return;
    }
    if (const std::int64_t left_ns = post_queue_.front().due_ns - now_ns(); left_ns > 0) {
      to_post_.wait_for(lock, std::chrono::nanoseconds(left_ns), [&] {
        return is_stopping_ || failure_.has_value();
      });
      continue;
    }
    Item item = std::move(post_queue_.front());
    post_queue_.pop_front();
    is_posting_ = true;
    lock.unlock();
    post(std::move(item));
    lock.lock();
    is_posting_ = false;
  }
}

void MessageEngine::wait_loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    to_wait_.wait(lock, [&] { return is_stopping_ || (!failure_ && !wait_queue_.empty()); });
    if (is_stopping_) {
      return;
    }
    Item item = std::move(wait_queue_.front());
    wait_queue_.pop_front();
    current_ = item.receives;
    lock.unlock();
    try {
      finish(item);
    } catch (const std::exception& error) {
      fail(backend_text(error));
    }
    lock.lock();
    current_.clear();
    awaited_peer_.reset();
    if (failure_ || is_stopping_) {
      abandoned_.push_back(std::move(item));
    }
  }
}

bool MessageEngine::wait_for_work(const WorkPtr& work, int peer) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_ || is_stopping_) {
      return false;
    }
    awaited_peer_ = peer;
  }
  // An abort between here and there is not lost: the flag stays raised until a wait sees it.
  return work->wait(kForever);
}

void MessageEngine::finish(Item& item) {
  for (std::size_t i = 0; i < item.receives.size(); ++i) {
    if (!wait_for_work(item.receives[i], item.step.receives[i].peer)) {
      return;
    }
  }
  if (item.step.then) {
    item.step.then();
  }
  Exchange& exchange = *item.exchange;
  std::vector<WorkPtr> sends;
  {
    const std::lock_guard lock(mutex_);
    if (--exchange.num_open_steps > 0) {
      return;
    }
    sends = exchange.sends;
    current_ = sends;
  }
  for (const WorkPtr& work : sends) {
    if (!wait_for_work(work, -1)) {
      return;
    }
  }
  exchange.sends.clear();
  exchange.staging.clear();
  exchange.tensors.clear();
  {
    const std::lock_guard lock(mutex_);
    exchange.is_done = true;
    exchange.done_ns = now_ns();
    --num_in_flight_;
    busy_.end();
  }
  changed_.notify_all();
}

Progress MessageEngine::test(const Exchange& exchange) {
  return wait_for(exchange, 0);
}

Progress MessageEngine::wait_for(const Exchange& exchange, double seconds) {
  std::unique_lock lock(mutex_);
  const auto ended = [&] { return exchange.is_done || failure_ || is_stopping_; };
  if (!ended() && seconds > 0) {
    changed_.wait_for(lock, std::chrono::duration<double>(seconds), ended);
  }
  if (exchange.is_done) {
    return Progress::kDone;
  }
  return failure_ ? Progress::kFailed : Progress::kPending;
}

void MessageEngine::fail(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) {
      return;
    }
    failure_ = reason;
    abort_locked();
  }
  changed_.notify_all();
}

void MessageEngine::abort_locked() {
  const auto abort_item = [](const Item& item) {
    for (const WorkPtr& work : item.receives) {
      work->abort();
    }
    for (const WorkPtr& work : item.exchange->sends) {
      work->abort();
    }
  };
  for (const WorkPtr& work : current_) {
    work->abort();
  }
  for (const Item& item : wait_queue_) {
    abort_item(item);
  }
}

bool MessageEngine::has_failed() const {
  const std::lock_guard lock(mutex_);
  return failure_.has_value();
}

std::int64_t MessageEngine::busy_ns() const {
  const std::lock_guard lock(mutex_);
  return busy_.busy_ns();
}

std::string MessageEngine::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_.value_or("");
}

std::optional<int> MessageEngine::awaited_peer() const {
  const std::lock_guard lock(mutex_);
  return awaited_peer_ && *awaited_peer_ >= 0 ? awaited_peer_ : std::nullopt;
}

void MessageEngine::probe(int num_peers, int rank) {
  std::string reason;
  {
    const std::lock_guard lock(backend_mutex_);
    for (int peer = 0; peer < num_peers && reason.empty(); ++peer) {
      if (peer == rank) {
        continue;
      }
      std::vector<at::Tensor> tensors = {probe_byte_};
      try {
        probes_.push_back(backend_->send(tensors, peer, kProbeTag));
      } catch (const std::exception& error) {
        reason = backend_text(error);
      }
    }
  }
  if (!reason.empty()) {
    fail(reason);
  }
}

}  // namespace hypershard::comm::internal
