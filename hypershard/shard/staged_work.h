// A work made of stages that must follow one another, such as a gather along one axis and then
// along the next. A stage is started by test() or wait() once the stage before it is done.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "hypershard/comm/work.h"

namespace hypershard::shard {

/// Runs stages in order. A stage starts a collective, or does local work and returns nullptr.
///
/// Two StagedWorks that use the same communicator in a later stage must be advanced in the same
/// order on all ranks: the engine always advances them oldest first.
class StagedWork final : public comm::Work {
 public:
  using Stage = std::function<comm::WorkPtr()>;
  explicit StagedWork(std::vector<Stage> stages) : stages_(std::move(stages)) {}

  /// Starts the first stage and no more, so that starting many works keeps their later stages in
  /// order.
  void start() {
    if (next_ == 0) {
      start_next();
    }
  }

  bool test() override {
    while (true) {
      if (current_ && !current_->test()) {
        return false;
      }
      if (!start_next()) {
        return true;
      }
    }
  }
  void wait() override {
    while (true) {
      if (current_) {
        current_->wait();
      }
      if (!start_next()) {
        return;
      }
    }
  }
  void wait_released() override {
    wait();
    for (const comm::WorkPtr& work : finished_) {
      work->wait_released();
    }
    finished_.clear();
  }

 private:
  bool start_next() {
    if (current_) {
      finished_.push_back(std::move(current_));
      current_ = nullptr;
    }
    if (next_ == stages_.size()) {
      return false;
    }
    current_ = stages_[next_++]();
    return true;
  }

  std::vector<Stage> stages_;
  std::size_t next_ = 0;
  comm::WorkPtr current_;
  std::vector<comm::WorkPtr> finished_;
};

/// Several StagedWorks of one unit. All first stages start at once; later ones run work by work.
class WorkSet final : public comm::Work {
 public:
  void add(std::vector<StagedWork::Stage> stages) {
    if (!stages.empty()) {
      works_.emplace_back(std::move(stages));
    }
  }
  void start() {
    for (StagedWork& work : works_) {
      work.start();
    }
  }
  bool empty() const { return works_.empty(); }

  bool test() override {
    while (done_ < works_.size() && works_[done_].test()) {
      ++done_;
    }
    return done_ == works_.size();
  }
  void wait() override {
    for (; done_ < works_.size(); ++done_) {
      works_[done_].wait();
    }
  }
  void wait_released() override {
    wait();
    for (StagedWork& work : works_) {
      work.wait_released();
    }
  }

 private:
  std::vector<StagedWork> works_;
  std::size_t done_ = 0;
};

}  // namespace hypershard::shard
