// How an operation spreads over a device.
#pragma once

namespace jax_ep {

struct Grid {
  int num_sms;            // blocks, one an SM
  bool in_pairs = false;  // whether they take SMs by pairs, as matmuls that run beside them do
};

}  // namespace jax_ep
