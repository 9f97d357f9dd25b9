// What the link between two GPUs of this process can carry: the limit that exchanges are held to.
#pragma once

#include <cstdint>
#include <string>

namespace jax_ep {

// Gigabytes (1e9 bytes) a second that the copy engines move from `device` to `peer` while they move as much back: the
// rate of one direction, the median of `repeats` copies of `bytes` bytes each way. On failure 0, and `problem` says
// what went wrong. Takes 2 * bytes on either device for as long as it runs; both should be idle.
double CopyGigabytesPerSecond(int device, int peer, int64_t bytes, int repeats, std::string* problem);

}  // namespace jax_ep
