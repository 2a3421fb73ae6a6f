// A communicator over the collectives of any c10d back end: for NCCL and its like, which know
// better than point-to-point messages how to move data on their devices.
#pragma once

#include <list>
#include <memory>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "hypershard/comm/c10d/internal/staging_pool.h"
#include "hypershard/comm/communicator.h"
#include "hypershard/comm/internal/busy_clock.h"

namespace c10d {
class Backend;
}  // namespace c10d

namespace hypershard::comm::internal {

class StagedCollective;

/// NOTE [collectives of a wrapped back end]
///
/// all-gather      even: the back end's, in place; uneven: a broadcast from each rank into its
/// slice, since not
///                 every back end takes uneven lists, and an all-to-all would need the input
///                 repeated.
/// reduce-scatter  all-to-all of the slices, then a sum in rank order: fp32 accumulation, the same
/// bits always. Several segments are packed first, as is what travels in another dtype: one
/// exchange.
/// all-reduce      small: all-gather of all inputs, then the sum; else reduce-scatter
/// and all-gather of a copy
///                 padded to equal slices.
///
/// Back ends pair collectives by order, so the second half of an all-reduce is started before
/// anything that the caller starts after it, on all ranks.
class CollectiveCommunicator : public Communicator {
 public:
  CollectiveCommunicator(
      GroupInfo info, c10::intrusive_ptr<::c10d::Backend> backend, std::string backend_name
  );
  ~CollectiveCommunicator() override;

  std::string backend() const override { return backend_name_; }

 protected:
  WorkPtr start(Call call) override;
  CommStats measured() const override;

 private:
  void drive_older();
  void add_stages(StagedCollective& work, const Call& call);
  void add_all_gather(StagedCollective& work, const Call& call);
  void add_reduce_scatter(StagedCollective& work, const Call& call);
  void add_all_reduce(StagedCollective& work, const Call& call);
  at::Tensor pack(at::Tensor packed, const std::vector<ReduceSegment>& segments) const;
  at::Tensor stage(
      StagedCollective& work, std::int64_t numel, at::ScalarType dtype, at::Device device
  );

  c10::intrusive_ptr<::c10d::Backend> backend_;
  std::string backend_name_;
  std::shared_ptr<StagingPool> staging_ = std::make_shared<StagingPool>();
  std::shared_ptr<CommStats> stats_ = std::make_shared<CommStats>();
  std::shared_ptr<BusyClock> busy_ = std::make_shared<BusyClock>();
  std::list<std::shared_ptr<StagedCollective>> in_flight_;
};

/// Joins the rows of `inputs` ([ranks, row_numel] flat) in rank order into `output`, on any device:
/// of each row the elements from the `first` on. `row_numel` 0: rows are as long as the output.
void reduce_rows(
    const at::Tensor& output,
    const at::Tensor& inputs,
    Reduction reduction,
    std::int64_t first = 0,
    std::int64_t row_numel = 0
);

}  // namespace hypershard::comm::internal
