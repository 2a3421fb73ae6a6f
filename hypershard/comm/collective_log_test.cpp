// Why: the log is an oracle elsewhere, so its own counts and its hash must be right.
#include "hypershard/comm/collective_log.h"

#include <string>

#include <gtest/gtest.h>

namespace hypershard::comm {
namespace {

LogEntry gather(const std::string& unit, std::int64_t bytes) {
  LogEntry entry;
  entry.op = Op::kAllGather;
  entry.communicator = "shard";
  entry.unit = unit;
  entry.dtype = "float32";
  entry.payload_bytes = bytes;
  return entry;
}

TEST(CollectiveLogTest, KeepsTheNewestEntriesAndCountsAll) {
  CollectiveLog log(/*keep=*/2);
  for (int i = 0; i < 5; ++i) {
    log.append(gather("u" + std::to_string(i), 10));
  }
  EXPECT_EQ(log.size(), 5U);
  EXPECT_EQ(log.bytes(Op::kAllGather), 50);
  ASSERT_EQ(log.entries().size(), 2U);
  EXPECT_EQ(log.entries().front().unit, "u3");
  log.keep_all(true);
  log.append(gather("u5", 10));
  EXPECT_EQ(log.entries().size(), 3U);
  log.clear();
  EXPECT_EQ(log.size(), 0U);
  EXPECT_EQ(log.hash(), CollectiveLog().hash());
  EXPECT_EQ(log.count(Op::kAllGather), 0);
}

TEST(CollectiveLogTest, HashTellsOrderAndEveryField) {
  const auto hash = [](std::initializer_list<LogEntry> entries) {
    CollectiveLog log;
    for (const LogEntry& entry : entries) {
      log.append(entry);
    }
    return log.hash();
  };
  const LogEntry a = gather("a", 8);
  const LogEntry b = gather("b", 8);
  EXPECT_EQ(hash({a, b}), hash({a, b}));
  EXPECT_NE(hash({a, b}), hash({b, a}));
  EXPECT_NE(hash({a}), hash({gather("a", 9)}));
  LogEntry other = a;
  other.dtype = "float64";
  EXPECT_NE(hash({a}), hash({other}));
  other = a;
  other.op = Op::kBroadcast;
  EXPECT_NE(hash({a}), hash({other}));
}

TEST(CollectiveLogTest, HashOfAnAllToAllIgnoresItsBytes) {
  LogEntry a = gather("a", 8);
  a.op = Op::kAllToAll;
  LogEntry b = a;
  b.payload_bytes = 16;
  CollectiveLog first;
  CollectiveLog second;
  first.append(a);
  second.append(b);
  EXPECT_EQ(first.hash(), second.hash());
}

}  // namespace
}  // namespace hypershard::comm
