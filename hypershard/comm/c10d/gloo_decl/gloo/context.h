// Declares the gloo names that c10d's ProcessGroupGloo.hpp mentions, so that it compiles without
// gloo's own headers; definitions are inside libtorch_cpu. NOTE [gloo declarations]: these types
// are only ever held by pointer here. Never construct, derive from or call virtuals of them: their
// size and vtables are unknown on this side.
#pragma once

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

namespace transport {

class Device;

class UnboundBuffer {
 public:
  virtual ~UnboundBuffer();
};

}  // namespace transport
}  // namespace gloo
