#pragma once

#include <cstdint>

#include "tests/cuda/host_reference.h"

struct __half {
  uint16_t bits;
};
struct __half2 {
  __half x, y;
};

inline float __half2float(__half v) { return jax_ep::host::Decode(jax_ep::Element::kFloat16, v.bits); }
inline __half __float2half_rn(float v) {
  return {static_cast<uint16_t>(jax_ep::host::Encode(jax_ep::Element::kFloat16, v))};
}
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
