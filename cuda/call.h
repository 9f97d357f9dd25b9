// One call of one operation of a group.
#pragma once

#include <cstdint>

namespace jax_ep {

struct Call {
  int64_t tag;         // of the call site: equal on all ranks that run the same program
  int64_t timeout_ns;  // how long to wait for a peer
  int32_t serial;      // of the group, for messages
};

}  // namespace jax_ep
