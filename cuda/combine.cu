#include <algorithm>

#include "cuda/bulk_copy.cuh"
#include "cuda/combine.h"
#include "cuda/exchange.cuh"
#include "cuda/fp8.cuh"

namespace jax_ep {
namespace {

// A token is summed in pieces, one warp a piece. What is to be summed comes through a ring in shared memory, which the
// warp fills ahead by bulk copies: so many bytes are under way whatever a single load takes. No more warps than leave
// each its 128 registers: with fewer, sums go to local memory, for which the rings have left no cache.
constexpr int kCombineThreads = 512;
constexpr int kCombineWarps = kCombineThreads / kWarpSize - 2;  // that sum; the last two tell the peers, and watch them
constexpr int kPieceBytes = 3584;
constexpr int kSteps = kPieceBytes / 16 / kWarpSize;  // vectors of 16 bytes of a lane
constexpr int kRingSlots = 3;

__host__ __device__ constexpr int PiecesOf(int row_bytes) { return (row_bytes + kPieceBytes - 1) / kPieceBytes; }

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
  uint32_t what;  // flags, then from bit 8 the vectors of the piece
  int item;       // of the queue
};

// What warps share out among them.
enum : int { kPushed, kSummed };

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
    float value[kElements];
    ToFloats<T>(bits, value);
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum[i] = __fadd_rn(sum[i], value[i]);
  }
  // A weight of 1 changes no bit.
  __device__ void AddProduct(const int4& bits, float weight) {
    float value[kElements];
    ToFloats<T>(bits, value);
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(value[i], weight));
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
  Finished* finished;
  int64_t epoch;
  Chunks chunks;
  int row_bytes;
  int pieces;
  int64_t stride;  // of partial sums
};

// Says what a slot is for, and starts to fill it if there is something to copy. By one lane, whichever knows. The
// weight comes by a copy, too: a load would hold up the warp, and takes long while so many copies are under way.
__device__ void Fill(const Job& job, WarpRing* ring, int slot, int item, char* to, uint32_t what, const char* from,
                     const float* weight = nullptr) {
  Slot* says = &ring->slots[slot];
  says->to = to;
  says->what = what;
  says->item = item;
  if (from == nullptr) return;
  uint64_t* there = &ring->there[slot];
  if (weight != nullptr) {
    CopyWord(&says->weight, weight, there);
  } else {
    says->weight = 1.0f;
    if (job.a.row_weights != nullptr) Arrive(there);
  }
  StartCopy(ring->data[slot], from, (what >> 8) * 16, there);
}

enum class Next { kTerm, kLater, kEnd };

// The rows that this rank has of one token, one after the other. Each lane knows that of its pick.
struct Rows {
  int row;
  unsigned left;  // not yet taken

  // Returns the lanes whose picks have a row here.
  __device__ unsigned Start(const Job& job, int slot) {
    const Picks picks = PicksFrom(slot, job.a.order);
    row = slot;
    left = picks.rows;
    return picks.picked;
  }
  // The next, to a slot; `last` is what the slot says besides if it is the last.
  __device__ void Take(const Job& job, WarpRing* ring, int slot, int item, int piece, char* to, uint32_t what,
                       uint32_t last) {
    const unsigned lane = left & -left;
    left ^= lane;
    what |= kCopied | kRow | (left == 0 ? kEndsRows | last : 0);
    if (lane >> threadIdx.x % kWarpSize != 1) return;
    const char* from = static_cast<const char*>(job.a.rows) + int64_t{row} * job.row_bytes + piece * kPieceBytes;
    const float* weights = job.a.row_weights;
    Fill(job, ring, slot, item, to, what, from, weights == nullptr ? nullptr : weights + row);
  }
};

__device__ uint32_t VectorsOf(const Job& job, int piece) {
  return min(kPieceBytes, job.row_bytes - piece * kPieceBytes) / 16;
}

// This rank's rows of its peers' tokens, whose sums are pushed; each rank starts at another peer.
class RowsForPeers {
 public:
  static constexpr bool kPushes = true;

  __device__ explicit RowsForPeers(const Job& job)
      : job_(job),
        lane_(threadIdx.x % kWarpSize),
        queue_(&HeaderOf(job.peers, job.peers.rank)->taken[kPushed]),
        peer_(job.peers.rank) {
    NextPeer();
    TakeItem();
  }

  // The next term to a slot of the ring.
  __device__ Next Take(WarpRing* ring, int slot, bool) {
    if (rows_.left == 0 && !Advance()) return Next::kEnd;
    if (rows_.left != 0) {
      rows_.Take(job_, ring, slot, item_, piece_, to_, what_, kEndsItem);
    } else if (lane_ == 0) {
      Fill(job_, ring, slot, item_, to_, what_ | kEndsItem, nullptr);
    }
    return Next::kTerm;
  }

 private:
  __device__ void NextPeer() {
    if (++peer_ == job_.peers.layout.shape.ranks) peer_ = 0;
  }
  // The item that comes next, and the lane's slot in it: loaded long before it is needed.
  __device__ void TakeItem() {
    const CombineArgs& a = job_.a;
    const int each = a.tokens * job_.pieces;
    next_ = queue_.Next() * job_.a.together;
    for (; next_ - before_ >= each && peer_ != job_.peers.rank; NextPeer()) before_ += each;
    next_slot_ = -1;
    if (peer_ == job_.peers.rank || lane_ >= a.top_k) return;
    next_slot_ = a.slots[(int64_t{peer_} * a.tokens + (next_ - before_) / job_.pieces) * a.top_k + lane_];
  }

  __device__ bool Advance() {
    if (++item_ < end_) {  // the next piece of the same token
      ++piece_;
      what_ = VectorsOf(job_, piece_) << 8 | (what_ & kWrites);
      to_ += kPieceBytes;
      rows_.Start(job_, rows_.row);
      return true;
    }
    if (peer_ == job_.peers.rank) return false;
    const CombineArgs& a = job_.a;
    const BufferLayout& layout = job_.peers.layout;
    const int64_t token = (next_ - before_) / job_.pieces;
    const int peer = peer_;
    const int slot = next_slot_;
    piece_ = (next_ - before_) % job_.pieces;
    item_ = next_;
    end_ = next_ + job_.a.together;
    const unsigned picked = rows_.Start(job_, slot);
    TakeItem();
    what_ = VectorsOf(job_, piece_) << 8;
    if (picked == 0) return true;
    what_ |= kWrites;
    char* theirs = job_.peers.base[peer] + layout.receive_at(job_.epoch);
    const int64_t place = token * layout.partials() + PlaceOf(layout, job_.peers.rank, picked);
    to_ = theirs + layout.sums_at() + place * job_.stride + piece_ * kPieceBytes;
    if (piece_ != 0) return true;
    if (lane_ == 0) {
      auto* stamps = reinterpret_cast<volatile int64_t*>(theirs + layout.stamps_at());
      stamps[place] = Stamp(job_.epoch, job_.peers.rank);
    }
    if (a.row_words != nullptr && slot >= 0) {
      auto* words = reinterpret_cast<volatile uint64_t*>(theirs + layout.pick_words_at());
      words[token * a.top_k + lane_] = static_cast<uint64_t>(job_.epoch) << 32 | RowWord(a, slot, lane_);
    }
    return true;
  }

  const Job& job_;
  const int lane_;
  Queue queue_;
  int peer_;            // whose the next item is; this rank past the end
  int before_ = 0;      // items of the peers before
  int next_ = 0;        // the next item
  int next_slot_ = -1;  // of the lane's pick in it
  // Of the present item:
  int item_ = 0;
  int end_ = 0;  // of what was taken at once
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

  __device__ explicit TermsOfOwn(const Job& job)
      : job_(job), lane_(threadIdx.x % kWarpSize), queue_(&HeaderOf(job.peers, job.peers.rank)->taken[kSummed]) {
    TakeItem();
  }

  // The next term to a slot of the ring, or kLater if it would have to wait and shall not.
  __device__ Next Take(WarpRing* ring, int slot, bool wait) {
    if (done_ && !Advance()) return Next::kEnd;
    if (!has_stamps_ && PeersAreReady()) LoadStamp();  // long before it is needed
    if (rows_.left != 0) {
      rows_.Take(job_, ring, slot, 0, piece_, to_, what_, 0);
      return Next::kTerm;
    }
    while (!has_stamps_) {
      if (!wait) return Next::kLater;
      __nanosleep(100);
      if (PeersAreReady()) LoadStamp();
    }
    if (count_ < 0) FindPartials();
    done_ = taken_ + 1 >= count_;
    const uint32_t what = what_ | (done_ ? kEndsItem : 0);
    if (lane_ == taken_) {
      if (count_ == 0) {
        Fill(job_, ring, slot, 0, to_, what, nullptr);
      } else {
        Fill(job_, ring, slot, 0, to_, what | kCopied | (rank_ > job_.peers.rank ? kOwnBefore : 0), from_);
      }
    }
    ++taken_;
    return Next::kTerm;
  }

 private:
  __device__ const char* Receive() const {
    return job_.peers.base[job_.peers.rank] + job_.peers.layout.receive_at(job_.epoch);
  }
  // The item that comes next, and the lane's slot in it: loaded long before it is needed.
  __device__ void TakeItem() {
    const CombineArgs& a = job_.a;
    next_ = queue_.Next() * job_.a.together;
    if (next_ >= a.tokens * job_.pieces) next_ = -1;
    next_slot_ = -1;
    if (next_ < 0 || lane_ >= a.top_k) return;
    next_slot_ = a.slots[(int64_t{job_.peers.rank} * a.tokens + next_ / job_.pieces) * a.top_k + lane_];
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

  __device__ bool Advance() {
    if (++piece_ < end_) {  // the next one of the same token
      to_ += kPieceBytes;
      what_ = VectorsOf(job_, piece_) << 8 | kWrites;
      rows_.Start(job_, rows_.row);
      if (lane_ < count_) from_ += kPieceBytes;
      taken_ = 0;
      done_ = false;
      return true;
    }
    if (next_ < 0) return false;
    token_ = next_ / job_.pieces;
    piece_ = next_ - token_ * job_.pieces;
    end_ = piece_ + job_.a.together;
    rows_.Start(job_, next_slot_);
    TakeItem();
    to_ = static_cast<char*>(job_.a.out) + int64_t{token_} * job_.row_bytes + piece_ * kPieceBytes;
    what_ = VectorsOf(job_, piece_) << 8 | kWrites;
    has_stamps_ = false;
    count_ = -1;
    taken_ = 0;
    done_ = false;
    return true;
  }

  // Of the partial sum at the lane's place.
  __device__ void LoadStamp() {
    const BufferLayout& layout = job_.peers.layout;
    const int partials = static_cast<int>(layout.partials());
    const auto* stamps = reinterpret_cast<const int64_t*>(Receive() + layout.stamps_at());
    stamp_ = lane_ < partials ? LoadPeerWord(stamps + int64_t{token_} * partials + lane_) : 0;
    has_stamps_ = true;
  }

  // The peers' partial sums of the token: lane i knows whose the i-th is, and where.
  __device__ void FindPartials() {
    constexpr int kNone = 256;
    const CombineArgs& a = job_.a;
    const BufferLayout& layout = job_.peers.layout;
    // The rank whose partial sum is at the lane's place. No epoch is 0.
    int from = stamp_ >> 8 == job_.epoch ? static_cast<int>(stamp_ & 255) : kNone;
    count_ = __popc(__ballot_sync(kAllLanes, from != kNone));
    for (int i = 0; i < count_; ++i) {
      const int least = __reduce_min_sync(kAllLanes, from);
      const int place = __ffs(__ballot_sync(kAllLanes, from == least)) - 1;
      if (lane_ == i) {
        rank_ = least;
        from_ = Receive() + layout.sums_at() + (int64_t{token_} * layout.partials() + place) * job_.stride +
                piece_ * kPieceBytes;
      }
      if (lane_ == place) from = kNone;
    }
    if (a.row_words == nullptr || piece_ != 0 || lane_ >= a.top_k) return;
    uint32_t word = 0;
    if (rows_.row >= 0) {
      word = RowWord(a, rows_.row, lane_);
    } else {
      const auto* words = reinterpret_cast<const uint64_t*>(Receive() + layout.pick_words_at());
      const uint64_t stamped = LoadPeerWord(words + int64_t{token_} * a.top_k + lane_);
      if (stamped >> 32 == static_cast<uint32_t>(job_.epoch)) word = static_cast<uint32_t>(stamped);
    }
    a.pick_words[int64_t{token_} * a.top_k + lane_] = word;
  }

  const Job& job_;
  const int lane_;
  Queue queue_;
  int next_ = -1;       // the next item, or -1
  int next_slot_ = -1;  // of the lane's pick in it
  int known_ = -1;      // the last chunk that all peers are known to be through with
  // Of the present item:
  bool done_ = true;
  int token_ = 0;
  int piece_ = 0;
  int end_ = 0;  // of the pieces that were taken at once
  Rows rows_{};
  char* to_ = nullptr;
  uint32_t what_ = 0;
  bool has_stamps_ = false;
  int64_t stamp_ = 0;
  int count_ = 0;  // of the peers' partial sums, -1 while it isn't known
  int taken_ = 0;
  const char* from_ = nullptr;
  int rank_ = 0;
};

// A warp's ring between two feeds: empty, but where it was.
struct Ring {
  WarpRing* ring;
  int at = 0;           // the next slot
  uint32_t parity = 0;  // of each slot's copies
};

// Sums all that a feed has, by one warp.
template <typename T, typename Feed>
__device__ void Sum(const Job& job, Feed feed, Ring* state) {
  WarpRing* ring = state->ring;
  const int lane = threadIdx.x % kWarpSize;
  Vector<T> sum[kSteps];
  int4* kept = reinterpret_cast<int4*>(ring->sum) + lane;
  bool has_own = false;  // kept is this rank's own partial sum, not yet added
  uint32_t pending = 0;  // slots that are filled and not yet used
  int to_fill = state->at;
  int to_use = state->at;
  uint32_t parity = state->parity;
  bool more = true;
  const int warp = threadIdx.x / kWarpSize;
  int before = -1;  // the item before, whose sum is on its way, too
  auto add_own = [&]() {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) sum[s].Add(LoadShared(kept + s * kWarpSize));
    has_own = false;
  };
  while (true) {
    while (more && pending < kRingSlots) {
      const Next next = feed.Take(ring, to_fill, pending == 0);
      more = next != Next::kEnd;
      if (next != Next::kTerm) break;
      to_fill = to_fill + 1 == kRingSlots ? 0 : to_fill + 1;
      ++pending;
    }
    if (pending == 0) break;
    __syncwarp();
    const Slot& slot = ring->slots[to_use];
    const uint32_t what = slot.what;
    if (what & kCopied) {
      AwaitCopy(&ring->there[to_use], parity >> to_use & 1);
      parity ^= 1u << to_use;
      // Lanes past the end of a short last piece add what is left in the slot, and write nothing.
      const int4* data = reinterpret_cast<const int4*>(ring->data[to_use]) + lane;
      if (Feed::kPushes || what & kRow) {
        const float weight = slot.weight;
#pragma unroll
        for (int s = 0; s < kSteps; ++s) sum[s].AddProduct(LoadShared(data + s * kWarpSize), weight);
      } else {
        if (has_own && what & kOwnBefore) add_own();
#pragma unroll
        for (int s = 0; s < kSteps; ++s) sum[s].Add(LoadShared(data + s * kWarpSize));
      }
    }
    if (!Feed::kPushes && what & kEndsRows) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        kept[s * kWarpSize] = sum[s].Rounded();
        sum[s].Clear();
      }
      has_own = true;
    }
    if (what & kEndsItem) {
      if (!Feed::kPushes && has_own) add_own();
      const int vectors = static_cast<int>(what >> 8);
      if (Feed::kPushes) {
        if (lane == 0) AwaitCopiesOutRead<>();  // of the sum before
        __syncwarp();
      }
      int4* to = Feed::kPushes ? kept : reinterpret_cast<int4*>(slot.to) + lane;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (Feed::kPushes || s * kWarpSize + lane < vectors) to[s * kWarpSize] = sum[s].Rounded();
        sum[s].Clear();
      }
      if (Feed::kPushes) {
        CopiesSeeMyStores();
        __syncwarp();
        if (lane == 0) {
          if (what & kWrites) StartCopyOut(slot.to, ring->sum, vectors * 16);
          EndGroup();
          AwaitCopiesOut<2>();  // all but this one and the one before
          job.finished->Set(warp, before >= 0 ? before : slot.item);
        }
        before = slot.item;
      }
    }
    __syncwarp();  // the slot is free
    to_use = to_use + 1 == kRingSlots ? 0 : to_use + 1;
    --pending;
  }
  if (Feed::kPushes && lane == 0) {
    AwaitCopiesOut<0>();
    job.finished->Set(warp, INT_MAX);
  }
  state->at = to_use;
  state->parity = parity;
}

// Of each block, `pushing_warps` sum and push for the peers, and then help the others, which sum for this rank's own
// tokens; but the last two warps tell the peers what has been pushed, and watch them.
template <typename T>
__global__ void __launch_bounds__(kCombineThreads, 1)
    Combine(__grid_constant__ const Peers peers, __grid_constant__ const Call call,
            __grid_constant__ const CombineArgs a, int pushing_warps) {
  extern __shared__ __align__(128) char shared[];
  __shared__ Progress progress;
  __shared__ Finished finished;
  Clear(&progress);
  Clear(&finished);
  const int warp = threadIdx.x / kWarpSize;
  WarpRing* ring = reinterpret_cast<WarpRing*>(shared) + warp;
  if (warp < kCombineWarps && threadIdx.x % kWarpSize == 0) {
    for (int i = 0; i < kRingSlots; ++i) InitBarrier(&ring->there[i], a.row_weights == nullptr ? 1 : 2);
    InitDone();
  }
  const int64_t epoch = EpochOf(peers, call, "combine");
  if (blockIdx.x == 0) Begin(peers, call, epoch);
  __syncthreads();
  const int row_bytes = a.hidden * static_cast<int>(sizeof(T));
  const Job job{peers,
                a,
                &progress,
                &finished,
                epoch,
                Chunks(a.tokens),
                row_bytes,
                PiecesOf(row_bytes),
                BufferLayout::StrideOf(peers.layout.row_bytes())};
  if (warp == kCombineWarps) {
    const int rank = peers.rank;
    const int ranks = peers.layout.shape.ranks;
    AnnounceChunks(&finished, 0, pushing_warps, job.chunks, a.tokens, job.pieces, ranks - 1,
                   [&](int round, int chunk) { Tell(peers, (rank + 1 + round) % ranks, chunk, epoch); });
  } else if (warp > kCombineWarps) {
    AwaitPeers(peers, call, epoch, "combine");
    WatchChunks(peers, call, epoch, job.chunks, peers.rank, &progress, "combine");
  } else {
    Ring state{ring};
    if (warp < pushing_warps) Sum<T>(job, RowsForPeers(job), &state);
    Sum<T>(job, TermsOfOwn(job), &state);
  }
  Finish(peers, call, epoch, false, "combine");
}

constexpr int kSharedBytes = kCombineWarps * static_cast<int>(sizeof(WarpRing));

template <typename T>
cudaError_t Launch(const Peers& peers, const Call& call, const CombineArgs& args, const Grid& grid,
                   cudaStream_t stream) {
  // As many as keep the link busy, and no more than two thirds: the others' sums must keep up with those that come in.
  const int pushing_warps =
      peers.layout.shape.ranks > 1 ? std::clamp((450 + grid.num_sms / 2) / grid.num_sms, 3, kCombineWarps * 2 / 3) : 0;
  return LaunchTogether(Combine<T>, grid, kCombineThreads, kSharedBytes, stream, peers, call, args, pushing_warps);
}

template <typename T>
cudaError_t Load() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, Combine<T>);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(Combine<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
}

}  // namespace

int CombineSms(int device_sms) { return std::max(1, device_sms * 3 / 4); }

int CombinePieces(int64_t row_bytes) { return PiecesOf(static_cast<int>(row_bytes)); }

int CombineTogether(int64_t tokens, int64_t row_bytes, int num_sms) {
  constexpr int kLeastTurns = 8;  // of a warp, so that all end at about the same time
  const int pieces = CombinePieces(row_bytes);
  if (num_sms > kFewSms) return 1;  // memory is busy then, and better so by rows in no order
  const int64_t most = tokens * pieces / (int64_t{kLeastTurns} * kCombineWarps * num_sms);
  int together = static_cast<int>(std::clamp<int64_t>(most, 1, pieces));
  while (pieces % together != 0) --together;
  return together;
}

cudaError_t LaunchCombine(const Peers& peers, const Call& call, const CombineArgs& args, const Grid& grid,
                          cudaStream_t stream) {
  if (args.together < 1 || CombinePieces(int64_t{args.hidden} * BytesOf(args.element)) % args.together != 0) {
    return cudaErrorInvalidValue;
  }
  switch (args.element) {
    case Element::kFloat32:
      return Launch<float>(peers, call, args, grid, stream);
    case Element::kBFloat16:
      return Launch<__nv_bfloat16>(peers, call, args, grid, stream);
    case Element::kFloat16:
      return Launch<__half>(peers, call, args, grid, stream);
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
