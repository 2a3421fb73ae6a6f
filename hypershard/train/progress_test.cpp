// Checks the numbers a person reads, and that a pipe gets a line only when one is due.
#include "hypershard/train/progress.h"

#include <string>
#include <unistd.h>

#include <gtest/gtest.h>

namespace hypershard::train {
namespace {

TEST(ProgressTest, ShortensCounts) {
  EXPECT_EQ(short_count(0), "0");
  EXPECT_EQ(short_count(999), "999");
  EXPECT_EQ(short_count(999.6), "1.00k");
  EXPECT_EQ(short_count(12'345), "12.3k");
  EXPECT_EQ(short_count(4.567e6), "4.57M");
  EXPECT_EQ(short_count(9.996e3), "10.0k");
}

TEST(ProgressTest, ShortensBytes) {
  EXPECT_EQ(short_bytes(17), "17 B");
  EXPECT_EQ(short_bytes(312LL << 20), "312 MiB");
  EXPECT_EQ(short_bytes(3LL << 29), "1.50 GiB");
}

TEST(ProgressTest, ShortensDurations) {
  EXPECT_EQ(short_duration(-3), "0:00");
  EXPECT_EQ(short_duration(7.2), "0:07");
  EXPECT_EQ(short_duration(151), "2:31");
  EXPECT_EQ(short_duration(3723), "1:02:03");
}

StepMetrics some_metrics(std::int64_t step) {
  return {
      .step = step,
      .loss = 2.10344,
      .tokens_per_s = 12'345,
      .mfu = 0.6149,
      .exposed_comm_share = 0.0213,
      .peak_bytes = 312LL << 20
  };
}

TEST(ProgressTest, ShowsWhatAPersonNeeds) {
  const ProgressState state{.steps = 600, .eval_loss = 2.09111, .remaining_s = 151};
  EXPECT_EQ(
      progress_line(some_metrics(20), state),
      "step  20/600  loss 2.1034  eval 2.0911  12.3k tok/s  MFU 61%  comm 2.1%  312 MiB  eta 2:31"
  );
}

TEST(ProgressTest, ShowsBothTiersWhereThereAreTwo) {
  StepMetrics metrics = some_metrics(20);
  metrics.exposed_inside_share = 0.0121;
  metrics.exposed_between_share = 0.0092;
  metrics.between_bytes = 1;
  const std::string line = progress_line(metrics, {.steps = 600});
  EXPECT_NE(line.find("comm 2.1% (inside 1.2%, between 0.9%)  312 MiB"), std::string::npos) << line;
}

TEST(ProgressTest, LeavesOutWhatIsUnknown) {
  StepMetrics metrics = some_metrics(1);
  metrics.mfu.reset();
  const std::string line = progress_line(metrics, {.steps = 600});
  EXPECT_EQ(line.find("MFU"), std::string::npos) << line;
  EXPECT_EQ(line.find("eval"), std::string::npos) << line;
}

class Pipe {
 public:
  Pipe() { EXPECT_EQ(::pipe(ends_), 0); }
  ~Pipe() {
    close_write();
    ::close(ends_[0]);
  }
  int write_end() const { return ends_[1]; }
  void close_write() {
    if (ends_[1] >= 0) {
      ::close(ends_[1]);
      ends_[1] = -1;
    }
  }
  std::string drain() {
    close_write();
    std::string text;
    char piece[4096];
    for (ssize_t got = 0; (got = ::read(ends_[0], piece, sizeof piece)) > 0;) {
      text.append(piece, static_cast<std::size_t>(got));
    }
    return text;
  }

 private:
  int ends_[2] = {-1, -1};
};

TEST(ProgressTest, PipeGetsEveryNthLineAndThoseThatMustShow) {
  Pipe pipe;
  {
    ProgressPrinter printer(pipe.write_end(), 10);
    const ProgressState state{.steps = 30};
    printer.show(some_metrics(9), state, false);
    printer.show(some_metrics(10), state, false);
    printer.show(some_metrics(11), state, true);
    printer.print("done");
  }
  EXPECT_EQ(
      pipe.drain(),
      progress_line(some_metrics(10), {.steps = 30}) + "\n" +
          progress_line(some_metrics(11), {.steps = 30}) + "\ndone\n"
  );
}

TEST(ProgressTest, ZeroPrintsNoSteps) {
  Pipe pipe;
  ProgressPrinter printer(pipe.write_end(), 0);
  printer.show(some_metrics(10), {.steps = 30}, true);
  EXPECT_EQ(pipe.drain(), "");
}

}  // namespace
}  // namespace hypershard::train
