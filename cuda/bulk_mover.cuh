// Moves bytes to several places by bulk copies: into a ring in shared memory, and out to each place. A warp has several
// pieces under way and holds none of them in registers, so a few SMs keep the link and memory busy.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/bulk_copy.cuh"
#include "cuda/exchange.cuh"

namespace jax_ep {

// Of a warp. Smaller pieces share the bytes of three large ones.
struct alignas(128) BulkRing {
  static constexpr int kLargest = 3584;  // bytes of a piece
  static constexpr int kBytes = 3 * kLargest;
  static constexpr int kMostSlots = 6;

  char bytes[kBytes];
  uint64_t there[kMostSlots];
  uint32_t place[kMostSlots][kWarpSize];  // of each lane
  uint32_t size[kMostSlots];
};

class BulkMover {
 public:
  static constexpr uint32_t kNowhere = 0xffffffffu;

  // For pieces of up to `largest` bytes, to places that are counted in 16 bytes from `base`. By a warp.
  __device__ BulkMover(BulkRing* ring, char* base, int largest)
      : ring_(ring),
        base_(base),
        stride_(largest),
        slots_(min(BulkRing::kBytes / largest, BulkRing::kMostSlots)),
        lane_(static_cast<int>(threadIdx.x) % kWarpSize) {
    if (lane_ == 0) {
      for (int slot = 0; slot < slots_; ++slot) InitBarrier(&ring_->there[slot], 1);
      InitDone();
    }
    __syncwarp();
  }

  // Brings `bytes`, a multiple of 16 at an address of 16, to the place that each lane names, or kNowhere. What is there
  // must have been seen by this thread, and CopiesSeeWhatISee called since.
  __device__ void Move(const char* from, uint32_t place, uint32_t bytes) {
    const int slot = started_ % slots_;
    // At most slots - 2 pieces are in the ring and unsent, so the copies out of this slot are the last but one at
    // least.
    AwaitCopiesOutRead<1>();
    __syncwarp();
    ring_->place[slot][lane_] = place;
    if (lane_ == 0) {
      ring_->size[slot] = bytes;
      StartCopy(ring_->bytes + slot * stride_, from, bytes, &ring_->there[slot]);
    }
    ++started_;
    if (started_ - sent_ > slots_ - 2) Send();
  }

  // Until all has arrived.
  __device__ void Finish() {
    while (sent_ < started_) Send();
    AwaitCopiesOut<0>();
  }

 private:
  // The oldest piece in the ring, to its places.
  __device__ void Send() {
    const int slot = sent_ % slots_;
    AwaitCopy(&ring_->there[slot], sent_ / slots_ % 2);
    const uint32_t place = ring_->place[slot][lane_];
    const uint32_t bytes = __shfl_sync(kAllLanes, lane_ == 0 ? ring_->size[slot] : 0, 0);
    if (place != kNowhere) StartCopyOut(base_ + int64_t{place} * 16, ring_->bytes + slot * stride_, bytes);
    EndGroup();
    ++sent_;
  }

  BulkRing* const ring_;
  char* const base_;
  const int stride_;
  const int slots_;
  const int lane_;
  int started_ = 0;
  int sent_ = 0;
};

}  // namespace jax_ep
