// Declares gloo's network device as an opaque type. See NOTE [gloo declarations] in
// gloo/context.h.
#pragma once

namespace gloo::transport {

class Device;

}  // namespace gloo::transport
