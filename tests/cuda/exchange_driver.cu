// Runs the kernels without JAX, so that compute-sanitizer can watch them at an affordable cost: the ranks of a group
// are streams of this one process, on one GPU or on all that are visible, in turn. Every result is compared bit for bit
// with host_reference.h. How to build and run it: CONTRIBUTING.md, "On GPUs".
//
// A case is one group: its symmetric memory, and a row of operations on it, one after the other, of which all are
// enqueued before the host waits for any. What the operations are, their shapes, routing and data are drawn from the
// seed alone, with arithmetic that is the same everywhere.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cuda/buffer_layout.h"
#include "cuda/call.h"
#include "cuda/combine.h"
#include "cuda/dispatch.h"
#include "cuda/element.h"
#include "cuda/group_layout.h"
#include "cuda/launch.cuh"
#include "cuda/layout.h"
#include "cuda/layout_rule.h"
#include "tests/cuda/host_reference.h"

namespace jax_ep {

namespace {

using host::Bytes;

// What this program exits with, besides 0.
constexpr int kWrong = 1;      // a result, or an error of CUDA
constexpr int kCannotRun = 2;  // bad arguments, no GPU, or one that does not run the ranks at once

constexpr int kOneGroup = 1;  // its serial, for messages of the kernels
constexpr int kMaxDriverRanks = 8;

struct Options {
  int cases = 0;  // 0: each group of the table a few times
  uint32_t seed = 0;
  int ranks = 0;  // 0: as the table says
  int timeout_s = 60;
  bool delay = false;
  bool quick = false;
  bool uninitialised = false;
  bool spoil = false;
};

constexpr char kUsage[] =
    "exchange_driver [options]\n"
    "  --cases N         how many groups to make (default: each of the table three times, of the quick ones twice)\n"
    "  --seed S          other draws\n"
    "  --ranks R         R ranks in every group, 1 to 8, and not the 1 to 4 of the table\n"
    "  --delay           before some operations, hold up one rank\n"
    "  --quick           few and small groups, short rows of operations: for racecheck, initcheck and synccheck\n"
    "  --uninitialised   leave the tokens and sums in symmetric memory as they come (for initcheck), not NaN\n"
    "  --timeout S       seconds that a kernel waits for a peer (default 60)\n"
    "  --spoil           change a bit of what the kernels returned: this program must then exit with 1\n";

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("\nCUDA error: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(kWrong);
}

// --- Draws

// The same numbers on every machine: the standard defines mt19937 to the bit, but not its distributions.
class Draw {
 public:
  explicit Draw(uint32_t seed) : engine_(seed) {}

  uint32_t Word() { return static_cast<uint32_t>(engine_()); }
  int Below(int n) { return static_cast<int>(Word() % static_cast<uint32_t>(n)); }
  int Between(int low, int high) { return low + Below(high - low + 1); }
  bool Chance(int percent) { return Below(100) < percent; }

  // A random sign, mantissa and exponent; one in twenty is a zero.
  float Value(int low_exponent, int high_exponent) {
    const float sign = Chance(50) ? -1.0f : 1.0f;
    if (Chance(5)) return sign * 0.0f;
    const float mantissa = 1.0f + std::ldexp(static_cast<float>(Below(1 << 23)), -23);
    return sign * std::ldexp(mantissa, Between(low_exponent, high_exponent));
  }

 private:
  std::mt19937 engine_;
};

// Deals cards at random, each once before any comes again: so that a short run has every kind of operation in it.
template <typename Card>
class Deck {
 public:
  explicit Deck(std::vector<Card> cards) : all_(std::move(cards)) {}

  // One that fits; some card of the deck must.
  template <typename Fits>
  Card Deal(Draw* draw, Fits fits) {
    std::vector<size_t> fitting;
    for (size_t i = 0; i < left_.size(); ++i) {
      if (fits(left_[i])) fitting.push_back(i);
    }
    if (fitting.empty()) {
      left_ = all_;
      return Deal(draw, fits);
    }
    const size_t at = fitting[draw->Below(static_cast<int>(fitting.size()))];
    const Card card = left_[at];
    left_.erase(left_.begin() + at);
    return card;
  }

 private:
  std::vector<Card> all_;
  std::vector<Card> left_;
};

// --- Groups

// What a group is made for; everything else is drawn for each operation.
struct GroupSizes {
  int ranks;
  int max_tokens;
  int top_k;
  int local_experts;
  int hidden;
  int element_bytes;  // of the widest token
};

// clang-format off
constexpr GroupSizes kGroups[] = {
    // ranks, tokens, top-k, local experts, hidden, bytes
    {1, 1, 1, 1, 8, 2},
    {1, 17, 8, 16, 144, 4},
    {1, 30, 8, 65, 16, 4},  // more experts than a warp has lanes
    {2, 1, 1, 1, 16, 2},
    {2, 24, 2, 4, 8, 2},
    {2, 40, 8, 8, 304, 4},
    {2, 9, 9, 3, 272, 2},
    {2, 50, 8, 40, 32, 2},
    {2, 300, 2, 8, 48, 2},  // tokens enough for several to be told ready together
    {2, 6, 8, 4, 7168, 2},  // tokens that move in several pieces
    {3, 13, 2, 2, 128, 2},
    {3, 30, 9, 5, 64, 4},
    {3, 7, 8, 1, 296, 2},  // no FP8: no multiple of 16
    {3, 20, 8, 4, 1040, 4},
    {4, 5, 1, 2, 4, 4},
    {4, 33, 2, 1, 200, 4},
    {4, 64, 8, 16, 256, 2},
    {4, 100, 9, 32, 16, 2},
    {4, 150, 8, 8, 80, 4},
    {4, 3, 2, 2, 7168, 4},
};

constexpr GroupSizes kQuickGroups[] = {
    {2, 9, 2, 4, 144, 4},
    {4, 5, 8, 2, 32, 4},
    {3, 70, 9, 3, 16, 2},
    {1, 6, 2, 3, 272, 4},
    {2, 3, 8, 4, 1040, 4},
};
// clang-format on

constexpr int kOperations = 10;
constexpr int kQuickOperations = 8;

// Memory of one rank on its GPU, of just this size: so memcheck sees the first byte that is beside it.
class DeviceBytes {
 public:
  DeviceBytes() = default;
  DeviceBytes(int device, int64_t bytes) : device_(device), bytes_(bytes) {
    if (bytes == 0) return;
    Check(cudaSetDevice(device), "cudaSetDevice");
    Check(cudaMalloc(&data_, bytes), "cudaMalloc");
  }
  DeviceBytes(DeviceBytes&& other) noexcept { *this = std::move(other); }
  DeviceBytes& operator=(DeviceBytes&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(bytes_, other.bytes_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~DeviceBytes() {
    if (data_ != nullptr) Check(cudaFree(data_), "cudaFree");
  }

  template <typename T = void>
  T* data() const {
    return static_cast<T*>(data_);
  }

  void Fill(int byte, int64_t begin, int64_t end) {
    if (begin >= end) return;
    Check(cudaSetDevice(device_), "cudaSetDevice");
    Check(cudaMemset(static_cast<char*>(data_) + begin, byte, end - begin), "cudaMemset");
  }

  int64_t bytes() const { return bytes_; }

  Bytes Download() const {
    Bytes bytes(bytes_);
    if (bytes_ != 0) Check(cudaMemcpy(bytes.data(), data_, bytes_, cudaMemcpyDeviceToHost), "results");
    return bytes;
  }

 private:
  int device_ = 0;
  int64_t bytes_ = 0;
  void* data_ = nullptr;
};

template <typename T>
Bytes AsBytes(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

DeviceBytes Upload(int device, const Bytes& bytes) {
  DeviceBytes memory(device, static_cast<int64_t>(bytes.size()));
  if (!bytes.empty()) Check(cudaMemcpy(memory.data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "operands");
  return memory;
}

template <typename T>
DeviceBytes Upload(int device, const std::vector<T>& values) {
  return Upload(device, AsBytes(values));
}

// Memory for a result. Filled, so that what an earlier operation left there can't pass for this one's.
DeviceBytes ForResult(int device, int64_t bytes) {
  DeviceBytes memory(device, bytes);
  memory.Fill(0xff, 0, bytes);
  return memory;
}

// The ranks of a group, each with a stream, and their symmetric memory.
class Group {
 public:
  Group(const GroupSizes& sizes, int devices, bool uninitialised) : sizes(sizes) {
    Peers peers{};
    peers.layout.shape = {sizes.ranks, sizes.max_tokens, sizes.top_k, sizes.hidden, sizes.element_bytes};
    const int64_t bytes = peers.layout.total_bytes();
    for (int rank = 0; rank < sizes.ranks; ++rank) {
      device.push_back(rank % devices);
      Check(cudaSetDevice(device[rank]), "cudaSetDevice");
      stream.emplace_back();
      Check(cudaStreamCreateWithFlags(&stream[rank], cudaStreamNonBlocking), "cudaStreamCreate");
      memory_.emplace_back(device[rank], bytes);
      Prepare(peers.layout, uninitialised, &memory_[rank]);
      peers.base[rank] = memory_[rank].data<char>();
    }
    for (int rank = 0; rank < sizes.ranks; ++rank) {
      open_.push_back(Upload(device[rank], std::vector<int64_t>{1}));
      peers.open = open_[rank].data<int64_t>();
      peers.rank = rank;
      of_rank.push_back(peers);
    }
  }
  ~Group() {
    for (cudaStream_t s : stream) Check(cudaStreamDestroy(s), "cudaStreamDestroy");
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Whether the kernels take tokens of this element.
  bool Takes(Element element) const {
    return BytesOf(element) <= sizes.element_bytes && sizes.hidden * BytesOf(element) % 16 == 0;
  }

  const GroupSizes sizes;
  std::vector<int> device;
  std::vector<cudaStream_t> stream;
  std::vector<Peers> of_rank;

 private:
  // The header is cleared. All else is NaN, for whoever reads what no operation wrote; or left as it comes, so that
  // initcheck sees it read, but for the stamps: those are there to be read before they are written, and cleared.
  static void Prepare(const BufferLayout& layout, bool uninitialised, DeviceBytes* memory) {
    memory->Fill(0, 0, layout.header_bytes());
    if (!uninitialised) memory->Fill(0xff, layout.header_bytes(), layout.total_bytes());
    for (int epoch = 0; uninitialised && epoch < 2; ++epoch) {
      const int64_t receive = layout.receive_at(epoch);
      memory->Fill(0, receive + layout.stamps_at(), receive + layout.receive_bytes());
    }
  }

  std::vector<DeviceBytes> memory_;
  std::vector<DeviceBytes> open_;
};

void WaitForAll(int devices) {
  for (int device = 0; device < devices; ++device) {
    Check(cudaSetDevice(device), "cudaSetDevice");
    Check(cudaDeviceSynchronize(), "the kernels");
  }
}

// --- Results

// Counts comparisons, and tells of the first that fail.
class Report {
 public:
  explicit Report(bool spoil) : spoil_(spoil) {}

  // Where the results are from that come next.
  void At(const std::string& where, int rank) { where_ = where + ", rank " + std::to_string(rank); }

  // To the bit.
  void Bits(const char* name, const Bytes& expected, const DeviceBytes& memory, int width) {
    Compare(name, expected, memory, width, [](uint32_t a, uint32_t b) { return a == b; });
  }

  // To the bit, but a NaN is a NaN.
  void Numbers(const char* name, const Bytes& expected, const DeviceBytes& memory, Element element) {
    Compare(name, expected, memory, BytesOf(element),
            [element](uint32_t a, uint32_t b) { return host::SameNumber(element, a, b); });
  }

  int64_t checks() const { return checks_; }
  int64_t wrong() const { return wrong_; }

 private:
  template <typename Same>
  void Compare(const char* name, const Bytes& expected, const DeviceBytes& memory, int width, Same same) {
    constexpr int kMessages = 20;
    Bytes got = memory.Download();
    if (expected.empty() && got.empty()) return;  // a result that was not asked for
    ++checks_;
    if (spoil_ && !got.empty()) got[checks_ % got.size()] ^= 1;
    if (got.size() != expected.size()) {
      std::printf("\nfault of this driver: %s: %s has other sizes\n", where_.c_str(), name);
      std::exit(kCannotRun);
    }
    int64_t differ = 0;
    int64_t first = 0;
    const auto count = static_cast<int64_t>(expected.size()) / width;
    for (int64_t i = count - 1; i >= 0; --i) {
      if (same(host::Load(expected.data(), i, width), host::Load(got.data(), i, width))) continue;
      ++differ;
      first = i;
    }
    if (differ == 0) return;
    if (++wrong_ > kMessages) return;
    std::printf("\nwrong: %s: %s[%lld] of %lld: expected 0x%0*x, got 0x%0*x; %lld differ", where_.c_str(), name,
                static_cast<long long>(first), static_cast<long long>(count), 2 * width,
                host::Load(expected.data(), first, width), 2 * width, host::Load(got.data(), first, width),
                static_cast<long long>(differ));
  }

  bool spoil_;
  std::string where_;
  int64_t checks_ = 0;
  int64_t wrong_ = 0;
};

// --- Operations

// One operation of all ranks. Its operands are on the GPU, and its results filled, once it is made.
class Operation {
 public:
  virtual ~Operation() = default;
  // Launches of a rank. All ranks make the first of them before any makes the second: a launch may wait for what is
  // under way, and what is under way may wait for a peer's first launch.
  virtual int launches() const { return 1; }
  virtual cudaError_t Launch(int which, int rank, const Call& call) = 0;
  // Compares the results of all ranks, once they are there.
  virtual void Verify(Report* report) const = 0;

  std::string name;  // for messages: what it is, with its shapes
};

const char* NameOf(Element element) {
  constexpr const char* kNames[] = {"float32", "bfloat16", "float16", "float8"};
  return kNames[static_cast<int>(element)];
}

// What operations there are to draw from.
struct LayoutKind {
  RowOrder order;
  int alignment;
};
struct DispatchKind {
  Element from, wire, to;
  ScaleFormat scale_format;
  bool gradient = false;  // of a weighted combine
};
struct CombineKind {
  Element element;
  bool weighted, words;
};

struct Decks {
  Deck<LayoutKind> layouts;
  Deck<DispatchKind> dispatches;
  Deck<CombineKind> combines;
};

Decks MakeDecks() {
  constexpr Element kWide[] = {Element::kFloat32, Element::kBFloat16, Element::kFloat16};
  constexpr Element kFp8 = Element::kFloat8;
  const std::vector<LayoutKind> layouts = {
      {RowOrder::kExpert, 1}, {RowOrder::kExpert, 8}, {RowOrder::kRank, 1}, {RowOrder::kRank, 1}};
  std::vector<DispatchKind> dispatches = {{kFp8, kFp8, kFp8, ScaleFormat::kFloat32}};  // comes quantised and stays so
  std::vector<CombineKind> combines;
  for (const Element wide : kWide) {
    dispatches.push_back({wide, wide, wide, ScaleFormat::kFloat32});
    dispatches.push_back({wide, wide, wide, ScaleFormat::kFloat32, true});
    dispatches.push_back({kFp8, kFp8, wide, ScaleFormat::kFloat32});
    for (const ScaleFormat format : {ScaleFormat::kFloat32, ScaleFormat::kUe8m0}) {
      dispatches.push_back({wide, kFp8, kFp8, format});
      dispatches.push_back({wide, kFp8, wide, format});
    }
    for (const bool weighted : {false, true}) {
      for (const bool words : {false, true}) combines.push_back({wide, weighted, words});
    }
  }
  return {Deck<LayoutKind>(layouts), Deck<DispatchKind>(dispatches), Deck<CombineKind>(combines)};
}

std::vector<int32_t> DrawIndex(const LayoutShape& shape, Draw* draw) {
  const int experts = shape.ranks * shape.local_experts;
  enum Kind { kUniform, kDistinct, kSkewed, kOneExpert, kOneRank, kKinds };
  const int kind = draw->Below(kKinds);
  const int favourite = draw->Below(experts);
  const int first_of_rank = favourite / shape.local_experts * shape.local_experts;
  const int none = draw->Chance(40) ? draw->Between(5, 60) : 0;
  const int twice = draw->Chance(40) ? draw->Between(5, 60) : 0;
  const bool unequal = draw->Chance(50);
  std::vector<int32_t> index;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    // Tokens after these ask for no expert: that is how ranks have unequal numbers of tokens, or none at all.
    int live = shape.tokens;
    if (unequal) live = draw->Chance(30) ? 0 : draw->Below(shape.tokens + 1);
    for (int token = 0; token < shape.tokens; ++token) {
      const int start = draw->Below(experts);
      const bool repeats = draw->Chance(twice);
      for (int k = 0; k < shape.top_k; ++k) {
        int expert = draw->Below(experts);
        if (kind == kDistinct) expert = (start + k) % experts;
        if (kind == kSkewed && draw->Chance(70)) expert = favourite;
        if (kind == kOneExpert) expert = favourite;
        if (kind == kOneRank) expert = first_of_rank + expert % shape.local_experts;
        if (repeats && k > 0) expert = index.back();
        if (token >= live || draw->Chance(none)) expert = -1;
        index.push_back(expert);
      }
    }
  }
  return index;
}

int DrawCapacity(RowOrder order, const LayoutShape& shape, Draw* draw) {
  const auto all = static_cast<int>(shape.picks());
  const auto pairs = static_cast<int>(shape.pairs());
  // Enough for all: nothing is dropped.
  int rows = order == RowOrder::kRank ? pairs : all + shape.local_experts * (shape.alignment - 1);
  if (draw->Chance(50)) rows = draw->Between(1, std::max(1, rows / shape.ranks));
  if (draw->Chance(4)) rows = 0;
  return (rows + shape.alignment - 1) / shape.alignment * shape.alignment;
}

class LayoutOperation : public Operation {
 public:
  LayoutOperation(const Group& group, Decks* decks, Draw* draw) : group_(group) {
    const GroupSizes& sizes = group.sizes;
    LayoutShape& shape = routing.shape;
    const LayoutKind kind = decks->layouts.Deal(draw, [](const LayoutKind&) { return true; });
    routing.order = kind.order;
    shape.ranks = sizes.ranks;
    shape.tokens = draw->Chance(50) ? sizes.max_tokens : draw->Between(1, sizes.max_tokens);
    shape.top_k = draw->Chance(70) ? sizes.top_k : draw->Between(1, sizes.top_k);
    shape.local_experts = sizes.local_experts;
    shape.alignment = kind.alignment;
    shape.capacity = DrawCapacity(routing.order, shape, draw);
    routing.index = DrawIndex(shape, draw);
    name = "layout in " + Describe();

    words_ = int64_t{shape.tokens} * shape.top_k;
    for (int rank = 0; rank < sizes.ranks; ++rank) {
      expected.push_back(host::LayoutOf(routing, rank));
      const int device = group.device[rank];
      const auto own = routing.index.begin() + rank * words_;
      Results& r = results_.emplace_back();
      std::vector<int32_t> given(own, own + words_);
      constexpr int32_t kLowest = std::numeric_limits<int32_t>::min();
      const int32_t none[] = {-1, -2, kLowest, shape.ranks * shape.local_experts, std::numeric_limits<int32_t>::max()};
      for (int32_t& expert : given) expert = expert >= 0 ? expert : none[draw->Below(5)];  // all the same to it
      r.index = Upload(device, given);
      r.of_group = Placed(device, shape);
      r.all_indices = Upload(device, routing.index);
      r.first_expert = Upload(device, std::vector<int32_t>{rank * shape.local_experts});
      r.alone = Placed(device, shape);
    }
  }

  std::string Describe() const {
    const LayoutShape& shape = routing.shape;
    return std::string(routing.order == RowOrder::kRank ? "rank" : "expert") + " order, " +
           std::to_string(shape.tokens) + " tokens, top-" + std::to_string(shape.top_k) + ", capacity " +
           std::to_string(shape.capacity) + ", alignment " + std::to_string(shape.alignment);
  }

  int launches() const override { return 2; }

  // As a group does it, and then as a rank does that has all indices.
  cudaError_t Launch(int which, int rank, const Call& call) override {
    const Results& r = results_[rank];
    const Placed& to = which == 0 ? r.of_group : r.alone;
    auto* slots = to.slots.data<int32_t>();
    auto* group_sizes = to.group_sizes.data<int32_t>();
    auto* counts = to.counts.data<int32_t>();
    auto* num_dropped = to.num_dropped.data<int32_t>();
    auto* scratch = to.scratch.data<int32_t>();
    if (which == 0) {
      const GroupLayoutArgs args{routing.order, routing.shape, r.index.data<int32_t>(), slots, group_sizes, counts,
                                 num_dropped,   scratch};
      return LaunchGroupLayout(group_.of_rank[rank], call, args, group_.stream[rank]);
    }
    return LaunchLayout(routing.order, routing.shape, r.all_indices.data<int32_t>(), r.first_expert.data<int32_t>(),
                        slots, group_sizes, counts, num_dropped, scratch, group_.stream[rank]);
  }

  void Verify(Report* report) const override {
    for (int rank = 0; rank < group_.sizes.ranks; ++rank) {
      const host::Layout& e = expected[rank];
      for (const Placed* got : {&results_[rank].of_group, &results_[rank].alone}) {
        report->At(name + (got == &results_[rank].alone ? ", alone" : ""), rank);
        report->Bits("slots", AsBytes(e.slots), got->slots, 4);
        report->Bits("group_sizes", AsBytes(e.group_sizes), got->group_sizes, 4);
        report->Bits("counts", AsBytes(e.counts), got->counts, 4);
        report->Bits("num_dropped", AsBytes(std::vector<int32_t>{e.num_dropped}), got->num_dropped, 4);
      }
    }
  }

  // What dispatch and combine take from it.
  const int32_t* slots(int rank) const { return results_[rank].of_group.slots.data<int32_t>(); }
  const int32_t* group_sizes(int rank) const { return results_[rank].of_group.group_sizes.data<int32_t>(); }
  const int32_t* counts(int rank) const { return results_[rank].of_group.counts.data<int32_t>(); }

  host::Routing routing;
  std::vector<host::Layout> expected;  // of each rank

 private:
  struct Placed {
    Placed() = default;
    Placed(int device, const LayoutShape& shape)
        : slots(ForResult(device, shape.picks() * 4)),
          group_sizes(ForResult(device, shape.local_experts * 4)),
          counts(ForResult(device, shape.local_experts * 4)),
          num_dropped(ForResult(device, 4)),
          scratch(device, LayoutScratchWords(shape.local_experts) * 4) {}
    DeviceBytes slots, group_sizes, counts, num_dropped, scratch;
  };
  struct Results {
    DeviceBytes index, all_indices, first_expert;
    Placed of_group, alone;
  };

  const Group& group_;
  int64_t words_;  // of a rank's own index
  std::vector<Results> results_;
};

// As whatever comes after an operation in its stream may do with the memory of its operands.
__global__ void Overwrite(int32_t* words, int64_t count) {
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) words[i] = -1;
}

constexpr uint32_t kNanWord = 0x7fc00000u;

class DispatchOperation : public Operation {
 public:
  DispatchOperation(const Group& group, const LayoutOperation& layout, Decks* decks, Draw* draw)
      : group_(group), layout_(layout) {
    tokens_.hidden = group.sizes.hidden;
    const bool by_rank = layout.routing.order == RowOrder::kRank;
    const DispatchKind kind = decks->dispatches.Deal(draw, [&](const DispatchKind& k) {
      return group.Takes(k.from) && group.Takes(k.wire) && group.Takes(k.to) && !(by_rank && k.gradient);
    });
    gradient_ = kind.gradient;
    tokens_.from = kind.from;
    tokens_.wire = kind.wire;
    tokens_.to = kind.to;
    tokens_.scale_format = kind.scale_format;
    num_sms_ = draw->Between(1, 5);
    for (int rank = 0; rank < group.sizes.ranks; ++rank) DrawTokens(rank, draw);
    if (draw->Chance(70) && !gradient_) {
      for (int rank = 0; rank < group.sizes.ranks; ++rank) DrawWeights(rank, draw);
    }
    for (int rank = 0; gradient_ && rank < group.sizes.ranks; ++rank) DrawCombined(rank, draw);
    const bool quantises = tokens_.wire != tokens_.from;
    name = std::string("dispatch of ") + NameOf(tokens_.from) + " as " + NameOf(tokens_.wire) + " to " +
           NameOf(tokens_.to) + (quantises && tokens_.scale_format == ScaleFormat::kUe8m0 ? " (ue8m0)" : "") +
           (tokens_.weights.empty() ? "" : " with weights") + (gradient_ ? ", gradient" : "") + ", " +
           layout.Describe() + ", " + std::to_string(num_sms_) + " SMs";

    const LayoutShape& shape = layout.routing.shape;
    const int64_t weights_of_row = layout.routing.order == RowOrder::kRank ? shape.top_k : 1;
    for (int rank = 0; rank < group.sizes.ranks; ++rank) {
      const int device = group.device[rank];
      Arrays& a = arrays_.emplace_back();
      a.x = Upload(device, tokens_.x[rank]);
      a.rows = ForResult(device, int64_t{shape.capacity} * tokens_.hidden * BytesOf(tokens_.to));
      if (tokens_.from == Element::kFloat8) a.scales = Upload(device, tokens_.scales[rank]);
      if (tokens_.to == Element::kFloat8) {
        a.row_scales = ForResult(device, int64_t{shape.capacity} * host::ScaleBlocks(tokens_.hidden) * 4);
      }
      if (gradient_) {
        a.y = Upload(device, y_[rank]);
        a.y_weights = Upload(device, y_weights_[rank]);
        a.dots = ForResult(device, int64_t{shape.capacity} * PiecesOfRow() * 4);
      }
      if (tokens_.weights.empty()) continue;
      a.weights = Upload(device, tokens_.weights[rank]);
      a.row_weights = ForResult(device, shape.capacity * weights_of_row * 4);
    }
  }

  cudaError_t Launch(int, int rank, const Call& call) override {
    const LayoutShape& shape = layout_.routing.shape;
    const Arrays& arrays = arrays_[rank];
    DispatchArgs args{};
    args.order = layout_.routing.order;
    args.tokens = shape.tokens;
    args.top_k = shape.top_k;
    args.local_experts = shape.local_experts;
    args.capacity = shape.capacity;
    args.hidden = tokens_.hidden;
    args.from = tokens_.from;
    args.wire = tokens_.wire;
    args.to = tokens_.to;
    args.scale_format = tokens_.scale_format;
    args.x = arrays.x.data();
    args.scales = arrays.scales.data<float>();
    args.weights = arrays.weights.data<uint32_t>();
    args.slots = layout_.slots(rank);
    args.group_sizes = layout_.group_sizes(rank);
    args.counts = layout_.counts(rank);
    args.rows = arrays.rows.data();
    args.row_scales = arrays.row_scales.data<float>();
    args.row_weights = arrays.row_weights.data<uint32_t>();
    args.y = arrays.y.data();
    args.y_weights = arrays.y_weights.data<float>();
    args.dots = arrays.dots.data<float>();
    args.lends = (call.tag + rank) % 2 == 0;  // each rank for itself: peers find it either way
    const cudaError_t error = LaunchDispatch(group_.of_rank[rank], call, args,
                                             {num_sms_, num_sms_ % 4 == 0, num_sms_ % 2 == 0}, group_.stream[rank]);
    if (error != cudaSuccess) return error;
    // Peers may have been lent these: a dispatch does not end before they have read them.
    const DeviceBytes& x = arrays.x;
    return LaunchKernel(Overwrite, 1, 32, 0, group_.stream[rank], x.data<int32_t>(), x.bytes() / 4);
  }

  void Verify(Report* report) const override {
    // What only moves keeps the bits of its NaNs, too.
    const bool moves = tokens_.from == tokens_.wire && tokens_.wire == tokens_.to;
    for (int rank = 0; rank < group_.sizes.ranks; ++rank) {
      const host::Rows e = host::Dispatch(layout_.routing, layout_.expected[rank], tokens_);
      const Arrays& a = arrays_[rank];
      report->At(name, rank);
      if (gradient_) {
        VerifyGradient(rank, e.x, report);
        continue;
      }
      if (moves) {
        report->Bits("rows", e.x, a.rows, BytesOf(tokens_.to));
        report->Bits("row_scales", AsBytes(e.scales), a.row_scales, 4);
      } else {
        report->Numbers("rows", e.x, a.rows, tokens_.to);
        report->Numbers("row_scales", AsBytes(e.scales), a.row_scales, Element::kFloat32);
      }
      report->Bits("row_weights", AsBytes(e.weights), a.row_weights, 4);
    }
  }

 private:
  struct Arrays {
    DeviceBytes x, scales, weights, rows, row_scales, row_weights, y, y_weights, dots;
  };

  int PiecesOfRow() const { return DispatchPieces(int64_t{tokens_.hidden} * BytesOf(tokens_.from)); }

  // Rows of which only those with a token may be read.
  void DrawCombined(int rank, Draw* draw) {
    const int32_t capacity = layout_.routing.shape.capacity;
    const std::vector<bool> real = host::RowsWithToken(layout_.expected[rank], capacity);
    const int width = BytesOf(tokens_.from);
    Bytes y(int64_t{capacity} * tokens_.hidden * width);
    std::vector<float> weights;
    for (int row = 0; row < capacity; ++row) {
      for (int i = 0; i < tokens_.hidden; ++i) {
        const float value = real[row] ? draw->Value(-8, 8) : host::FloatOf(kNanWord);
        host::Store(y.data(), int64_t{row} * tokens_.hidden + i, width, host::Encode(tokens_.from, value));
      }
      weights.push_back(real[row] ? draw->Value(-6, 6) : host::FloatOf(kNanWord));
    }
    y_.push_back(std::move(y));
    y_weights_.push_back(std::move(weights));
  }

  // Products to the bit; sums of products, whose order is open, to float32 of some rounding.
  void VerifyGradient(int rank, const Bytes& rows, Report* report) const {
    const int32_t capacity = layout_.routing.shape.capacity;
    const std::vector<bool> real = host::RowsWithToken(layout_.expected[rank], capacity);
    const int hidden = tokens_.hidden;
    const int width = BytesOf(tokens_.from);
    const Bytes downloaded = arrays_[rank].dots.Download();
    Bytes products(rows.size(), 0);
    Bytes dots(downloaded.size(), 0);
    for (int row = 0; row < capacity; ++row) {
      if (!real[row]) continue;
      double sum = 0;
      double magnitude = 0;
      for (int i = 0; i < hidden; ++i) {
        const int64_t at = int64_t{row} * hidden + i;
        const float x = host::Decode(tokens_.from, host::Load(rows.data(), at, width));
        const float y = host::Decode(tokens_.from, host::Load(y_[rank].data(), at, width));
        host::Store(products.data(), at, width, host::Encode(tokens_.from, x * y_weights_[rank][row]));
        sum += double{x} * y;
        magnitude += std::abs(double{x} * y);
      }
      double got = 0;
      const int pieces = PiecesOfRow();
      for (int piece = 0; piece < pieces; ++piece) {
        got += host::FloatOf(host::Load(downloaded.data(), int64_t{row} * pieces + piece, 4));
      }
      const bool right = std::isfinite(sum) && magnitude < 1e38 ? std::abs(got - sum) <= 1e-5 * magnitude + 1e-37
                                                                : !(std::abs(got) < 1e37);
      // What is right is expected as it came.
      for (int piece = 0; piece < pieces; ++piece) {
        const int64_t at = int64_t{row} * pieces + piece;
        const uint32_t bits = right ? host::Load(downloaded.data(), at, 4) : host::BitsOf(static_cast<float>(sum));
        host::Store(dots.data(), at, 4, bits);
      }
    }
    report->Numbers("rows", products, arrays_[rank].rows, tokens_.to);
    report->Numbers("dots", dots, arrays_[rank].dots, Element::kFloat32);
  }

  bool HasPick(int rank, int token) const {
    const host::Routing& routing = layout_.routing;
    for (int k = 0; k < routing.shape.top_k; ++k) {
      if (routing.index[routing.pick(rank, token, k)] >= 0) return true;
    }
    return false;
  }

  void DrawTokens(int rank, Draw* draw) {
    const int tokens = layout_.routing.shape.tokens;
    const int hidden = tokens_.hidden;
    const int blocks = host::ScaleBlocks(hidden);
    const Element from = tokens_.from;
    const int width = BytesOf(from);
    const bool quantised = from == Element::kFloat8;
    Bytes x(int64_t{tokens} * hidden * width);
    std::vector<float> scales(quantised ? int64_t{tokens} * blocks : 0);
    for (int token = 0; token < tokens; ++token) {
      // Nothing may read a token without a pick.
      const bool nan = !HasPick(rank, token);
      for (int block = 0; block < blocks; ++block) {
        // Blocks of very different sizes, some all zero: scales must follow.
        const int largest = from == Element::kFloat16 ? 14 : 100;
        const int exponent = draw->Chance(80) ? 0 : draw->Between(from == Element::kFloat16 ? -20 : -120, largest - 8);
        const bool zero = draw->Chance(5);
        if (quantised) scales[int64_t{token} * blocks + block] = nan ? host::FloatOf(kNanWord) : draw->Value(-8, 8);
        for (int i = block * kScaleBlock; i < std::min(hidden, (block + 1) * kScaleBlock); ++i) {
          uint32_t bits;
          if (quantised) {
            bits = nan ? 0x7f : draw->Word() & 0xff;
          } else {
            const float value = draw->Value(exponent - 8, exponent + 8);
            bits = host::Encode(from, nan ? host::FloatOf(kNanWord) : zero ? 0.0f : value);
          }
          host::Store(x.data(), int64_t{token} * hidden + i, width, bits);
        }
      }
    }
    // A NaN or an infinity stays in its token, and in its block of scales.
    if (draw->Chance(30)) {
      const int64_t at = draw->Below(tokens * hidden);
      const float value = draw->Chance(50) ? host::FloatOf(kNanWord) : -std::numeric_limits<float>::infinity();
      host::Store(x.data(), at, width, quantised ? 0xff : host::Encode(from, value));
    }
    tokens_.x.push_back(std::move(x));
    if (quantised) tokens_.scales.push_back(std::move(scales));
  }

  void DrawWeights(int rank, Draw* draw) {
    const host::Routing& routing = layout_.routing;
    std::vector<uint32_t> weights;
    for (int token = 0; token < routing.shape.tokens; ++token) {
      for (int k = 0; k < routing.shape.top_k; ++k) {
        const uint32_t word = draw->Word();  // any bits: weights only move
        weights.push_back(routing.index[routing.pick(rank, token, k)] >= 0 ? word : kNanWord);
      }
    }
    tokens_.weights.push_back(std::move(weights));
  }

  const Group& group_;
  const LayoutOperation& layout_;
  bool gradient_ = false;
  std::vector<Bytes> y_;  // of each rank
  std::vector<std::vector<float>> y_weights_;
  host::Tokens tokens_;
  int num_sms_;
  std::vector<Arrays> arrays_;  // of each rank
};

class CombineOperation : public Operation {
 public:
  CombineOperation(const Group& group, const LayoutOperation& layout, Decks* decks, Draw* draw)
      : group_(group), layout_(layout) {
    const LayoutShape& shape = layout.routing.shape;
    const bool by_rank = layout.routing.order == RowOrder::kRank;
    held_.hidden = group.sizes.hidden;
    // Rank order has its rows weighted already.
    const CombineKind kind = decks->combines.Deal(
        draw, [&](const CombineKind& k) { return group.Takes(k.element) && !(by_rank && k.weighted); });
    held_.element = kind.element;
    num_sms_ = draw->Between(1, 5);
    // Now and then so wide that float16 has subnormals and infinities.
    const int reach = draw->Chance(30) ? 14 : 6;
    for (int rank = 0; rank < group.sizes.ranks; ++rank) {
      DrawRows(layout.expected[rank], reach, kind.weighted, kind.words ? (by_rank ? shape.top_k : 1) : 0, draw);
    }
    name = std::string(kind.weighted ? "weighted " : "") + "combine of " + NameOf(held_.element) +
           (kind.words ? " with words" : "") + ", " + layout.Describe() + ", " + std::to_string(num_sms_) + " SMs";

    for (int rank = 0; rank < group.sizes.ranks; ++rank) {
      const int device = group.device[rank];
      Arrays& a = arrays_.emplace_back();
      a.rows = Upload(device, held_.y[rank]);
      a.out = ForResult(device, int64_t{shape.tokens} * held_.hidden * BytesOf(held_.element));
      a.pick_words = ForResult(device, int64_t{shape.tokens} * shape.top_k * 4);
      if (kind.weighted) a.row_weights = Upload(device, held_.weights[rank]);
      if (kind.words) a.row_words = Upload(device, held_.words[rank]);
    }
  }

  cudaError_t Launch(int, int rank, const Call& call) override {
    const Arrays& arrays = arrays_[rank];
    CombineArgs args{};
    args.order = layout_.routing.order;
    args.element = held_.element;
    args.tokens = layout_.routing.shape.tokens;
    args.top_k = layout_.routing.shape.top_k;
    args.hidden = held_.hidden;
    args.rows = arrays.rows.data();
    args.row_weights = arrays.row_weights.data<float>();
    args.row_words = arrays.row_words.data<uint32_t>();
    args.slots = layout_.slots(rank);
    args.out = arrays.out.data();
    args.pick_words = arrays.pick_words.data<uint32_t>();
    const int pieces = CombinePieces(int64_t{held_.hidden} * BytesOf(held_.element));
    args.together = num_sms_ % 2 == 0 ? 1 : pieces % 2 == 0 && num_sms_ % 3 == 0 ? pieces / 2 : pieces;
    return LaunchCombine(group_.of_rank[rank], call, args, {num_sms_, num_sms_ % 4 == 0}, group_.stream[rank]);
  }

  void Verify(Report* report) const override {
    for (int rank = 0; rank < group_.sizes.ranks; ++rank) {
      report->At(name, rank);
      report->Numbers("out", host::Combine(layout_.routing, layout_.expected, held_, rank), arrays_[rank].out,
                      held_.element);
      if (held_.words.empty()) continue;
      report->Bits("pick_words", AsBytes(host::PickWords(layout_.routing, layout_.expected, held_, rank)),
                   arrays_[rank].pick_words, 4);
    }
  }

 private:
  struct Arrays {
    DeviceBytes rows, row_weights, row_words, out, pick_words;
  };

  // What one rank holds: NaN in rows without a token, which nothing may read.
  void DrawRows(const host::Layout& layout, int reach, bool weighted, int words_of_row, Draw* draw) {
    const int capacity = layout_.routing.shape.capacity;
    const int width = BytesOf(held_.element);
    const std::vector<bool> real = host::RowsWithToken(layout, capacity);
    Bytes y(int64_t{capacity} * held_.hidden * width);
    std::vector<float> weights;
    std::vector<uint32_t> words;
    for (int row = 0; row < capacity; ++row) {
      for (int i = 0; i < held_.hidden; ++i) {
        const float value = draw->Value(-reach - 6, reach);
        const uint32_t bits = host::Encode(held_.element, real[row] ? value : host::FloatOf(kNanWord));
        host::Store(y.data(), int64_t{row} * held_.hidden + i, width, bits);
      }
      const float weight = draw->Value(-6, 6);
      if (weighted) weights.push_back(real[row] ? weight : host::FloatOf(kNanWord));
      for (int i = 0; i < words_of_row; ++i) {
        const uint32_t word = draw->Word();
        words.push_back(real[row] ? word : kNanWord);
      }
    }
    if (draw->Chance(30)) {
      const int64_t at = draw->Below(capacity * held_.hidden);
      const float value = draw->Chance(50) ? host::FloatOf(kNanWord) : std::numeric_limits<float>::infinity();
      host::Store(y.data(), at, width, host::Encode(held_.element, value));
    }
    held_.y.push_back(std::move(y));
    if (weighted) held_.weights.push_back(std::move(weights));
    if (words_of_row != 0) held_.words.push_back(std::move(words));
  }

  const Group& group_;
  const LayoutOperation& layout_;
  host::HeldRows held_;
  int num_sms_;
  std::vector<Arrays> arrays_;  // of each rank
};

// --- Kernels of this driver

__global__ void Idle(int microseconds) {
  constexpr int kNap = 100;
  for (int left = microseconds; left > 0; left -= kNap) __nanosleep(1000 * min(left, kNap));
}

// One for each rank: says that it is here, and waits, but not for ever, until all have said so.
__global__ void Meet(volatile int* here, int rank, int ranks, int* met) {
  here[rank] = 1;
  __threadfence_system();
  int seen = 0;
  for (int i = 0; i < 2000000 && seen < ranks; ++i) {
    __nanosleep(1000);
    seen = 0;
    for (int peer = 0; peer < ranks; ++peer) seen += here[peer];
  }
  met[rank] = seen;
}

cudaError_t LoadDriverKernels() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, Idle);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, Overwrite);
  return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, Meet) : error;
}

// Whether kernels of all ranks' streams, launched as those of the exchange are, run at once. If not (a tool may make
// launches wait for each other), the exchange would wait for ever, through no fault of its own.
bool RanksMeet(const Group& group, int devices) {
  const int ranks = group.sizes.ranks;
  DeviceBytes here(0, ranks * 4);
  DeviceBytes met(0, ranks * 4);
  here.Fill(0, 0, ranks * 4);
  met.Fill(0, 0, ranks * 4);
  WaitForAll(devices);
  for (int rank = 0; rank < ranks; ++rank) {
    Check(cudaSetDevice(group.device[rank]), "cudaSetDevice");
    Check(LaunchTogether(Meet, {1}, 1, 0, group.stream[rank], here.data<int>(), rank, ranks, met.data<int>()),
          "launch of Meet");
  }
  WaitForAll(devices);
  return met.Download() == AsBytes(std::vector<int32_t>(ranks, ranks));
}

// --- Cases

// Operations in drawn order, the same on all ranks; the first is a layout.
std::vector<std::unique_ptr<Operation>> DrawOperations(const Group& group, int count, Decks* decks, Draw* draw) {
  std::vector<std::unique_ptr<Operation>> operations;
  std::vector<const LayoutOperation*> layouts;  // of which some row may exist; an older one may be used again
  for (int i = 0; i < count; ++i) {
    const int kind = draw->Below(8);
    std::unique_ptr<Operation> operation;
    if (layouts.empty() || kind < 2) {
      auto layout = std::make_unique<LayoutOperation>(group, decks, draw);
      // Without rows there is nothing to move, and the callers of dispatch and combine see to that.
      if (layout->routing.shape.capacity > 0) layouts.push_back(layout.get());
      operation = std::move(layout);
    } else {
      const LayoutOperation& layout = *layouts[draw->Chance(70) ? layouts.size() - 1 : draw->Below(layouts.size())];
      if (kind < 5) {
        operation = std::make_unique<DispatchOperation>(group, layout, decks, draw);
      } else {
        operation = std::make_unique<CombineOperation>(group, layout, decks, draw);
      }
    }
    operation->name = "operation " + std::to_string(i) + ", " + operation->name;
    operations.push_back(std::move(operation));
  }
  return operations;
}

// Holds up a rank, for as long as several operations take.
void Delay(const Group& group, int rank, int microseconds) {
  Check(cudaSetDevice(group.device[rank]), "cudaSetDevice");
  Check(LaunchKernel(Idle, 1, 1, 0, group.stream[rank], microseconds), "launch of Idle");
}

void RunCase(const GroupSizes& sizes, int number, int devices, const Options& options, Decks* decks, Report* report) {
  Draw draw(options.seed * 1000003u + static_cast<uint32_t>(number));
  Group group(sizes, devices, options.uninitialised);
  const auto operations = DrawOperations(group, options.quick ? kQuickOperations : kOperations, decks, &draw);
  const int64_t checks_before = report->checks();
  const int64_t wrong_before = report->wrong();
  // Before anything runs: after a hang, the last line says where.
  std::printf("case %d: %d ranks, %d tokens, top-%d, %d local experts, hidden %d, %d bytes: %zu operations", number,
              sizes.ranks, sizes.max_tokens, sizes.top_k, sizes.local_experts, sizes.hidden, sizes.element_bytes,
              operations.size());
  std::fflush(stdout);

  WaitForAll(devices);  // operands are there
  for (size_t i = 0; i < operations.size(); ++i) {
    const Call call{static_cast<int64_t>(i) + 1, options.timeout_s * int64_t{1000000000}, kOneGroup};
    if (options.delay && draw.Chance(60)) {
      const int late = draw.Below(sizes.ranks);
      Delay(group, late, draw.Between(50, 3000));
    }
    const int first = draw.Below(sizes.ranks);  // any rank may be the first
    for (int which = 0; which < operations[i]->launches(); ++which) {
      for (int nth = 0; nth < sizes.ranks; ++nth) {
        const int rank = (first + nth) % sizes.ranks;
        Check(cudaSetDevice(group.device[rank]), "cudaSetDevice");
        Check(operations[i]->Launch(which, rank, call), operations[i]->name.c_str());
      }
    }
  }
  WaitForAll(devices);

  for (const auto& operation : operations) operation->Verify(report);
  std::printf("%s%lld checks, %lld wrong\n", report->wrong() > wrong_before ? "\n  " : "; ",
              static_cast<long long>(report->checks() - checks_before),
              static_cast<long long>(report->wrong() - wrong_before));
  std::fflush(stdout);
}

// --- The program

int NumberOf(const std::string& name, const char* text) {
  char* end = nullptr;
  const long number = text == nullptr ? 0 : std::strtol(text, &end, 10);
  if (text == nullptr || end == text || *end != '\0' || number < 0 || number > 1000000) {
    std::printf("%s: expected a number after it, got %s\n%s", name.c_str(), text == nullptr ? "nothing" : text, kUsage);
    std::exit(kCannotRun);
  }
  return static_cast<int>(number);
}

Options ParseOptions(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
    if (name == "--delay") {
      options.delay = true;
    } else if (name == "--quick") {
      options.quick = true;
    } else if (name == "--uninitialised") {
      options.uninitialised = true;
    } else if (name == "--spoil") {
      options.spoil = true;
    } else if (name == "--cases") {
      options.cases = NumberOf(name, value), ++i;
    } else if (name == "--seed") {
      options.seed = static_cast<uint32_t>(NumberOf(name, value)), ++i;
    } else if (name == "--ranks") {
      options.ranks = NumberOf(name, value), ++i;
    } else if (name == "--timeout") {
      options.timeout_s = NumberOf(name, value), ++i;
    } else {
      const bool help = name == "--help";
      std::printf("%s%s%s", help ? "" : name.c_str(), help ? "" : ": no such option\n", kUsage);
      std::exit(help ? 0 : kCannotRun);
    }
  }
  if (options.ranks > kMaxDriverRanks) {
    std::printf("--ranks: expected at most %d, got %d\n", kMaxDriverRanks, options.ranks);
    std::exit(kCannotRun);
  }
  return options;
}

// Makes every GPU reach the memory of every other, and loads all kernels: loading one lazily, while another waits for
// its peers, could hang. Returns how many GPUs there are.
int PrepareDevices() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("expected a GPU, found none\n");
    std::exit(kCannotRun);
  }
  for (int device = 0; device < devices; ++device) {
    Check(cudaSetDevice(device), "cudaSetDevice");
    for (int peer = 0; peer < devices; ++peer) {
      if (peer != device) Check(cudaDeviceEnablePeerAccess(peer, 0), "peer access");
    }
    Check(LoadDispatchKernels(), "loading dispatch");
    Check(LoadCombineKernels(), "loading combine");
    Check(LoadLayoutKernels(), "loading layout");
    Check(LoadGroupLayoutKernels(), "loading the layout of a group");
    Check(LoadDriverKernels(), "loading the driver's own");
  }
  return devices;
}

int Main(int argc, char** argv) {
  // Before the first call of CUDA. Streams that share a connection to the GPU could wait for each other.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  const Options options = ParseOptions(argc, argv);
  const int devices = PrepareDevices();

  const GroupSizes* table = options.quick ? kQuickGroups : kGroups;
  const auto groups = static_cast<int>(options.quick ? std::size(kQuickGroups) : std::size(kGroups));
  const int cases = options.cases != 0 ? options.cases : (options.quick ? 2 : 3) * groups;
  const int most_ranks = options.ranks != 0 ? options.ranks : 4;
  std::printf("%d cases, seed %u, %d GPU%s%s%s\n", cases, options.seed, devices, devices == 1 ? "" : "s",
              options.delay ? ", a rank late" : "", options.uninitialised ? ", memory as it comes" : "");
  if (!RanksMeet(Group({most_ranks, 1, 1, 1, 8, 2}, devices, false), devices)) {
    std::printf("cannot run: kernels of %d streams do not run at once here, and an exchange needs that\n", most_ranks);
    return kCannotRun;
  }

  Decks decks = MakeDecks();
  Report report(options.spoil);
  for (int number = 0; number < cases; ++number) {
    GroupSizes sizes = table[number % groups];
    if (options.ranks != 0) sizes.ranks = options.ranks;
    RunCase(sizes, number, devices, options, &decks, &report);
  }
  std::printf("%lld checks, %lld wrong\n", static_cast<long long>(report.checks()),
              static_cast<long long>(report.wrong()));
  return report.wrong() == 0 ? 0 : kWrong;
}

}  // namespace
}  // namespace jax_ep

int main(int argc, char** argv) { return jax_ep::Main(argc, argv); }
