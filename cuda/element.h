// What tokens and rows are made of. The numbers are those of ELEMENTS and SCALE_FORMATS in jax_ep/kernels.py.
#pragma once

#include <cstdint>

namespace jax_ep {

enum class Element : int32_t { kFloat32, kBFloat16, kFloat16, kFloat8 };  // kFloat8: e4m3, with scales
enum class ScaleFormat : int32_t { kFloat32, kUe8m0 };

#ifdef __CUDACC__
__host__ __device__
#endif
    constexpr int BytesOf(Element element) {
  return element == Element::kFloat32 ? 4 : element == Element::kFloat8 ? 1 : 2;
}

// Elements that share a scale.
constexpr int kScaleBlock = 128;

#ifdef __CUDACC__
__host__ __device__
#endif
    constexpr int ScaleBlocks(int hidden) {
  return (hidden + kScaleBlock - 1) / kScaleBlock;
}

}  // namespace jax_ep
