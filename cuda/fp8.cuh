// FP8 rows: quantising and dequantising, to the bits of docs/semantics.md ("FP8 wire").
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "cuda/element.h"

namespace jax_ep {

inline __device__ float ToFloat(float v) { return v; }
inline __device__ float ToFloat(__nv_bfloat16 v) { return __bfloat162float(v); }
inline __device__ float ToFloat(__half v) { return __half2float(v); }

// 16 bytes of elements, each in as few instructions as it takes.
template <typename T>
__device__ void ToFloats(const int4& bits, float (&values)[16 / sizeof(T)]) {
  const T* elements = reinterpret_cast<const T*>(&bits);
#pragma unroll
  for (int i = 0; i < static_cast<int>(16 / sizeof(T)); ++i) values[i] = ToFloat(elements[i]);
}
template <>
inline __device__ void ToFloats<__nv_bfloat16>(const int4& bits, float (&values)[8]) {
  const uint32_t* pairs = reinterpret_cast<const uint32_t*>(&bits);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = __uint_as_float(pairs[i] << 16);
    values[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
  }
}

template <typename T>
__device__ T RoundTo(float v);
template <>
inline __device__ float RoundTo<float>(float v) {
  return v;
}
template <>
inline __device__ __nv_bfloat16 RoundTo<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}
template <>
inline __device__ __half RoundTo<__half>(float v) {
  return __float2half_rn(v);
}

struct Fp8Scale {
  float scale;    // what a payload is multiplied by to be the value again, or NaN
  float inverse;  // what a value is multiplied by to be a payload
  bool finite;    // whether the block is
};

// Of a block whose largest magnitude, as an integer, is amax_bits.
inline __device__ Fp8Scale ScaleOf(uint32_t amax_bits, ScaleFormat format) {
  constexpr float kOne448th = 1.0f / 448.0f;
  constexpr float kLeast = 0x1p-100f;
  Fp8Scale s;
  s.finite = amax_bits < 0x7f800000u;
  const float amax = fmaxf(__uint_as_float(s.finite ? amax_bits : 0u), kLeast);
  s.scale = __fmul_rn(amax, kOne448th);
  if (format == ScaleFormat::kUe8m0) {
    const uint32_t bits = __float_as_uint(s.scale);
    const uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0);
    s.scale = __uint_as_float(exponent << 23);
    s.inverse = __uint_as_float((254 - exponent) << 23);
  } else {
    s.inverse = __fdiv_rn(448.0f, amax);
  }
  if (!s.finite) s.scale = __uint_as_float(0x7fc00000u);
  return s;
}

// Two elements to two bytes.
inline __device__ uint32_t QuantizePair(float a, float b, const Fp8Scale& s) {
  if (!s.finite) return 0x7f7fu;
  return __nv_cvt_float2_to_fp8x2(make_float2(__fmul_rn(a, s.inverse), __fmul_rn(b, s.inverse)), __NV_SATFINITE,
                                  __NV_E4M3);
}

// Four bytes to four elements.
template <typename T>
__device__ void Dequantize(uint32_t bytes, float scale, T* to) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const __half2 halves = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bytes >> (16 * i)), __NV_E4M3);
    to[2 * i] = RoundTo<T>(__fmul_rn(__half2float(__low2half(halves)), scale));
    to[2 * i + 1] = RoundTo<T>(__fmul_rn(__half2float(__high2half(halves)), scale));
  }
}

}  // namespace jax_ep
