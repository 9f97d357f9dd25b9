#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cuda_fp16.h"
#include "cuda_runtime.h"

enum __nv_saturation_t { __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3 };
using __nv_fp8x2_storage_t = uint16_t;

namespace emulator {

inline uint32_t ToE4m3(float v) {
  const float within = std::isnan(v) ? v : std::clamp(v, -448.0f, 448.0f);
  return jax_ep::host::Encode(jax_ep::Element::kFloat8, within);
}

}  // namespace emulator

inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 v, __nv_saturation_t, __nv_fp8_interpretation_t) {
  return static_cast<__nv_fp8x2_storage_t>(emulator::ToE4m3(v.x) | emulator::ToE4m3(v.y) << 8);
}
// All numbers of e4m3 are numbers of float16.
inline __half2 __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t v, __nv_fp8_interpretation_t) {
  constexpr auto kFloat8 = jax_ep::Element::kFloat8;
  return {__float2half_rn(jax_ep::host::Decode(kFloat8, v & 0xff)),
          __float2half_rn(jax_ep::host::Decode(kFloat8, v >> 8))};
}
