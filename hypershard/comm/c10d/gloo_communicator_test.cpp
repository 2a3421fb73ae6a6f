// Every collective over Gloo, in both styles of wrapping a back end, with ranks as threads; and
// what happens when ranks disagree, vanish or forget to wait.
#include "hypershard/comm/c10d/gloo_communicator.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/Functions.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "hypershard/comm/c10d/gloo_job.h"
#include "hypershard/comm/c10d/health.h"
#include "hypershard/comm/c10d/internal/collective_communicator.h"
#include "hypershard/comm/c10d/internal/message_communicator.h"
#include "hypershard/comm/collective_cases.h"
#include "hypershard/comm/link.h"
#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"

namespace hypershard::comm {
namespace {

constexpr at::ScalarType kDtypes[] = {
    at::kDouble, at::kFloat, at::kBFloat16, at::kHalf, at::kLong, at::kInt, at::kByte, at::kBool
};

enum class Kind { kGloo, kWrappedGloo, kWrappedCollectives };

std::string to_text(Kind kind) {
  switch (kind) {
    case Kind::kGloo:
      return "Gloo";
    case Kind::kWrappedGloo:
      return "WrappedMessages";
    case Kind::kWrappedCollectives:
      return "WrappedCollectives";
  }
  return "?";
}

GroupInfo group_of(int rank, int num_ranks, double timeout_s) {
  GroupInfo info;
  info.name = "replicate";
  info.rank = rank;
  info.timeout_s = timeout_s;
  for (int i = 0; i < num_ranks; ++i) {
    info.global_ranks.push_back(i);
  }
  return info;
}

c10::intrusive_ptr<::c10d::Backend> plain_gloo(
    const Rendezvous& rendezvous, int rank, int num_ranks
) {
  auto options = ::c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(20));
  options->devices.push_back(::c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  auto store = c10::make_intrusive<::c10d::PrefixStore>("plain", rendezvous.store());
  return c10::make_intrusive<::c10d::ProcessGroupGloo>(store, rank, num_ranks, options);
}

std::shared_ptr<Communicator> make(
    Kind kind, const Rendezvous& rendezvous, int rank, int num_ranks, double timeout_s = 20
) {
  const GroupInfo info = group_of(rank, num_ranks, timeout_s);
  if (kind == Kind::kGloo) {
    return make_gloo_communicator(info, rendezvous.store(), "test");
  }
  return wrap_backend(
      info,
      plain_gloo(rendezvous, rank, num_ranks),
      kind == Kind::kWrappedGloo ? BackendStyle::kAuto : BackendStyle::kCollectives
  );
}

// Runs `body` on threads and reports what they throw, each with its rank.
void run_threads(int num_ranks, const std::function<void(int rank)>& body) {
  std::vector<std::string> errors(static_cast<std::size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    EXPECT_EQ(errors[static_cast<std::size_t>(rank)], "") << "rank " << rank;
  }
}

void run(Kind kind, int num_ranks, const std::function<void(Communicator&)>& body) {
  const auto rendezvous = Rendezvous::in_process();
  run_threads(num_ranks, [&](int rank) {
    const auto communicator = make(kind, *rendezvous, rank, num_ranks);
    body(*communicator);
    communicator->barrier()->wait();
  });
}

class GlooCommunicatorTest : public ::testing::TestWithParam<std::tuple<Kind, int>> {
 protected:
  Kind kind() const { return std::get<0>(GetParam()); }
  int num_ranks() const { return std::get<1>(GetParam()); }
  void run_all(const std::function<void(Communicator&)>& body) { run(kind(), num_ranks(), body); }
};
INSTANTIATE_TEST_SUITE_P(
    Kinds,
    GlooCommunicatorTest,
    ::testing::Combine(
        ::testing::Values(Kind::kGloo, Kind::kWrappedGloo, Kind::kWrappedCollectives),
        ::testing::Values(1, 2, 3, 4)
    ),
    [](const auto& test) {
      return to_text(std::get<0>(test.param)) + std::to_string(std::get<1>(test.param));
    }
);

TEST_P(GlooCommunicatorTest, AllOperationsGiveTheClosedForm) {
  run_all([](Communicator& communicator) {
    for (const at::ScalarType dtype : kDtypes) {
      testing_cases::check_all_operations(communicator, dtype);
    }
  });
}

TEST_P(GlooCommunicatorTest, LargeTensorsGiveTheClosedForm) {
  run_all(testing_cases::check_large);
}

TEST_P(GlooCommunicatorTest, SumsHaveTheBitsOfRankOrder) {
  run_all(testing_cases::check_rank_order);
}

TEST_P(GlooCommunicatorTest, SegmentsWireDtypesAndTrafficGiveTheClosedForm) {
  run_all([&](Communicator& c) {
    testing_cases::check_segments(c);
    testing_cases::check_wire_dtype(c);
    testing_cases::check_traffic(c);
    EXPECT_EQ(c.stats().busy_ns > 0, c.size() > 1 || kind() == Kind::kWrappedCollectives);
  });
}

TEST_P(GlooCommunicatorTest, MeasuresTheLink) {
  run_all([](Communicator& c) {
    const LinkSpeed link = measure_link(c);
    at::Tensor slowest = at::tensor({link.latency_s, link.bytes_per_s}, at::kDouble);
    const at::Tensor own = slowest.clone();
    c.all_reduce(slowest, ReduceOp::kMax)->wait();
    EXPECT_TRUE(at::equal(own, slowest)) << "the ranks disagree";
    EXPECT_LT(link.latency_s, 1);
    EXPECT_GT(link.bytes_per_s, c.size() == 1 ? 1e18 : 1e6);
  });
}

TEST_P(GlooCommunicatorTest, RandomCollectivesInFlightGiveTheClosedForm) {
  run_all([](Communicator& communicator) {
    for (const std::uint64_t seed : {1, 2}) {
      testing_cases::check_random(communicator, seed, 40);
    }
  });
}

TEST_P(GlooCommunicatorTest, MovesEightBitFloats) {
  run_all([](Communicator& c) {
    at::Tensor all = at::zeros({3 * c.size()}, at::kByte).view(at::kFloat8_e4m3fn);
    const at::Tensor own = at::full({3}, 17 + c.rank(), at::kByte).view(at::kFloat8_e4m3fn);
    c.all_gather(all, own)->wait();
    const at::Tensor ranks = at::arange(c.size(), at::kByte).repeat_interleave(3).add_(17);
    EXPECT_TRUE(at::equal(all.view(at::kByte), ranks));
  });
}

// Broadcasts large enough to be forwarded, from every root.
TEST_P(GlooCommunicatorTest, LargeBroadcastsGiveTheClosedForm) {
  run_all([](Communicator& c) {
    for (int root = 0; root < c.size(); ++root) {
      const at::Tensor expected = at::arange(1'000'003, at::kInt).add_(root);
      at::Tensor tensor = c.rank() == root ? expected.clone() : at::zeros({1'000'003}, at::kInt);
      c.broadcast(tensor, root)->wait();
      EXPECT_TRUE(at::equal(tensor, expected)) << "root " << root;
    }
  });
}

TEST_P(GlooCommunicatorTest, NamesItsBackEnd) {
  run_all([](Communicator& communicator) {
    EXPECT_EQ(communicator.backend(), "c10d:gloo");
    EXPECT_FALSE(communicator.has_shared_memory());
    EXPECT_THROW(communicator.allocate_shared(8, "test"), Unsupported);
  });
}

// Until a collective is done its tensors are alive, whoever else lets go of them.
TEST_P(GlooCommunicatorTest, FinishesWorksThatNobodyHolds) {
  run_all([](Communicator& c) {
    at::Tensor tensor = at::full({300'000}, c.rank() + 1, at::kFloat);
    c.all_reduce(tensor);
    c.reduce_scatter(at::empty({1000}), at::ones({1000 * c.size()}));
    c.all_gather(at::empty({1000 * c.size()}), at::ones({1000}));
    at::Tensor last = at::ones({10});
    c.all_reduce(last)->wait();
    EXPECT_EQ(last[9].item<float>(), static_cast<float>(c.size()));
    c.barrier()->wait();
  });
}

std::string thrown_text(const std::function<void()>& call) {
  try {
    call();
  } catch (const CommError& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("not a CommError: ") + error.what();
  }
  return "nothing was thrown";
}

// An all-reduce has two rounds; the second must not need this rank's calling thread.
TEST(MessageCommunicatorTest, GoesOnWhileTheCallerComputes) {
  const auto rendezvous = Rendezvous::in_process();
  std::atomic<bool> is_peer_done = false;
  run_threads(2, [&](int rank) {
    const auto c = make(Kind::kGloo, *rendezvous, rank, 2);
    at::Tensor tensor = at::full({2'000'000}, rank + 1, at::kFloat);
    const WorkPtr work = c->all_reduce(tensor);
    if (rank == 1) {
      work->wait();
      is_peer_done = true;
    }
    while (!is_peer_done) {  // the suite's time limit ends this if the peer cannot finish
      std::this_thread::yield();
    }
    work->wait();
    EXPECT_EQ(tensor.sum().item<double>(), 6'000'000.0);
  });
}

TEST(MessageCommunicatorTest, TestTurnsTrueWithoutWait) {
  const auto rendezvous = Rendezvous::in_process();
  run_threads(2, [&](int rank) {
    const auto c = make(Kind::kGloo, *rendezvous, rank, 2);
    at::Tensor tensor = at::full({500'000}, rank + 1, at::kFloat);
    const WorkPtr work = c->all_reduce(tensor);
    while (!work->test()) {
      std::this_thread::yield();
    }
    EXPECT_EQ(tensor[499'999].item<float>(), 3.0f);
    c->barrier()->wait();
  });
}

// Late together, not one after another: a link's delay is no cut of its bandwidth.
TEST(MessageCommunicatorTest, ASlowLinkDelaysEachMessageOnce) {
  constexpr double kDelayS = 0.3;
  constexpr int kNumInFlight = 10;
  GlooOptions options;
  options.link_delay = {.delay_us = 300'000, .jitter_us = 50'000, .seed = 7};
  const auto rendezvous = Rendezvous::in_process();
  run_threads(2, [&](int rank) {
    const auto c =
        make_gloo_communicator(group_of(rank, 2, 20), rendezvous->store(), "slow", options);
    const at::Tensor input = at::full({1000}, rank + 1, at::kFloat);
    std::vector<at::Tensor> outputs;
    std::vector<WorkPtr> works;
    const Stopwatch stopwatch;
    for (int i = 0; i < kNumInFlight; ++i) {
      outputs.push_back(at::empty({2000}));
      works.push_back(c->all_gather(outputs.back(), input));
    }
    for (int i = 0; i < kNumInFlight; ++i) {
      works[static_cast<std::size_t>(i)]->wait();
      EXPECT_EQ(outputs[static_cast<std::size_t>(i)].sum().item<double>(), 3000.0);
    }
    EXPECT_GE(stopwatch.elapsed_s(), kDelayS - 0.05);
    EXPECT_LT(stopwatch.elapsed_s(), kDelayS * kNumInFlight / 2);
    c->barrier()->wait();
  });
}

TEST(MessageCommunicatorTest, CountsStagedBytesAndReusesItsStaging) {
  const auto rendezvous = Rendezvous::in_process();
  run_threads(3, [&](int rank) {
    const auto c = make(Kind::kGloo, *rendezvous, rank, 3);
    const auto& message = dynamic_cast<const internal::MessageCommunicator&>(*c);
    const at::Tensor input = at::ones({300'000});
    at::Tensor output = at::empty({100'000});
    for (int round = 0; round < 10; ++round) {
      c->reduce_scatter(output, input)->wait();
    }
    EXPECT_EQ(c->stats().staged_bytes, 10 * 2 * 400'000);  // the slices of two peers
    EXPECT_EQ(message.staging().num_made(), 1);
    at::Tensor all = at::empty({300'000});
    c->all_gather(all, output)->wait();
    EXPECT_EQ(c->stats().staged_bytes, 10 * 2 * 400'000);  // a gather stages nothing
    c->barrier()->wait();
  });
}

TEST(MessageCommunicatorTest, DifferentCallsTimeOutAndSayWhereThisRankStood) {
  const auto rendezvous = Rendezvous::in_process();
  run_threads(2, [&](int rank) {
    const auto c = make(Kind::kGloo, *rendezvous, rank, 2, /*timeout_s=*/1);
    at::Tensor tensor = at::ones({64});
    const WorkPtr work = rank == 0 ? c->all_reduce(tensor, ReduceOp::kSum, "blocks.3")
                                   : c->broadcast(tensor, 0, "blocks.4");
    const std::string text = thrown_text([&] { work->wait(); });
    const std::string own = rank == 0 ? "all_reduce #0 of unit 'blocks.3' on axis 'replicate'"
                                      : "broadcast #0 of unit 'blocks.4' on axis 'replicate'";
    EXPECT_NE(text.find(own), std::string::npos) << text;
    EXPECT_NE(text.find("timed out after 1"), std::string::npos) << text;
    // Unusable from then on, with the same reason.
    EXPECT_NE(thrown_text([&] { c->barrier()->wait(); }).find(own), std::string::npos);
  });
}

TEST(MessageCommunicatorTest, DifferentSizesTimeOut) {
  const auto rendezvous = Rendezvous::in_process();
  run_threads(2, [&](int rank) {
    const auto c = make(Kind::kGloo, *rendezvous, rank, 2, /*timeout_s=*/1);
    at::Tensor tensor = at::ones({rank == 0 ? 64 : 65});
    const std::string text = thrown_text([&] { c->all_reduce(tensor)->wait(); });
    EXPECT_NE(text.find("timed out"), std::string::npos) << text;
  });
}

TEST(MessageCommunicatorTest, DifferentCallsAreNamedWhereThereIsHealth) {
  const auto rendezvous = Rendezvous::in_process();
  run_threads(2, [&](int rank) {
    GlooOptions options;
    options.health = std::make_shared<Health>(
        rendezvous->store(), HealthOptions{.rank = rank, .world_size = 2, .heartbeat_s = 0.1}
    );
    const auto c =
        make_gloo_communicator(group_of(rank, 2, 60), rendezvous->store(), "test", options);
    at::Tensor tensor = at::ones({64});
    const WorkPtr work = rank == 0 ? c->all_reduce(tensor, ReduceOp::kSum, "blocks.3")
                                   : c->broadcast(tensor, 0, "blocks.4");
    // Long before the timeout, at least on the rank that notices first.
    const std::string text = thrown_text([&] { work->wait(); });
    EXPECT_TRUE(
        text.find("the ranks call different collectives") != std::string::npos ||
        text.find("failed first") != std::string::npos
    ) << text;
    EXPECT_NE(text.find("blocks.3"), std::string::npos) << text;
    EXPECT_NE(text.find("blocks.4"), std::string::npos) << text;
  });
}

TEST(MessageCommunicatorTest, ARankThatGoesAwayIsAnError) {
  const auto rendezvous = Rendezvous::in_process();
  run_threads(3, [&](int rank) {
    auto c = make(Kind::kGloo, *rendezvous, rank, 3);
    c->barrier()->wait();
    if (rank == 1) {
      c.reset();
      return;
    }
    at::Tensor tensor = at::ones({1'000'000});
    const std::string text =
        thrown_text([&] { c->all_reduce(tensor, ReduceOp::kSum, "blocks.7")->wait(); });
    EXPECT_NE(text.find("all_reduce #1 of unit 'blocks.7'"), std::string::npos) << text;
  });
}

TEST(MessageCommunicatorTest, RefusesTensorsThatAreNotOnTheCpu) {
  const auto rendezvous = Rendezvous::in_process();
  const auto c = make(Kind::kGloo, *rendezvous, 0, 1);
  at::Tensor tensor = at::empty({4}, at::TensorOptions().device(at::kMeta));
  try {
    c->all_reduce(tensor);
    FAIL() << "nothing was thrown";
  } catch (const Unsupported& error) {
    EXPECT_NE(std::string(error.what()).find("meta"), std::string::npos) << error.what();
  }
}

TEST(MessageCommunicatorTest, StartsAndStopsFiftyTimes) {
  for (int round = 0; round < 50; ++round) {
    run(Kind::kGloo, 2, [&](Communicator& c) {
      at::Tensor tensor = at::ones({round % 2 == 0 ? 10 : 200'000});
      c.all_reduce(tensor)->wait();
      EXPECT_EQ(tensor[9].item<float>(), 2.0f);
    });
  }
}

TEST(MessageCommunicatorTest, AnUnusableAddressIsNamed) {
  const auto rendezvous = Rendezvous::in_process();
  const std::string text = thrown_text([&] {
    make_gloo_communicator(
        group_of(0, 2, 5), rendezvous->store(), "test", {.address = "192.0.2.1", .health = nullptr}
    );
  });
  EXPECT_NE(text.find("cannot connect the ranks [0, 1] of 'replicate'"), std::string::npos) << text;
  EXPECT_NE(text.find("192.0.2.1"), std::string::npos) << text;
}

TEST(MessageCommunicatorTest, ARankThatDoesNotConnectIsNamed) {
  const auto rendezvous = Rendezvous::in_process();
  const std::string text = thrown_text([&] {
    make_gloo_communicator(
        group_of(0, 2, 1), rendezvous->store(), "test", {.address = "", .health = nullptr}
    );
  });
  EXPECT_NE(text.find("not there after the timeout: rank 1"), std::string::npos) << text;
}

TEST(WrapBackendTest, RefusesABackEndOfAnotherGroup) {
  const auto rendezvous = Rendezvous::in_process();
  const auto backend = plain_gloo(*rendezvous, 0, 1);
  EXPECT_THROW(wrap_backend(group_of(0, 2, 5), backend), InvalidArgument);
  EXPECT_THROW(wrap_backend(group_of(0, 1, 5), nullptr), InvalidArgument);
}

// The back end's own words reach the caller.
TEST(WrapBackendTest, AFailureOfTheBackEndIsACommError) {
  const auto rendezvous = Rendezvous::in_process();
  run_threads(2, [&](int rank) {
    auto c = make(Kind::kWrappedCollectives, *rendezvous, rank, 2, /*timeout_s=*/5);
    c->barrier()->wait();
    if (rank == 1) {
      c.reset();
      return;
    }
    at::Tensor tensor = at::ones({1'000'000});
    const std::string text =
        thrown_text([&] { c->all_reduce(tensor, ReduceOp::kSum, "blocks.7")->wait(); });
    EXPECT_NE(text.find("all_reduce #1 of unit 'blocks.7'"), std::string::npos) << text;
    EXPECT_NE(text.find("the back end said"), std::string::npos) << text;
  });
}

TEST(ReduceRowsTest, GivesTheBitsOfTheKernelOnAnyDevice) {
  const at::Tensor rows = at::arange(21, at::kFloat).mul_(0.1).to(at::kBFloat16);
  at::Tensor sum = at::empty({7}, at::kFloat);
  internal::reduce_rows(sum, rows, ReduceOp::kSum);
  const at::Tensor wide = rows.to(at::kFloat).view({3, 7});
  EXPECT_TRUE(at::equal(sum, wide[0] + wide[1] + wide[2]));
}

TEST(GlooJobTest, ThreadsFormWorldsOverGloo) {
  GlooJob job(layout::Topology::from_labels({"a", "a", "b", "b"}));
  run_threads(4, [&](int rank) {
    const auto world = job.world(rank);
    ProcessMesh mesh(
        world, layout::DeviceMesh({{"replicate", 2}, {"shard", 2}}, world->topology())
    );
    EXPECT_EQ(mesh.axis("replicate")->info().tier, layout::Tier::kInter);
    EXPECT_EQ(mesh.axis("shard")->info().tier, layout::Tier::kIntra);
    at::Tensor tensor = at::full({5}, rank, at::kFloat);
    mesh.axis("shard")->all_reduce(tensor)->wait();
    EXPECT_EQ(tensor[0].item<float>(), rank < 2 ? 1.0f : 5.0f);
    mesh.axis("replicate")->all_reduce(tensor)->wait();
    EXPECT_EQ(tensor[0].item<float>(), 6.0f);
    world->world_communicator()->barrier()->wait();
  });
}

TEST(GlooJobTest, AbortEndsWhatIsInFlight) {
  GlooJob job(layout::Topology::single_supernode(2));
  run_threads(2, [&](int rank) {
    const auto world = job.world(rank);
    const auto c = world->world_communicator();
    if (rank == 1) {
      job.abort("rank 1 had enough");
      return;
    }
    const std::string text = thrown_text([&] { c->barrier()->wait(); });
    EXPECT_NE(text.find("rank 1 had enough"), std::string::npos) << text;
  });
}

}  // namespace
}  // namespace hypershard::comm
