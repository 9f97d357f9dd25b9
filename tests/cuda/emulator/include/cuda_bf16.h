#pragma once

#include <cstdint>

#include "tests/cuda/host_reference.h"

struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 v) { return jax_ep::host::Decode(jax_ep::Element::kBFloat16, v.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  return {static_cast<uint16_t>(jax_ep::host::Encode(jax_ep::Element::kBFloat16, v))};
}
