#include "cuda/bulk_copy.cuh"
#include "cuda/combine.h"
#include "cuda/exchange.cuh"
#include "cuda/fp8.cuh"

namespace jax_ep {
namespace {

// A token is summed in pieces, one warp a piece. What is to be summed comes through a ring in shared memory, which the
// warp fills ahead by bulk copies: so many bytes are under way whatever a single load takes.
constexpr int kCombineThreads = 640;
constexpr int kCombineWarps = kCombineThreads / kWarpSize - 1;  // that sum; the last watches the peers
constexpr int kPieceBytes = 2048;
constexpr int kSteps = kPieceBytes / 16 / kWarpSize;  // vectors of 16 bytes of a lane
constexpr int kRingSlots = 4;

// What a slot of the ring is for.
enum : uint32_t {
  kCopied = 1,     // a piece was copied there; else the slot only says something
  kRow = 2,        // of one of this rank's rows, not of a partial sum
  kEndsRows = 4,   // the last of the rows
  kOwnBefore = 8,  // this rank's own partial sum comes before the peer's
  kEndsItem = 16,
  kWrites = 32,  // the item has something to write
};

struct alignas(16) Slot {
  char* to;  // where the item's sum goes
  float weight;
  uint32_t what;  // flags, then from bit 8 the vectors of the piece, from 16 the chunk, from 24 the peer
};

struct alignas(128) WarpRing {
  char data[kRingSlots][kPieceBytes];
  char sum[kPieceBytes];  // on its way to a peer, or this rank's own that waits for those of peers
  uint64_t there[kRingSlots];
  Slot slots[kRingSlots];
};

// 16 bytes of elements, and their sums by the arithmetic of docs/semantics.md: float32, each step rounded to nearest,
// no fused multiply-add.
template <typename T>
struct Vector {
  static constexpr int kElements = 16 / sizeof(T);
  float sum[kElements];

  __device__ Vector() { Clear(); }
  __device__ void Clear() {
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum[i] = 0.0f;
  }
  __device__ void Add(const int4& bits) {
    const T* value = reinterpret_cast<const T*>(&bits);
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum[i] = __fadd_rn(sum[i], ToFloat(value[i]));
  }
  // A weight of 1 changes no bit.
  __device__ void AddProduct(const int4& bits, float weight) {
    const T* value = reinterpret_cast<const T*>(&bits);
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(ToFloat(value[i]), weight));
  }
  __device__ int4 Rounded() const {
    int4 bits;
    T* value = reinterpret_cast<T*>(&bits);
#pragma unroll
    for (int i = 0; i < kElements; ++i) value[i] = RoundTo<T>(sum[i]);
    return bits;
  }
};

__device__ constexpr int64_t Stamp(int64_t epoch, int rank) { return epoch * 256 + rank; }

// Where a rank leaves the partial sum of a token whose picks it has rows of: a place that no other rank uses, its own
// or that of the token's first pick there.
__device__ int PlaceOf(const BufferLayout& layout, int rank, unsigned picked) {
  return layout.shape.ranks < layout.shape.top_k ? rank : __ffs(picked) - 1;
}

__device__ uint32_t RowWord(const CombineArgs& a, int slot, int lane) {
  return a.row_words[a.order == RowOrder::kRank ? int64_t{slot} * a.top_k + lane : slot];
}

// What all warps of a block know.
struct Job {
  const Peers& peers;
  const CombineArgs& a;
  Progress* progress;
  int64_t epoch;
  Chunks chunks;
  int row_bytes;
  int pieces;
  int64_t stride;  // of partial sums
};

// A term to come: where it is copied from, and what its slot says.
struct Term {
  const char* from;
  Slot slot;
};

enum class Next { kTerm, kLater, kEnd };

// The rows that this rank has of one token, one after the other.
struct Rows {
  Picks picks;
  float weight;   // of the lane's
  unsigned left;  // not yet taken

  __device__ void Start(const CombineArgs& a, int slot) {
    picks = PicksFrom(slot, a.order);
    weight = a.row_weights != nullptr && slot >= 0 ? a.row_weights[slot] : 1.0f;
    left = picks.rows;
  }
  __device__ void Take(const Job& job, int piece, Term* term) {
    const int lane = __ffs(left) - 1;
    left &= left - 1;
    const int64_t row = __shfl_sync(kAllLanes, picks.slot, lane);
    term->slot.weight = __shfl_sync(kAllLanes, weight, lane);
    term->from = static_cast<const char*>(job.a.rows) + row * job.row_bytes + piece * kPieceBytes;
    term->slot.what |= kCopied | kRow | (left == 0 ? kEndsRows : 0);
  }
};

__device__ uint32_t VectorsOf(const Job& job, int piece) {
  return min(kPieceBytes, job.row_bytes - piece * kPieceBytes) / 16;
}

// This rank's rows of its peers' tokens, whose sums are pushed.
class RowsForPeers {
 public:
  static constexpr bool kPushes = true;

  __device__ RowsForPeers(const Job& job, const Crew& crew)
      : job_(job), lane_(crew.lane), item_(crew, job.pieces), peer_(job.peers.rank) {
    NextPeer();
    LoadSlot();
  }

  __device__ Next Take(Term* term, bool) {
    if (rows_.left == 0 && !Advance()) return Next::kEnd;
    term->slot.to = to_;
    term->slot.what = what_;
    if (rows_.left != 0) rows_.Take(job_, piece_, term);
    if (rows_.left == 0) term->slot.what |= kEndsItem;
    return Next::kTerm;
  }

 private:
  __device__ void NextPeer() {  // each rank starts at another
    if (++peer_ == job_.peers.layout.shape.ranks) peer_ = 0;
  }
  // The lane's slot in the item that comes next: loaded long before it is needed.
  __device__ void LoadSlot() {
    while (item_.token >= job_.a.tokens && peer_ != job_.peers.rank) {
      item_.token -= job_.a.tokens;
      NextPeer();
    }
    const CombineArgs& a = job_.a;
    if (peer_ == job_.peers.rank || lane_ >= a.top_k) return;
    upcoming_ = a.slots[(int64_t{peer_} * a.tokens + item_.token) * a.top_k + lane_];
  }

  __device__ bool Advance() {
    if (peer_ == job_.peers.rank) return false;
    const CombineArgs& a = job_.a;
    const BufferLayout& layout = job_.peers.layout;
    const int64_t token = item_.token;
    const int peer = peer_;
    piece_ = item_.piece;
    rows_.Start(a, lane_ < a.top_k ? upcoming_ : -1);
    item_.Step();
    LoadSlot();
    what_ = VectorsOf(job_, piece_) << 8 | job_.chunks.Of(static_cast<int>(token)) << 16 | peer << 24;
    if (rows_.picks.picked == 0) return true;
    what_ |= kWrites;
    char* theirs = job_.peers.base[peer] + layout.receive_at(job_.epoch);
    const int64_t place = token * layout.partials() + PlaceOf(layout, job_.peers.rank, rows_.picks.picked);
    to_ = theirs + layout.sums_at() + place * job_.stride + piece_ * kPieceBytes;
    if (piece_ != 0) return true;
    if (lane_ == 0) {
      auto* stamps = reinterpret_cast<volatile int64_t*>(theirs + layout.stamps_at());
      stamps[place] = Stamp(job_.epoch, job_.peers.rank);
    }
    if (a.row_words != nullptr && rows_.picks.slot >= 0) {
      auto* words = reinterpret_cast<volatile uint64_t*>(theirs + layout.pick_words_at());
      words[token * a.top_k + lane_] = static_cast<uint64_t>(job_.epoch) << 32 | RowWord(a, rows_.picks.slot, lane_);
    }
    return true;
  }

  const Job& job_;
  const int lane_;
  Item item_;  // the next
  int peer_;   // whose it is
  int upcoming_ = -1;
  // Of the present item:
  int piece_ = 0;
  Rows rows_{};
  char* to_ = nullptr;
  uint32_t what_ = 0;
};

// What belongs to this rank's own tokens: its own rows of them first, which wait for nobody, then the partial sums that
// its peers have pushed, ranks ascending.
class TermsOfOwn {
 public:
  static constexpr bool kPushes = false;

  __device__ TermsOfOwn(const Job& job, const Crew& crew) : job_(job), lane_(crew.lane), item_(crew, job.pieces) {
    LoadSlot();
  }

  __device__ Next Take(Term* term, bool wait) {
    if (done_) {
      if (item_.token >= job_.a.tokens) return Next::kEnd;
      Advance();
    }
    term->slot.to = to_;
    term->slot.what = what_;
    if (rows_.left != 0) {
      rows_.Take(job_, piece_, term);
      return Next::kTerm;
    }
    if (count_ < 0) {
      while (!PeersAreReady()) {
        if (!wait) return Next::kLater;
        __nanosleep(100);
      }
      FindPartials();
    }
    done_ = taken_ + 1 >= count_;
    if (done_) term->slot.what |= kEndsItem;
    if (count_ == 0) return Next::kTerm;
    const int place = __shfl_sync(kAllLanes, place_, taken_);
    const int rank = __shfl_sync(kAllLanes, rank_, taken_);
    ++taken_;
    term->from = Receive() + job_.peers.layout.sums_at() +
                 (int64_t{token_} * job_.peers.layout.partials() + place) * job_.stride + piece_ * kPieceBytes;
    term->slot.what |= kCopied | (rank > job_.peers.rank ? kOwnBefore : 0);
    return Next::kTerm;
  }

 private:
  __device__ const char* Receive() const {
    return job_.peers.base[job_.peers.rank] + job_.peers.layout.receive_at(job_.epoch);
  }
  __device__ void LoadSlot() {
    const CombineArgs& a = job_.a;
    if (item_.token >= a.tokens || lane_ >= a.top_k) return;
    upcoming_ = a.slots[(int64_t{job_.peers.rank} * a.tokens + item_.token) * a.top_k + lane_];
  }
  __device__ bool PeersAreReady() {
    const int chunk = job_.chunks.Of(token_);
    if (chunk <= known_) return true;
    bool ready = true;
    for (int peer = lane_; peer < job_.peers.layout.shape.ranks; peer += kWarpSize) {
      ready &= peer == job_.peers.rank || IsReady(job_.progress, peer, chunk);
    }
    if (!__all_sync(kAllLanes, ready)) return false;
    __syncwarp();
    CopiesSeeWhatISee();
    known_ = chunk;
    return true;
  }

  __device__ void Advance() {
    const CombineArgs& a = job_.a;
    token_ = item_.token;
    piece_ = item_.piece;
    rows_.Start(a, lane_ < a.top_k ? upcoming_ : -1);
    item_.Step();
    LoadSlot();
    to_ = static_cast<char*>(a.out) + int64_t{token_} * job_.row_bytes + piece_ * kPieceBytes;
    what_ = VectorsOf(job_, piece_) << 8 | kWrites;
    count_ = -1;
    taken_ = 0;
    done_ = false;
  }

  // The peers' partial sums of the token: lane i knows the rank and the place of the i-th.
  __device__ void FindPartials() {
    constexpr int kNone = 256;
    const CombineArgs& a = job_.a;
    const BufferLayout& layout = job_.peers.layout;
    const int partials = static_cast<int>(layout.partials());
    int from = kNone;  // the rank whose partial sum is at the lane's place
    if (lane_ < partials) {
      const auto* stamps = reinterpret_cast<const int64_t*>(Receive() + layout.stamps_at());
      const int64_t stamp = LoadPeerWord(stamps + int64_t{token_} * partials + lane_);
      if (stamp >> 8 == job_.epoch) from = static_cast<int>(stamp & 255);
    }
    count_ = __popc(__ballot_sync(kAllLanes, from != kNone));
    for (int i = 0; i < count_; ++i) {
      const int least = __reduce_min_sync(kAllLanes, from);
      const int place = __ffs(__ballot_sync(kAllLanes, from == least)) - 1;
      if (lane_ == i) {
        place_ = place;
        rank_ = least;
      }
      if (lane_ == place) from = kNone;
    }
    if (a.row_words == nullptr || piece_ != 0 || lane_ >= a.top_k) return;
    uint32_t word = 0;
    if (rows_.picks.slot >= 0) {
      word = RowWord(a, rows_.picks.slot, lane_);
    } else {
      const auto* words = reinterpret_cast<const uint64_t*>(Receive() + layout.pick_words_at());
      const uint64_t stamped = LoadPeerWord(words + int64_t{token_} * a.top_k + lane_);
      if (stamped >> 32 == static_cast<uint32_t>(job_.epoch)) word = static_cast<uint32_t>(stamped);
    }
    a.pick_words[int64_t{token_} * a.top_k + lane_] = word;
  }

  const Job& job_;
  const int lane_;
  Item item_;  // the next
  int upcoming_ = -1;
  int known_ = -1;  // the last chunk that all peers are known to be through with
  // Of the present item:
  bool done_ = true;
  int token_ = 0;
  int piece_ = 0;
  Rows rows_{};
  char* to_ = nullptr;
  uint32_t what_ = 0;
  int count_ = 0;  // of the peers' partial sums, -1 while it isn't known
  int taken_ = 0;
  int place_ = 0;
  int rank_ = 0;
};

// Counts an item whose sum has been sent, and tells the peer if it was the last of its chunk.
__device__ void CountItem(const Job& job, uint32_t what) {
  const int peer = static_cast<int>(what >> 24);
  const int chunk = static_cast<int>(what >> 16 & 255);
  const bool counts = threadIdx.x % kWarpSize == 0;
  if (counts) AwaitCopiesOut();
  if (!IsLastItem(job.peers, peer, chunk, job.chunks.Tokens(chunk, job.a.tokens) * job.pieces)) return;
  if (counts) StoreRelease(&HeaderOf(job.peers, peer)->ready[job.peers.rank][chunk], job.epoch);
}

// Sums all that a feed has, by one warp.
template <typename T, typename Feed>
__device__ void Sum(const Job& job, const Crew& crew, WarpRing* ring) {
  constexpr uint32_t kNone = 0xffffffffu;
  Feed feed(job, crew);
  Vector<T> sum[kSteps];
  int4* kept = reinterpret_cast<int4*>(ring->sum) + crew.lane;
  bool has_own = false;  // kept is this rank's own partial sum, not yet added
  uint32_t pending = 0;  // slots that are filled and not yet used
  int to_fill = 0;
  int to_use = 0;
  uint32_t parity = 0;
  bool more = true;
  uint32_t uncounted = kNone;  // the item that is finished but not yet counted
  auto add_own = [&]() {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) sum[s].Add(kept[s * kWarpSize]);
    has_own = false;
  };
  while (true) {
    while (more && pending < kRingSlots) {
      Term term;
      const Next next = feed.Take(&term, pending == 0);
      more = next != Next::kEnd;
      if (next != Next::kTerm) break;
      if (crew.lane == 0) {
        ring->slots[to_fill] = term.slot;
        if (term.slot.what & kCopied) {
          StartCopy(ring->data[to_fill], term.from, (term.slot.what >> 8 & 255) * 16, &ring->there[to_fill]);
        }
      }
      to_fill = to_fill + 1 == kRingSlots ? 0 : to_fill + 1;
      ++pending;
    }
    if (pending == 0) break;
    __syncwarp();
    const Slot slot = ring->slots[to_use];
    if (slot.what & kCopied) {
      AwaitCopy(&ring->there[to_use], parity >> to_use & 1);
      parity ^= 1u << to_use;
      // Lanes past the end of a short last piece add what is left in the slot, and write nothing.
      const int4* data = reinterpret_cast<const int4*>(ring->data[to_use]) + crew.lane;
      if (Feed::kPushes || slot.what & kRow) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) sum[s].AddProduct(data[s * kWarpSize], slot.weight);
      } else {
        if (has_own && slot.what & kOwnBefore) add_own();
#pragma unroll
        for (int s = 0; s < kSteps; ++s) sum[s].Add(data[s * kWarpSize]);
      }
    }
    if (!Feed::kPushes && slot.what & kEndsRows) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        kept[s * kWarpSize] = sum[s].Rounded();
        sum[s].Clear();
      }
      has_own = true;
    }
    if (slot.what & kEndsItem) {
      if (!Feed::kPushes && has_own) add_own();
      const int vectors = static_cast<int>(slot.what >> 8 & 255);
      if (Feed::kPushes) {
        // The sum of the item before has had the time of this one to arrive.
        if (uncounted != kNone) CountItem(job, uncounted);
        uncounted = slot.what;
      }
      int4* to = Feed::kPushes ? kept : reinterpret_cast<int4*>(slot.to) + crew.lane;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (Feed::kPushes || s * kWarpSize + crew.lane < vectors) to[s * kWarpSize] = sum[s].Rounded();
        sum[s].Clear();
      }
      if (Feed::kPushes && slot.what & kWrites) {
        CopiesSeeMyStores();
        __syncwarp();
        if (crew.lane == 0) StartCopyOut(slot.to, ring->sum, vectors * 16);
      }
    }
    __syncwarp();  // the slot is free
    to_use = to_use + 1 == kRingSlots ? 0 : to_use + 1;
    --pending;
  }
  if (Feed::kPushes && uncounted != kNone) CountItem(job, uncounted);
}

// Of each block, `pushing_warps` sum and push for the peers, the others sum for this rank's own tokens; but the last,
// which watches the peers.
template <typename T>
__global__ void __launch_bounds__(kCombineThreads, 1)
    Combine(__grid_constant__ const Peers peers, __grid_constant__ const Call call,
            __grid_constant__ const CombineArgs a, int pushing_warps) {
  extern __shared__ __align__(128) char shared[];
  __shared__ Progress progress;
  Clear(&progress);
  const int warp = threadIdx.x / kWarpSize;
  WarpRing* ring = reinterpret_cast<WarpRing*>(shared) + warp;
  if (warp < kCombineWarps && threadIdx.x % kWarpSize == 0) {
    for (int i = 0; i < kRingSlots; ++i) InitBarrier(&ring->there[i]);
    InitDone();
  }
  const int64_t epoch = EpochOf(peers, call, "combine");
  if (blockIdx.x == 0) Begin(peers, call, epoch);
  __syncthreads();
  const int row_bytes = a.hidden * static_cast<int>(sizeof(T));
  const Job job{peers,
                a,
                &progress,
                epoch,
                Chunks(a.tokens),
                row_bytes,
                (row_bytes + kPieceBytes - 1) / kPieceBytes,
                BufferLayout::StrideOf(peers.layout.row_bytes())};
  if (warp == kCombineWarps) {
    AwaitPeers(peers, call, epoch, "combine");
    WatchChunks(peers, call, epoch, job.chunks, peers.rank, &progress, "combine");
  } else if (warp < pushing_warps) {
    Sum<T, RowsForPeers>(job, CrewOf(0, pushing_warps), ring);
  } else {
    Sum<T, TermsOfOwn>(job, CrewOf(pushing_warps, kCombineWarps), ring);
  }
  Finish(peers, call, epoch, false, "combine");
}

constexpr int kSharedBytes = kCombineWarps * static_cast<int>(sizeof(WarpRing));

template <typename T>
cudaError_t Launch(const Peers& peers, const Call& call, const CombineArgs& args, int num_sms, cudaStream_t stream) {
  // Half of them: the sums of this rank's own tokens take as long as those of its peers', which come in meanwhile.
  const int pushing_warps = peers.layout.shape.ranks > 1 ? kCombineWarps / 2 : 0;
  return LaunchTogether(Combine<T>, num_sms, kCombineThreads, kSharedBytes, stream, peers, call, args, pushing_warps);
}

template <typename T>
cudaError_t Load() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, Combine<T>);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(Combine<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
}

}  // namespace

cudaError_t LaunchCombine(const Peers& peers, const Call& call, const CombineArgs& args, int num_sms,
                          cudaStream_t stream) {
  switch (args.element) {
    case Element::kFloat32:
      return Launch<float>(peers, call, args, num_sms, stream);
    case Element::kBFloat16:
      return Launch<__nv_bfloat16>(peers, call, args, num_sms, stream);
    case Element::kFloat16:
      return Launch<__half>(peers, call, args, num_sms, stream);
    case Element::kFloat8:
      break;
  }
  return cudaErrorInvalidValue;
}

cudaError_t LoadCombineKernels() {
  cudaError_t error = Load<float>();
  if (error == cudaSuccess) error = Load<__nv_bfloat16>();
  if (error == cudaSuccess) error = Load<__half>();
  return error;
}

}  // namespace jax_ep
