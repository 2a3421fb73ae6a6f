// A communicator whose collectives are messages between pairs of ranks: see NOTE [message engine].
// Gloo's own collectives copy or round where these do neither.
#pragma once

#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "hypershard/comm/c10d/health.h"
#include "hypershard/comm/c10d/internal/message_engine.h"
#include "hypershard/comm/communicator.h"

namespace c10d {
class Backend;
}  // namespace c10d

namespace hypershard::comm::internal {

/// What a communicator and its works share, so that a work may outlive the communicator.
struct MessageGroup {
  MessageGroup(
      GroupInfo group_info,
      c10::intrusive_ptr<::c10d::Backend> backend,
      std::shared_ptr<Health> group_health,
      const LinkDelay& link_delay
  );

  /// Throws the error that made the communicator unusable, after finding out who is to blame.
  [[noreturn]] void raise(const CollectiveNote& note, bool timed_out, double waited_s);
  /// Says what it says about a stall when there is no health to ask.
  std::string describe(const Stall& stall) const;

  GroupInfo info;
  std::shared_ptr<Health> health;
  CommStats stats;
  std::exception_ptr error;  // the first; thrown by every work from then on
  MessageEngine engine;
};

class MessageCommunicator : public Communicator {
 public:
  MessageCommunicator(
      GroupInfo info,
      c10::intrusive_ptr<::c10d::Backend> backend,
      std::string backend_name,
      std::shared_ptr<Health> health,
      const LinkDelay& link_delay = {}
  );
  ~MessageCommunicator() override;

  std::string backend() const override { return backend_name_; }
  /// Ends what is in flight and what is started later with this reason. Threads: any.
  void abort(const std::string& why) { group_->engine.fail(why); }
  const MessageEngine& engine() const { return group_->engine; }
  const StagingPool& staging() const { return *group_->engine.staging(); }

 protected:
  WorkPtr start(Call call) override;
  CommStats measured() const override;

 private:
  // Each returns the steps of one collective; message_collectives.cpp and
  // message_reductions.cpp.
  std::vector<Step> all_gather_steps(const Call& call);
  std::vector<Step> reduce_scatter_steps(
      const std::vector<ReduceSegment>& segments,
      const Reduction& reduction,
      const ExchangePtr& exchange
  );
  void add_sends(
      std::vector<Step>& steps,
      const std::vector<ReduceSegment>& segments,
      at::ScalarType wire,
      int peer,
      const ExchangePtr& exchange
  );
  std::vector<Step> all_reduce_steps(const Call& call, const ExchangePtr& exchange);
  std::vector<Step> small_all_reduce_steps(const Call& call, const ExchangePtr& exchange);
  std::vector<Step> broadcast_steps(const Call& call, const ExchangePtr& exchange);
  std::vector<Step> forwarded_broadcast_steps(const Call& call, const ExchangePtr& exchange);
  std::vector<Step> all_to_all_steps(const Call& call);
  std::vector<Step> barrier_steps(const ExchangePtr& exchange);

  CollectiveNote note_of(const Call& call) const;
  std::vector<Step> steps_of(const Call& call, const ExchangePtr& exchange);
  void run_alone(const Call& call);
  void copy_own(Step& step, std::byte* to, const std::byte* from, std::int64_t bytes);
  std::byte* stage(const ExchangePtr& exchange, std::int64_t bytes);
  /// Returns the other ranks, starting behind this one, so that not all ranks send to the same peer
  /// first.
  std::vector<int> peers() const;

  std::shared_ptr<MessageGroup> group_;
  std::string backend_name_;
};

}  // namespace hypershard::comm::internal
