// A user's first program against the installed package: raises and catches a library error.
#include <cstdio>
#include <string>

#include "hypershard/core/error.h"

int main() {
  try {
    HS_CHECK_EQ(1 + 1, 3, "consumer: the sum");
  } catch (const hypershard::InvalidArgument& error) {
    const std::string text = error.what();
    std::printf("caught: %s\n", text.c_str());
    return text.find("consumer: the sum") != std::string::npos ? 0 : 1;
  }
  return 1;
}
