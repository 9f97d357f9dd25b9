// How an operation spreads over a device.
#pragma once

#include <algorithm>
#include <cstdint>

namespace jax_ep {

struct Grid {
  int num_sms;            // blocks, one an SM
  bool in_pairs = false;  // whether they take SMs by pairs, as matmuls that run beside them do
  bool in_bulk = false;   // whether a dispatch that only copies does so by bulk copies: for few SMs
};

// Up to so many, a dispatch is faster by bulk copies, and a combine that takes several pieces at once
// (docs/kernels.md).
inline constexpr int kFewSms = 32;

// What a dispatch or a combine takes between start and done where nobody says how many SMs: as many as keep up with the
// link, which `per_copy` SMs do for each copy of a token that is read or written; but an eighth to a quarter of the
// device's, and by pairs. docs/kernels.md has where this comes from.
inline Grid GridBeside(int64_t tokens, int64_t rows, int per_copy, int device_sms) {
  const int64_t copies = 2 + rows / std::max<int64_t>(tokens, 1);  // this rank's tokens, those that cross, the rows
  const int64_t least = std::max(device_sms / 8, 1);
  const int64_t most = std::max(device_sms / 4, 1);
  const auto sms = static_cast<int>(std::clamp(copies * per_copy, least, most));
  return {sms > 1 ? sms / 2 * 2 : 1, true};
}

inline constexpr int kBulkDispatchSmsPerCopy = 4;
inline constexpr int kDispatchSmsPerCopy = 6;
inline constexpr int kCombineSmsPerCopy = 8;

}  // namespace jax_ep
