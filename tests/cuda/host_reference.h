// What layout, dispatch and combine must return, by plain loops on the host: docs/semantics.md written out once more,
// the C++ twin of tests/oracle.py. Of the kernels' own code it takes only names (row orders, elements, shapes).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "cuda/element.h"
#include "cuda/layout_rule.h"

namespace jax_ep::host {

using Bytes = std::vector<uint8_t>;

// --- Numbers: an element of any kind is `BytesOf(element)` bytes, held as bits in a uint32_t.

inline uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Bits of the i-th of values of `width` bytes (little-endian, as the GPU has them).
inline uint32_t Load(const uint8_t* from, int64_t i, int width) {
  uint32_t bits = 0;
  std::memcpy(&bits, from + i * width, width);
  return bits;
}

inline void Store(uint8_t* to, int64_t i, int width, uint32_t bits) { std::memcpy(to + i * width, &bits, width); }

// A sign, then exponent and mantissa of so many bits. Float8 has numbers where the others have infinities.
struct Format {
  int exponent_bits;
  int mantissa_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  uint32_t magnitude_mask() const { return (1u << (exponent_bits + mantissa_bits)) - 1; }
  uint32_t infinity() const { return ((1u << exponent_bits) - 1) << mantissa_bits; }
};

inline Format FormatOf(Element element) {
  switch (element) {
    case Element::kBFloat16:
      return {8, 7};
    case Element::kFloat16:
      return {5, 10};
    case Element::kFloat8:
      return {4, 3};
    default:
      return {8, 23};
  }
}

inline bool IsNan(Element element, uint32_t bits) {
  const Format format = FormatOf(element);
  const uint32_t magnitude = bits & format.magnitude_mask();
  return element == Element::kFloat8 ? magnitude == format.magnitude_mask() : magnitude > format.infinity();
}

// Equal to the bit, but a NaN is a NaN.
inline bool SameNumber(Element element, uint32_t a, uint32_t b) {
  return a == b || (IsNan(element, a) && IsNan(element, b));
}

inline float Decode(Element element, uint32_t bits) {
  if (element == Element::kFloat32) return FloatOf(bits);
  if (IsNan(element, bits)) return std::numeric_limits<float>::quiet_NaN();
  const Format format = FormatOf(element);
  const uint32_t magnitude = bits & format.magnitude_mask();
  float value = std::numeric_limits<float>::infinity();
  if (element == Element::kFloat8 || magnitude != format.infinity()) {
    const int exponent = static_cast<int>(magnitude >> format.mantissa_bits);
    const int mantissa = static_cast<int>(magnitude & ((1u << format.mantissa_bits) - 1));
    const int significand = exponent == 0 ? mantissa : mantissa + (1 << format.mantissa_bits);
    value = std::ldexp(static_cast<float>(significand), std::max(exponent, 1) - format.bias() - format.mantissa_bits);
  }
  return bits > format.magnitude_mask() ? -value : value;
}

// To nearest, ties to even, with subnormals. What is too large becomes an infinity; for Float8, which has none, the
// caller clamps to 448 first.
inline uint32_t Encode(Element element, float value) {
  if (element == Element::kFloat32) return BitsOf(value);
  const Format format = FormatOf(element);
  if (std::isnan(value)) return format.magnitude_mask();
  const uint32_t sign = std::signbit(value) ? format.magnitude_mask() + 1 : 0;
  if (std::isinf(value)) return sign | format.infinity();
  const double magnitude = std::fabs(static_cast<double>(value));
  const int least = 1 - format.bias();  // exponent of the least normal number, and of subnormals
  const int exponent = magnitude == 0 ? least : std::max(std::ilogb(magnitude), least);
  // In distances between neighbours; exact up to the rounding, which the host does to nearest, ties to even.
  const double steps = std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));
  // Numbers in order have bits in order, so a carry into the next exponent takes care of itself.
  const auto bits = (static_cast<uint32_t>(exponent - least) << format.mantissa_bits) + static_cast<uint32_t>(steps);
  return sign | (element == Element::kFloat8 ? bits : std::min(bits, format.infinity()));
}

// --- Layout

// What all ranks ask for together.
struct Routing {
  RowOrder order;
  LayoutShape shape;
  std::vector<int32_t> index;  // [ranks, tokens, top_k], sanitised: -1 for none

  int64_t pick(int source, int token, int k) const {
    return (int64_t{source} * shape.tokens + token) * shape.top_k + k;
  }
};

// What one rank makes of it.
struct Layout {
  std::vector<int32_t> slots;  // [ranks, tokens, top_k]
  std::vector<int32_t> group_sizes;
  std::vector<int32_t> counts;
  int32_t num_dropped = 0;
};

// Blocks that each local expert gets: level by level, one block a level to each that still wants one, lowest expert
// first, until the budget is spent.
inline std::vector<int32_t> ShareBlocks(const std::vector<int32_t>& wanted, int32_t budget) {
  std::vector<int32_t> blocks(wanted.size(), 0);
  while (budget > 0 && blocks != wanted) {
    for (size_t expert = 0; expert < wanted.size() && budget > 0; ++expert) {
      if (blocks[expert] == wanted[expert]) continue;
      ++blocks[expert];
      --budget;
    }
  }
  return blocks;
}

inline void PlaceByExpert(const Routing& routing, int rank, Layout* layout) {
  const LayoutShape& shape = routing.shape;
  std::vector<std::vector<int64_t>> picks(shape.local_experts);  // of each local expert, in order
  for (int64_t pick = 0; pick < shape.picks(); ++pick) {
    const int32_t expert = routing.index[pick];
    if (expert >= 0 && expert / shape.local_experts == rank) picks[expert % shape.local_experts].push_back(pick);
  }
  std::vector<int32_t> wanted;
  for (const auto& of_expert : picks) {
    wanted.push_back((static_cast<int32_t>(of_expert.size()) + shape.alignment - 1) / shape.alignment);
  }
  const std::vector<int32_t> blocks = ShareBlocks(wanted, shape.capacity / shape.alignment);
  int32_t start = 0;
  for (int expert = 0; expert < shape.local_experts; ++expert) {
    const int32_t size = blocks[expert] * shape.alignment;
    const auto rows = static_cast<int32_t>(picks[expert].size());
    const int32_t kept = std::min(rows, size);
    for (int32_t place = 0; place < kept; ++place) layout->slots[picks[expert][place]] = start + place;
    layout->group_sizes[expert] = size;
    layout->counts[expert] = kept;
    layout->num_dropped += rows - kept;
    start += size;
  }
}

inline void PlaceByRank(const Routing& routing, int rank, Layout* layout) {
  const LayoutShape& shape = routing.shape;
  int32_t rows = 0;
  for (int source = 0; source < shape.ranks; ++source) {
    for (int token = 0; token < shape.tokens; ++token) {
      bool wants = false;
      for (int k = 0; k < shape.top_k; ++k) {
        const int64_t pick = routing.pick(source, token, k);
        const int32_t expert = routing.index[pick];
        if (expert < 0 || expert / shape.local_experts != rank) continue;
        wants = true;
        if (rows >= shape.capacity) continue;
        layout->slots[pick] = rows;
        ++layout->counts[expert % shape.local_experts];
      }
      rows += wants;
    }
  }
  layout->group_sizes = layout->counts;
  layout->num_dropped = std::max(0, rows - shape.capacity);
}

inline Layout LayoutOf(const Routing& routing, int rank) {
  Layout layout;
  layout.slots.assign(routing.shape.picks(), -1);
  layout.group_sizes.assign(routing.shape.local_experts, 0);
  layout.counts.assign(routing.shape.local_experts, 0);
  if (routing.order == RowOrder::kExpert) {
    PlaceByExpert(routing, rank, &layout);
  } else {
    PlaceByRank(routing, rank, &layout);
  }
  return layout;
}

inline std::vector<bool> RowsWithToken(const Layout& layout, int32_t capacity) {
  std::vector<bool> real(capacity, false);
  for (const int32_t slot : layout.slots) {
    if (slot >= 0) real[slot] = true;
  }
  return real;
}

// --- FP8

inline int ScaleBlocks(int hidden) { return (hidden + kScaleBlock - 1) / kScaleBlock; }

// One token [hidden] to payload [hidden] and scales [blocks].
inline void Quantize(Element from, const uint8_t* token, int hidden, ScaleFormat format, uint8_t* payload,
                     float* scales) {
  for (int block = 0; block < ScaleBlocks(hidden); ++block) {
    const int begin = block * kScaleBlock;
    const int end = std::min(hidden, begin + kScaleBlock);
    std::vector<float> x;
    uint32_t largest = 0;
    for (int i = begin; i < end; ++i) {
      x.push_back(Decode(from, Load(token, i, BytesOf(from))));
      largest = std::max(largest, BitsOf(x.back()) & 0x7fffffffu);
    }
    if (largest >= 0x7f800000u) {  // an infinity or a NaN
      scales[block] = std::numeric_limits<float>::quiet_NaN();
      for (int i = begin; i < end; ++i) payload[i] = 0x7f;
      continue;
    }
    const float amax = std::max(FloatOf(largest), 0x1p-100f);
    float scale = amax * (1.0f / 448.0f);
    float inverse = 448.0f / amax;
    if (format == ScaleFormat::kUe8m0) {
      int power;
      if (std::frexp(scale, &power) == 0.5f) --power;  // the least power of two that is not below scale
      scale = std::ldexp(1.0f, power);
      inverse = std::ldexp(1.0f, -power);
    }
    scales[block] = scale;
    for (int i = begin; i < end; ++i) {
      const float value = std::min(448.0f, std::max(-448.0f, x[i - begin] * inverse));
      payload[i] = static_cast<uint8_t>(Encode(Element::kFloat8, value));
    }
  }
}

inline void Dequantize(const uint8_t* payload, const float* scales, int hidden, Element to, uint8_t* token) {
  for (int i = 0; i < hidden; ++i) {
    const float value = Decode(Element::kFloat8, payload[i]) * scales[i / kScaleBlock];
    Store(token, i, BytesOf(to), Encode(to, value));
  }
}

// --- Dispatch

// What the ranks send, and how; the first index of each vector is the rank.
struct Tokens {
  Element from;
  Element wire;
  Element to;
  ScaleFormat scale_format;
  int hidden;
  std::vector<Bytes> x;                        // [tokens, hidden]
  std::vector<std::vector<float>> scales;      // [tokens, blocks] of an x that comes quantised, else none
  std::vector<std::vector<uint32_t>> weights;  // [tokens, top_k], or none
};

// What one rank gets.
struct Rows {
  Bytes x;                        // [capacity, hidden]
  std::vector<float> scales;      // [capacity, blocks] where rows stay quantised, else none
  std::vector<uint32_t> weights;  // [capacity], in rank order [capacity, top_k]; or none
};

inline Rows Dispatch(const Routing& routing, const Layout& layout, const Tokens& tokens) {
  const LayoutShape& shape = routing.shape;
  const int hidden = tokens.hidden;
  const int blocks = ScaleBlocks(hidden);
  const int64_t from_bytes = int64_t{hidden} * BytesOf(tokens.from);
  const int64_t to_bytes = int64_t{hidden} * BytesOf(tokens.to);
  const bool by_rank = routing.order == RowOrder::kRank;
  Rows rows;  // all +0, which is what rows without a token stay
  rows.x.assign(shape.capacity * to_bytes, 0);
  if (tokens.to == Element::kFloat8) rows.scales.assign(int64_t{shape.capacity} * blocks, 0.0f);
  if (!tokens.weights.empty()) rows.weights.assign(int64_t{shape.capacity} * (by_rank ? shape.top_k : 1), 0);

  for (int source = 0; source < shape.ranks; ++source) {
    for (int token = 0; token < shape.tokens; ++token) {
      const uint8_t* x = tokens.x[source].data() + token * from_bytes;
      Bytes crossing(x, x + from_bytes);
      std::vector<float> scales(blocks);
      if (tokens.from == Element::kFloat8) {
        const float* given = tokens.scales[source].data() + int64_t{token} * blocks;
        scales.assign(given, given + blocks);
      } else if (tokens.wire == Element::kFloat8) {
        crossing.resize(hidden);
        Quantize(tokens.from, x, hidden, tokens.scale_format, crossing.data(), scales.data());
      }
      if (tokens.wire == Element::kFloat8 && tokens.to != Element::kFloat8) {
        Bytes wide(to_bytes);
        Dequantize(crossing.data(), scales.data(), hidden, tokens.to, wide.data());
        crossing = wide;
      }
      for (int k = 0; k < shape.top_k; ++k) {
        const int64_t pick = routing.pick(source, token, k);
        const int32_t slot = layout.slots[pick];
        if (slot < 0) continue;
        std::copy(crossing.begin(), crossing.end(), rows.x.begin() + slot * to_bytes);
        if (!rows.scales.empty()) std::copy(scales.begin(), scales.end(), rows.scales.begin() + int64_t{slot} * blocks);
        if (rows.weights.empty()) continue;
        rows.weights[by_rank ? int64_t{slot} * shape.top_k + k : slot] =
            tokens.weights[source][int64_t{token} * shape.top_k + k];
      }
    }
  }
  return rows;
}

// --- Combine

// What the ranks hold; the first index of each vector is the rank.
struct HeldRows {
  Element element;
  int hidden;
  std::vector<Bytes> y;                      // [capacity, hidden]
  std::vector<std::vector<float>> weights;   // [capacity] to multiply rows by, or none
  std::vector<std::vector<uint32_t>> words;  // [capacity], in rank order [capacity, top_k]; or none
};

// The tokens [tokens, hidden] that `source` gets back; `layouts` of all ranks.
inline Bytes Combine(const Routing& routing, const std::vector<Layout>& layouts, const HeldRows& held, int source) {
  const LayoutShape& shape = routing.shape;
  const int hidden = held.hidden;
  const int width = BytesOf(held.element);
  Bytes out(int64_t{shape.tokens} * hidden * width);
  for (int token = 0; token < shape.tokens; ++token) {
    for (int i = 0; i < hidden; ++i) {
      float total = 0.0f;
      for (int rank = 0; rank < shape.ranks; ++rank) {
        float partial = 0.0f;
        for (int k = 0; k < shape.top_k; ++k) {
          const int32_t slot = layouts[rank].slots[routing.pick(source, token, k)];
          if (slot < 0) continue;
          // volatile: a compiler may otherwise make one rounding of the product and the sum (on Arm, it does).
          volatile float product = Decode(held.element, Load(held.y[rank].data(), int64_t{slot} * hidden + i, width));
          if (!held.weights.empty()) product = product * held.weights[rank][slot];
          partial = partial + product;
          if (routing.order == RowOrder::kRank) break;  // one row for all picks of the token
        }
        total = total + Decode(held.element, Encode(held.element, partial));
      }
      Store(out.data(), int64_t{token} * hidden + i, width, Encode(held.element, total));
    }
  }
  return out;
}

// The word of each pick [tokens, top_k] that `source` gets back: 0 for picks without a row.
inline std::vector<uint32_t> PickWords(const Routing& routing, const std::vector<Layout>& layouts, const HeldRows& held,
                                       int source) {
  const LayoutShape& shape = routing.shape;
  std::vector<uint32_t> words(int64_t{shape.tokens} * shape.top_k, 0);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    for (int token = 0; token < shape.tokens; ++token) {
      for (int k = 0; k < shape.top_k; ++k) {
        const int32_t slot = layouts[rank].slots[routing.pick(source, token, k)];
        if (slot < 0) continue;
        const int64_t at = routing.order == RowOrder::kRank ? int64_t{slot} * shape.top_k + k : slot;
        words[int64_t{token} * shape.top_k + k] = held.words[rank][at];
      }
    }
  }
  return words;
}

}  // namespace jax_ep::host
