// Why: everything one rank needs for training, built in one order from the configuration: world,
// mesh, data, model, shards, optimizer.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "hypershard/comm/world.h"
#include "hypershard/data/dataset.h"
#include "hypershard/data/evaluation_dataset.h"
#include "hypershard/data/prepare.h"
#include "hypershard/model/gpt_config.h"
#include "hypershard/plan/apply.h"
#include "hypershard/shard/fully_shard.h"
#include "hypershard/train/run_config.h"

namespace hypershard::model {
class GptImpl;
}
namespace hypershard::optim {
class ShardedOptimizer;
}

namespace hypershard::train {

/// Returns the options of fully_shard that a configuration asks for.
/// `mesh` is make_mesh()'s.
shard::FullyShardOptions shard_options(const RunConfig& config, const layout::DeviceMesh& mesh);
/// Returns the dtype that the model's parameters are made in.
at::ScalarType parameter_dtype(const RunConfig& config);
/// Returns the dtype that the model computes in.
at::ScalarType compute_dtype(const RunConfig& config);
/// Returns the dtype that sharded parameters are kept and gathered in.
at::ScalarType storage_dtype(const RunConfig& config);
/// Returns what micro-batches communicate on so many ranks; never kAuto.
Sync gradient_sync(const RunConfig& config, int world_size);
/// Writes a dtype as a configuration does: `fp32`.
std::string dtype_word(at::ScalarType dtype);
/// Returns the mesh of a configuration: `shard`, before it `replicate` where it matters, and behind
/// it `tp` where there is a plan.
layout::DeviceMesh make_mesh(const RunConfig& config, const layout::Topology& topology);

/// Joins the job as the configuration says. Collective: all ranks of the job.
/// Errors: as comm::World::join.
std::shared_ptr<comm::World> join_world(const RunConfig& config);

/// Sets threads and memory policy of this process; `local_ranks` share the host.
void set_up_process(const RunConfig& config, int local_ranks);

/// Opened data, checked against the configuration.
struct TrainingData {
  data::PreparedData prepared;
  std::optional<data::TokenDataset> train;
  std::optional<data::EvaluationDataset>
      evaluation;  ///< during the run; none without a held-out split
  std::optional<data::EvaluationDataset> final_evaluation;

  /// Returns the rows that a data rank trains on in one micro-batch of one step.
  /// Errors: as data::TokenDataset::batch.
  data::Batch batch(
      const RunConfig& config, std::int64_t step, std::int64_t micro, int data_rank, int size
  ) const;
};
/// Opens the data. Errors: IoError, InvalidArgument: missing, damaged, too few tokens.
TrainingData open_data(const RunConfig& config, int world_size);
/// Stands in for data where there is none: rows of tokens drawn by seed, step and place.
TrainingData random_data(std::int64_t vocab_size);

/// What a session is made for beyond training.
struct SessionOptions {
  bool validates = false;  ///< resolve layouts even where the configuration has no plan
};

/// One rank's model, shards and optimizer.
class Session {
 public:
  /// Collective: all ranks of the world.
  /// Errors: InvalidArgument for a mesh or model that does not fit; CommError.
  Session(
      const RunConfig& config,
      std::shared_ptr<comm::World> world,
      TrainingData data,
      const SessionOptions& options = {}
  );
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const RunConfig& config() const { return config_; }
  comm::World& world() const { return *world_; }
  comm::Communicator& everyone() const { return *everyone_; }
  const comm::ProcessMesh& mesh() const { return *mesh_; }
  /// Ranks that see different rows, and this rank's number among them: those of one `tp` group have
  /// the same one.
  int num_data_ranks() const { return config_.num_data_ranks(world_->size()); }
  int data_rank() const { return world_->rank() / config_.parallel.tp; }
  /// Tells whether this rank speaks for its `tp` group where something is added up over all ranks.
  bool speaks_for_data_rank() const { return world_->rank() % config_.parallel.tp == 0; }
  /// Returns this rank's rows of one micro-batch.
  data::Batch batch(std::int64_t step, std::int64_t micro) const;
  /// Returns the plan in force; empty without one, unless the session validates.
  const std::optional<plan::AppliedPlan>& applied() const { return applied_; }
  const TrainingData& data() const { return data_; }
  const model::GptConfig& shape() const { return shape_; }
  model::GptImpl& model() const { return *model_; }
  const shard::ShardedModel& sharded() const { return *sharded_; }
  optim::ShardedOptimizer& optimizer() const { return *optimizer_; }

  /// Gives the weights their first values. Collective.
  void initialize() const;
  /// Returns the learning rate of a step, counted from 0.
  double learning_rate(std::int64_t step) const;
  std::int64_t tokens_per_step() const;

 private:
  RunConfig config_;
  std::shared_ptr<comm::World> world_;
  std::shared_ptr<comm::Communicator> everyone_;
  std::shared_ptr<const comm::ProcessMesh> mesh_;
  TrainingData data_;
  model::GptConfig shape_;
  std::shared_ptr<model::GptImpl> model_;
  std::optional<plan::AppliedPlan> applied_;
  std::optional<shard::ShardedModel> sharded_;
  std::unique_ptr<optim::ShardedOptimizer> optimizer_;
};

}  // namespace hypershard::train
