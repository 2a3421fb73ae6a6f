// Drives collectives made of messages: posts them to a back end that matches by tag, waits for them
// off the caller's thread, and runs what follows (sums, forwards) as soon as the pieces are there.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "hypershard/comm/c10d/internal/staging_pool.h"
#include "hypershard/comm/c10d/link_delay.h"
#include "hypershard/comm/internal/busy_clock.h"

namespace c10d {
class Backend;
class Work;
}  // namespace c10d

namespace hypershard::comm::internal {

/// A stretch of memory that goes to, or comes from, one peer.
struct Message {
  int peer = 0;  ///< rank in the communicator
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
  std::uint32_t index =
      0;  ///< tells the messages apart that two ranks exchange within one collective
};

/// Largest message index + 1.
inline constexpr std::uint32_t kMaxMessageIndex = 512;

/// A part of a collective.
struct Step {
  std::vector<Message> receives;
  std::vector<Message> sends;
  std::function<void()> prepare;  ///< runs before the sends are posted: makes what they carry
  std::function<void()>
      meanwhile;               ///< runs once the messages are posted, before anyone waits for them
  std::function<void()> then;  ///< runs on the engine's thread when all receives have arrived
};

/// One collective in flight; its tensors and staging stay alive until nobody touches them.
struct Exchange {
  std::uint64_t sequence = 0;
  std::uint64_t signature = 0;  ///< of what all ranks must agree on; part of every tag
  std::vector<at::Tensor> tensors;
  std::vector<StagingPool::Lease> staging;

  // The engine's own.
  int num_open_steps = 0;
  bool is_done = false;
  std::int64_t done_ns = 0;  ///< when; to be read once it is
  std::vector<c10::intrusive_ptr<::c10d::Work>> sends;
};
using ExchangePtr = std::shared_ptr<Exchange>;

/// How a wait ended.
enum class Progress { kDone, kPending, kFailed };

/// NOTE [message engine]
///
/// Messages carry a tag made of the collective's sequence number, a hash of what it is and the
/// message's index, so that the back end pairs them whatever the order in which two ranks post
/// them, and so that two ranks in different collectives never fill each other's memory: they wait,
/// and the timeout names both. Because order does not matter, a collective of several rounds can go
/// on by itself.
///
/// Two threads: one posts, since a send writes into the socket until that is full and the caller
/// has better things to do; one waits for messages in the order in which they were posted, which
/// cannot deadlock because a step depends only on steps posted before it. Small steps are posted by
/// the caller, unless the link is to be slow. Work on arrived pieces runs on the second thread: it
/// overlaps with the caller's computing and with the pieces that are still under way, and finds its
/// data in the cache.
///
/// A failure is final: every collective in flight fails, their memory is kept until destruction.
/// Threads: all methods from any thread, except where said.
class MessageEngine {
 public:
  /// A null back end is for a group of one rank, which starts nothing.
  explicit MessageEngine(
      c10::intrusive_ptr<::c10d::Backend> backend, const LinkDelay& link_delay = {}
  );
  /// Abandons what is in flight.
  ~MessageEngine();
  MessageEngine(const MessageEngine&) = delete;
  MessageEngine& operator=(const MessageEngine&) = delete;

  /// Starts a collective. Blocks only while kMaxMessageIndex collectives are in flight.
  void start(const ExchangePtr& exchange, std::vector<Step> steps);
  /// Adds a step to a collective that has not ended; only from `meanwhile` or `then` of one of its
  /// steps.
  void add(const ExchangePtr& exchange, Step step);

  Progress test(const Exchange& exchange);
  /// Blocks until the collective is done, the engine has failed or `seconds` have passed.
  Progress wait_for(const Exchange& exchange, double seconds);

  /// Ends everything in flight with this reason; the first one stays.
  void fail(const std::string& reason);
  bool has_failed() const;
  /// Returns why, or nothing.
  std::string failure() const;
  /// Returns the peer whose message the engine stands waiting for, if it does.
  std::optional<int> awaited_peer() const;

  /// Sends a byte that nobody receives to every peer: the only way to learn that a connection broke
  /// in the middle of a message, which Gloo does not tell the waiting side. Fails the engine then.
  void probe(int num_peers, int rank);

  const std::shared_ptr<StagingPool>& staging() const { return staging_; }
  /// Returns how long at least one collective was in flight.
  std::int64_t busy_ns() const;
  /// Returns the bytes of all sends posted, those of barriers and probes too.
  std::int64_t sent_bytes() const { return sent_bytes_; }

 private:
  using WorkPtr = c10::intrusive_ptr<::c10d::Work>;
  struct Item {
    ExchangePtr exchange;
    Step step;
    std::vector<WorkPtr> receives;
    std::int64_t due_ns = 0;  // not posted before; of a link that is to be slow
  };

  void submit(const ExchangePtr& exchange, Step step, bool on_own_thread);
  std::int64_t next_due_ns_locked();
  void post(Item item);
  WorkPtr post_message(const Exchange& exchange, const Message& message, bool is_send);
  void post_loop();
  void wait_loop();
  void finish(Item& item);
  bool wait_for_work(const WorkPtr& work, int peer);
  void abort_locked();

  c10::intrusive_ptr<::c10d::Backend> backend_;
  std::shared_ptr<StagingPool> staging_ = std::make_shared<StagingPool>();
  std::mutex backend_mutex_;
  std::vector<WorkPtr> probes_;  // guarded by backend_mutex_, as their byte
  at::Tensor probe_byte_;

  mutable std::mutex mutex_;
  std::condition_variable to_post_;
  std::condition_variable to_wait_;
  std::condition_variable changed_;
  std::deque<Item> post_queue_;
  LinkDelay link_delay_;
  std::uint64_t num_delayed_ = 0;
  std::int64_t last_due_ns_ = 0;
  std::deque<Item> wait_queue_;
  bool is_posting_ = false;
  bool is_stopping_ = false;
  std::optional<std::string> failure_;
  int num_in_flight_ = 0;
  BusyClock busy_;
  std::atomic<std::int64_t> sent_bytes_ = 0;
  std::vector<WorkPtr> current_;  // of the item that is being finished
  std::optional<int> awaited_peer_;
  std::vector<Item> abandoned_;

  std::thread poster_;
  std::thread waiter_;
};

}  // namespace hypershard::comm::internal
