#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/combine.h"
#include "cuda/exchange.cuh"

namespace jax_ep {
namespace {

// The arithmetic of docs/semantics.md: float32, each step rounded to nearest, no fused multiply-add.
template <typename T>
struct Convert;
template <>
struct Convert<float> {
  static __device__ float Up(float v) { return v; }
  static __device__ float Down(float v) { return v; }
};
template <>
struct Convert<__nv_bfloat16> {
  static __device__ float Up(__nv_bfloat16 v) { return __bfloat162float(v); }
  static __device__ __nv_bfloat16 Down(float v) { return __float2bfloat16_rn(v); }
};
template <>
struct Convert<__half> {
  static __device__ float Up(__half v) { return __half2float(v); }
  static __device__ __half Down(float v) { return __float2half_rn(v); }
};

// 16 bytes of elements, and their sums.
template <typename T>
struct Vector {
  static constexpr int kElements = 16 / sizeof(T);
  float sum[kElements];

  __device__ Vector() {
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum[i] = 0.0f;
  }
  __device__ void Add(const int4& bits) {
    const T* value = reinterpret_cast<const T*>(&bits);
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum[i] = __fadd_rn(sum[i], Convert<T>::Up(value[i]));
  }
  __device__ void AddProduct(const int4& bits, float weight) {
    const T* value = reinterpret_cast<const T*>(&bits);
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(Convert<T>::Up(value[i]), weight));
  }
  __device__ int4 Rounded() const {
    int4 bits;
    T* value = reinterpret_cast<T*>(&bits);
#pragma unroll
    for (int i = 0; i < kElements; ++i) value[i] = Convert<T>::Down(sum[i]);
    return bits;
  }
};

// Rows whose loads are under way together.
constexpr int kRowsAtOnce = 4;

__device__ constexpr int64_t Stamp(int64_t epoch, int rank) { return epoch * 256 + rank; }

// Sums this rank's rows of each token of each rank and pushes them, one warp a pair.
template <typename T>
__device__ void PushSums(const Peers& peers, const CombineArgs& a, int64_t epoch, int64_t warp, int64_t warps,
                         int lane) {
  const BufferLayout& layout = peers.layout;
  const int partials = static_cast<int>(layout.partials());
  const int vectors = a.hidden / Vector<T>::kElements;
  for (int64_t pair = warp; pair < int64_t{layout.shape.ranks} * a.tokens; pair += warps) {
    const int slot = lane < a.top_k ? a.slots[pair * a.top_k + lane] : -1;
    const unsigned picked = __ballot_sync(kAllLanes, slot >= 0);
    if (picked == 0) continue;
    const int64_t token = pair % a.tokens;
    char* theirs = peers.base[pair / a.tokens] + layout.receive_at(epoch);
    if (a.row_words != nullptr && slot >= 0) {
      const uint32_t word = a.row_words[a.order == RowOrder::kRank ? int64_t{slot} * a.top_k + lane : slot];
      const uint64_t stamped = static_cast<uint64_t>(epoch) << 32 | word;
      auto* words = reinterpret_cast<volatile uint64_t*>(theirs + layout.pick_words_at());
      words[token * a.top_k + lane] = stamped;
    }
    if (a.rows == nullptr) continue;
    const unsigned lanes = a.order == RowOrder::kRank ? picked & -picked : picked;
    const float weight = a.row_weights != nullptr && slot >= 0 ? a.row_weights[slot] : 1.0f;
    // A place no other rank uses: this rank's own, or that of the token's first pick here.
    const int place = layout.shape.ranks < layout.shape.top_k ? peers.rank : __ffs(picked) - 1;
    int4* to = reinterpret_cast<int4*>(theirs + layout.sums_at() + (token * partials + place) * layout.row_bytes());
    const int count = __popc(lanes);
    // Lane i knows the i-th of the rows to add, k ascending, and its weight.
    const int nth = lane < count ? static_cast<int>(__fns(lanes, 0, lane + 1)) : 0;
    const int row_of_nth = __shfl_sync(kAllLanes, slot, nth);
    const float weight_of_nth = __shfl_sync(kAllLanes, weight, nth);
    for (int v0 = 0; v0 < vectors; v0 += kWarpSize) {
      const int v = min(v0 + lane, vectors - 1);
      Vector<T> sum;
      for (int i0 = 0; i0 < count; i0 += kRowsAtOnce) {
        int4 bits[kRowsAtOnce];
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
          const int64_t row = __shfl_sync(kAllLanes, row_of_nth, min(i0 + i, count - 1));
          if (i0 + i < count) bits[i] = static_cast<const int4*>(a.rows)[row * vectors + v];
        }
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
          const float scale = __shfl_sync(kAllLanes, weight_of_nth, min(i0 + i, count - 1));
          if (i0 + i >= count) continue;
          if (a.row_weights != nullptr) {
            sum.AddProduct(bits[i], scale);
          } else {
            sum.Add(bits[i]);
          }
        }
      }
      if (v0 + lane < vectors) to[v] = sum.Rounded();
    }
    if (lane == 0) {
      auto* stamps = reinterpret_cast<volatile int64_t*>(theirs + layout.stamps_at());
      stamps[token * partials + place] = Stamp(epoch, peers.rank);
    }
  }
}

// Sums what came for each of this rank's tokens, ranks ascending, one warp a token.
template <typename T>
__device__ void SumPartials(const Peers& peers, const CombineArgs& a, int64_t epoch, int64_t warp, int64_t warps,
                            int lane) {
  const BufferLayout& layout = peers.layout;
  const int partials = static_cast<int>(layout.partials());
  const int vectors = a.hidden / Vector<T>::kElements;
  const char* mine = peers.base[peers.rank] + layout.receive_at(epoch);
  const auto* stamps = reinterpret_cast<const int64_t*>(mine + layout.stamps_at());
  constexpr int kNone = 256;
  for (int64_t token = warp; token < a.tokens; token += warps) {
    int from = kNone;  // the rank whose partial is at the lane's place
    if (lane < partials) {
      const int64_t stamp = LoadPeerWord(stamps + token * partials + lane);
      if (stamp / 256 == epoch) from = static_cast<int>(stamp % 256);
    }
    // Lane i gets the place of the i-th partial, ranks ascending.
    const int count = __popc(__ballot_sync(kAllLanes, from != kNone));
    int place_of_nth = 0;
    for (int i = 0; i < count; ++i) {
      const int least = __reduce_min_sync(kAllLanes, from);
      const int place = __ffs(__ballot_sync(kAllLanes, from == least)) - 1;
      if (lane == i) place_of_nth = place;
      if (lane == place) from = kNone;
    }
    const char* sums = mine + layout.sums_at() + token * partials * layout.row_bytes();
    for (int v0 = 0; v0 < vectors; v0 += kWarpSize) {
      const int v = min(v0 + lane, vectors - 1);
      Vector<T> sum;
      for (int i0 = 0; i0 < count; i0 += kRowsAtOnce) {
        int4 bits[kRowsAtOnce];
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
          const int place = __shfl_sync(kAllLanes, place_of_nth, min(i0 + i, count - 1));
          if (i0 + i < count) bits[i] = LoadPeer(reinterpret_cast<const int4*>(sums + place * layout.row_bytes()) + v);
        }
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
          if (i0 + i < count) sum.Add(bits[i]);
        }
      }
      if (v0 + lane < vectors) static_cast<int4*>(a.out)[token * vectors + v] = sum.Rounded();
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kExchangeThreads, 1) Combine(Peers peers, Call call, CombineArgs a) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t epoch = BeginEpoch(peers);
  PushSums<T>(peers, a, epoch, thread / kWarpSize, threads / kWarpSize, lane);
  Publish(peers, call, epoch);
  WaitForPeers(peers, call, epoch, "combine");
  if (a.rows != nullptr) SumPartials<T>(peers, a, epoch, thread / kWarpSize, threads / kWarpSize, lane);
  if (a.row_words != nullptr) {
    const char* mine = peers.base[peers.rank] + peers.layout.receive_at(epoch);
    const auto* words = reinterpret_cast<const uint64_t*>(mine + peers.layout.pick_words_at());
    for (int64_t i = thread; i < int64_t{a.tokens} * a.top_k; i += threads) {
      const uint64_t stamped = LoadPeerWord(words + i);
      a.pick_words[i] = stamped >> 32 == static_cast<uint32_t>(epoch) ? static_cast<uint32_t>(stamped) : 0;
    }
  }
  Finish(peers, epoch);
}

}  // namespace

cudaError_t LaunchCombine(const Peers& peers, const Call& call, const CombineArgs& args, int num_sms,
                          cudaStream_t stream) {
  switch (args.element) {
    case Element::kFloat32:
      return LaunchTogether(Combine<float>, num_sms, stream, peers, call, args);
    case Element::kBFloat16:
      return LaunchTogether(Combine<__nv_bfloat16>, num_sms, stream, peers, call, args);
    case Element::kFloat16:
      return LaunchTogether(Combine<__half>, num_sms, stream, peers, call, args);
  }
  return cudaErrorInvalidValue;
}

cudaError_t LoadCombineKernels() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, Combine<float>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, Combine<__nv_bfloat16>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, Combine<__half>);
  return error;
}

}  // namespace jax_ep
