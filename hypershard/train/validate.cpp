// See validate.h.
#include "hypershard/train/validate.h"

#include <exception>
#include <memory>
#include <optional>
#include <utility>

#include "hypershard/comm/c10d/process_world.h"
#include "hypershard/core/error.h"
#include "hypershard/train/agreement.h"
#include "hypershard/train/exit_code.h"
#include "hypershard/train/session.h"
#include "hypershard/train/step.h"
#include "hypershard/train/step_check.h"

namespace hypershard::train {
namespace {

// A plan that is refused before anything runs is found wrong too, on all ranks alike.
void make_session(
    std::optional<Session>& session,
    const RunConfig& config,
    const std::shared_ptr<comm::World>& world,
    TrainingData data
) {
  bool is_plan_wrong = false;
  try {
    run_together(*world->world_communicator(), [&] {
      try {
        session.emplace(config, world, std::move(data), SessionOptions{.validates = true});
      } catch (const plan::LayoutError&) {
        is_plan_wrong = true;
        throw;
      }
    });
  } catch (const AgreedFailure& failure) {
    if (is_plan_wrong) {
      throw FoundWrong(failure.what());  // raw-throw: all ranks throw the same
    }
    throw;
  }
}

// Returns an exit code.
int validate(const ValidateRequest& request, const std::shared_ptr<comm::World>& world) {
  const RunConfig& config = request.config->config();
  comm::Communicator& everyone = *world->world_communicator();
  set_up_process(config, comm::launch_info(*world).local_world_size);
  agree_on_config(everyone, request.config->to_toml());
  TrainingData data;
  run_together(everyone, [&] {
    data = request.random_vocab > 0 ? random_data(request.random_vocab)
                                    : open_data(config, world->size());
  });
  std::optional<Session> session;
  make_session(session, config, world, std::move(data));
  run_together(everyone, [&] { session->initialize(); });
  const auto print = [&](const std::string& text) {
    if (world->rank() == 0) {
      request.print(text);
    }
  };
  print(concat_text(
      to_text(config.parallel.strategy),
      " on ",
      session->mesh().mesh(),
      ", ",
      config.model.layers,
      " layers in ",
      dtype_word(compute_dtype(config))
  ));
  for (std::int64_t step = 0; step < request.steps; ++step) {
    StepCheck check(*session);
    const StepResult result = run_step(*session, step, {}, &check);
    require_passed(*session, check.verdict());
    print(to_text(check.verdict().gradients));
    print(concat_text(
        to_text(check.verdict()),
        "; loss ",
        result.loss,
        ", on one rank ",
        check.verdict().reference_loss
    ));
    if (result.stop && step + 1 < request.steps) {
      print(concat_text("stopped after step ", step + 1, " of ", request.steps));
      return kExitInterrupted;
    }
  }
  return kExitOk;
}

}  // namespace

int run_validation(const ValidateRequest& request) {
  const std::shared_ptr<comm::World> world = join_world(request.config->config());
  try {
    const int exit_code = validate(request, world);
    world->shutdown();
    return exit_code;
  } catch (const AgreedFailure&) {
    world->shutdown();
    throw;
  } catch (const std::exception& error) {
    comm::report_failure(*world, error.what());
    throw;
  }
}

}  // namespace hypershard::train
