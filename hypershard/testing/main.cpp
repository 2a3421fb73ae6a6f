// The main of every test binary: runs the tests, or with `--worker NAME` as first argument the
// worker of that name (see worker.h).
#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "hypershard/testing/worker.h"

int main(int argc, char** argv) {
  if (argc >= 3 && std::strcmp(argv[1], "--worker") == 0) {
    return hypershard::testing::run_worker(
        argv[2], std::vector<std::string>(argv + 3, argv + argc)
    );
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
