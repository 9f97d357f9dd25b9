#include "tests/cuda/emulator/machine.h"

#include <link.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <semaphore>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda_runtime.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
// Fibers are no threads to the sanitizer: it would not find what only their stacks point at, nor keep a second stack.
extern "C" const char* __asan_default_options() { return "detect_stack_use_after_return=0:detect_leaks=0"; }
#define EMULATOR_POISON(at, bytes) __asan_poison_memory_region(at, bytes)
#define EMULATOR_UNPOISON(at, bytes) __asan_unpoison_memory_region(at, bytes)
#else
#define EMULATOR_POISON(at, bytes)
#define EMULATOR_UNPOISON(at, bytes)
#endif

uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
constexpr int64_t kTurnNs = 1000;
constexpr size_t kStackBytes = 64 * 1024;
constexpr int kNan = 0xff;      // bytes of this are NaN in every format
constexpr int kGarbage = 0xd5;  // what is in shared memory when a block begins

// How long things are held up at most, by chance.
constexpr int kLateStart = 10000;      // a launch; ns, as the others
constexpr int kLateBlock = 5000;       // a block after the others of its launch
constexpr int kSlowCopy = 20000;       // a bulk copy
constexpr int kVeryLate = 300000;      // now and then, any of these
constexpr int kStalledWarp = 100000;   // a warp that has begun
constexpr int kStalledBlock = 200000;  // a block

class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(seed * 2 + 1) {}
  uint32_t Word() {  // splitmix64
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<uint32_t>(z >> 32);
  }
  int Below(int n) { return static_cast<int>(uint64_t{Word()} * static_cast<uint32_t>(n) >> 32); }
  bool OneIn(int n) { return Below(n) == 0; }

 private:
  uint64_t state_;
};

uint64_t Seed() {
  const char* seed = std::getenv("JAX_EP_EMULATOR_SEED");
  return seed == nullptr ? 0 : std::strtoull(seed, nullptr, 10);
}

Draw draw(Seed());
int64_t now = 0;

// --- Fibers: two stacks change places.

#if defined(__x86_64__)
// What a callee keeps goes to the old stack, and comes from the new one.
asm(R"(
.text
.type emulator_switch, @function
emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size emulator_switch, .-emulator_switch
)");
extern "C" void emulator_switch(void** from, void* to);

struct Context {
  void* at = nullptr;

  void Begin(char* stack, size_t bytes, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + bytes) - 8;
    std::fill(top, top + 8, nullptr);
    top[6] = reinterpret_cast<void*>(entry);  // where the first switch returns to
    at = top;
  }
  void SwitchTo(Context* to) { emulator_switch(&at, to->at); }
};
#else
struct Context {
  ucontext_t at;

  void Begin(char* stack, size_t bytes, void (*entry)()) {
    getcontext(&at);
    at.uc_stack.ss_sp = stack;
    at.uc_stack.ss_size = bytes;
    at.uc_link = nullptr;
    makecontext(&at, entry, 0);
  }
  void SwitchTo(Context* to) { swapcontext(&at, &to->at); }
};
#endif

// Stacks are kept for the next fiber, as all that come are alike.
std::vector<char*> free_stacks;

char* TakeStack() {
  if (free_stacks.empty()) {
    void* stack =
        mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) Fail("no memory for stacks");
    return static_cast<char*>(stack);
  }
  char* stack = free_stacks.back();
  free_stacks.pop_back();
  // What the last fiber left behind when it ended.
  EMULATOR_UNPOISON(stack + kStackBytes - 4096, 4096);
  return stack;
}

// --- Blocks

// The dynamic shared memory that kernels declare, each of its names.
std::vector<char* (*)()>& SharedArrays() {
  static std::vector<char* (*)()> arrays;
  return arrays;
}

// Fills what is thread_local in this program: all shared memory of the block whose OS thread this is.
int FillThreadLocal(dl_phdr_info* info, size_t, void*) {
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type == PT_TLS && info->dlpi_tls_data != nullptr) {
      std::memset(info->dlpi_tls_data, kGarbage, header.p_memsz);
    }
  }
  return 1;  // only the program itself, which comes first
}

struct Grid {
  Stream* stream;
  int blocks;
  int threads;
  int shared_bytes;
  std::function<void()> body;
  int unfinished = 0;  // blocks
  int at_barrier = 0;  // threads
};

struct Fiber {
  Context context;
  char* stack = nullptr;
  const char* waits_at = nullptr;
  int64_t wakes = kNever;
  std::vector<int> copies_out{0};  // that have not arrived, of each group; the last group is still open
  void* fake_stack = nullptr;
};

struct Warp {
  // Lanes, by bits. Who is in none of the last three waits for others.
  uint32_t lanes = 0;
  uint32_t runnable = 0;
  uint32_t asleep = 0;
  uint32_t ended = 0;
  int64_t stalled_until = 0;
  // The operation at which lanes meet.
  uint32_t arrived = 0;
  const char* operation = nullptr;
  uint64_t values[kWarpSize] = {};  // of those that have arrived
  uint64_t met[kWarpSize] = {};     // of the operation before
};

constexpr uint32_t kWord = 4;  // bytes of a copy that arrives as a thread would

struct Copy {
  char* to;
  const char* from;
  uint32_t bytes;
  uint64_t* barrier;  // that it tells, or
  Fiber* starter;     // of a copy out, in this group
  size_t group;
  int64_t arrives;
};

// An mbarrier, within its 8 bytes.
struct Barrier {
  uint32_t bytes;    // still to arrive in this phase
  uint8_t pending;   // arrivals in this phase
  uint8_t arrivals;  // of each phase
  uint8_t parity;
  uint8_t made;

  static constexpr uint8_t kMade = 0xb7;
};
static_assert(sizeof(Barrier) == sizeof(uint64_t));

Barrier* BarrierOf(uint64_t* word) {
  auto* barrier = reinterpret_cast<Barrier*>(word);
  if (barrier->made != Barrier::kMade) Fail("an mbarrier that is not initialised");
  return barrier;
}

void EndPhaseIfDone(Barrier* barrier) {
  if (barrier->pending != 0 || barrier->bytes != 0) return;
  barrier->pending = barrier->arrivals;
  barrier->parity ^= 1;
}

struct Block {
  Grid* grid = nullptr;
  int index = 0;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  int ended = 0;     // threads
  int64_t next = 0;  // when one of them can run
  std::vector<Copy> copies;
  // The barrier of all threads.
  int arrived = 0;
  const char* operation = nullptr;
  bool any = false;
  bool met_any = false;

  std::thread thread;
  std::binary_semaphore turn{0};
  Context scheduler;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;

  void Main();
  void BeginThreads();
  void Turn();
  void RunWarp(int warp);
  void Resume(int thread);
  void FinishCopies();
  void FinishCopy(const Copy& copy);
  int64_t NextEvent() const;
};

std::vector<std::unique_ptr<Block>> blocks;  // that are under way
std::binary_semaphore turn_ends{0};

// Who runs.
Block* block = nullptr;
int current = 0;  // the thread of the block

Fiber& Me() { return block->fibers[current]; }
Warp& MyWarp() { return block->warps[current / kWarpSize]; }
uint32_t MyBit() { return 1u << (current % kWarpSize); }

constexpr char kAtCopy[] = "a bulk copy";

// From a fiber to its block's scheduler, to come back when somebody has made it runnable.
void LeaveFiber() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&Me().fake_stack, block->scheduler_stack, block->scheduler_stack_bytes);
#endif
  Me().context.SwitchTo(&block->scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(Me().fake_stack, nullptr, nullptr);
#endif
}

void Wait(const char* where) {
  Me().waits_at = where;
  MyWarp().runnable &= ~MyBit();
  LeaveFiber();
  Me().waits_at = nullptr;
}

void RunFiber() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &block->scheduler_stack, &block->scheduler_stack_bytes);
#endif
  block->grid->body();
  for (const int copies : Me().copies_out) {
    if (copies != 0) Fail("a thread ends before copies out that it has started");
  }
  if (MyWarp().arrived != 0) Fail("a thread ends while lanes of its warp wait for it");
  if (block->arrived != 0) Fail("a thread ends while threads of its block wait for it");
  ++block->ended;
  MyWarp().ended |= MyBit();
  Wait("its end");
  std::abort();
}

void Block::BeginThreads() {
  dl_iterate_phdr(FillThreadLocal, nullptr);
  for (auto* at : SharedArrays()) EMULATOR_POISON(at() + grid->shared_bytes, kMaxSharedBytes - grid->shared_bytes);
  fibers = std::vector<Fiber>(grid->threads);
  warps = std::vector<Warp>((grid->threads + kWarpSize - 1) / kWarpSize);
  for (int i = 0; i < grid->threads; ++i) {
    fibers[i].stack = TakeStack();
    fibers[i].context.Begin(fibers[i].stack, kStackBytes, RunFiber);
    warps[i / kWarpSize].lanes |= 1u << (i % kWarpSize);
  }
  for (Warp& warp : warps) warp.runnable = warp.lanes;
}

void Block::Main() {
  turn.acquire();
  BeginThreads();
  while (true) {
    Turn();
    if (ended == grid->threads) break;
    next = NextEvent();
    turn_ends.release();
    turn.acquire();
  }
  if (!copies.empty()) Fail("a block ends before copies that it has started");
  for (auto* at : SharedArrays()) EMULATOR_UNPOISON(at(), kMaxSharedBytes);
  for (Fiber& fiber : fibers) free_stacks.push_back(fiber.stack);
  turn_ends.release();
}

void Block::Turn() {
  block = this;
  blockIdx = {static_cast<unsigned>(index), 0, 0};
  blockDim = {static_cast<unsigned>(grid->threads), 1, 1};
  gridDim = {static_cast<unsigned>(grid->blocks), 1, 1};
  const int count = static_cast<int>(warps.size());
  const int first = draw.Below(count);
  const int step = draw.OneIn(2) ? 1 : count - 1;
  for (int i = 0, warp = first; i < count; ++i, warp = (warp + step) % count) {
    FinishCopies();
    if (warps[warp].stalled_until > now) continue;
    if (draw.OneIn(500)) {
      warps[warp].stalled_until = now + draw.Below(kStalledWarp);
    } else if (!draw.OneIn(4)) {
      RunWarp(warp);
    }
  }
}

// A few rounds of its lanes, in any order. Not always all lanes.
void Block::RunWarp(int number) {
  Warp& warp = warps[number];
  const int base = number * kWarpSize;
  for (uint32_t left = warp.asleep; left != 0; left &= left - 1) {
    const int lane = __builtin_ctz(left);
    if (fibers[base + lane].wakes > now) continue;
    warp.asleep &= ~(1u << lane);
    warp.runnable |= 1u << lane;
  }
  for (int rounds = 1 + draw.Below(12); rounds > 0 && warp.runnable != 0; --rounds) {
    const uint32_t order = draw.Word();
    const uint32_t wanted = order >> 30 == 0 ? draw.Word() | draw.Word() : kAllLanes;
    const uint32_t step = order >> 8 | 1;  // odd: comes to each lane once
    for (uint32_t i = 0; i < kWarpSize; ++i) {
      const uint32_t lane = (order + i * step) % kWarpSize;
      if ((warp.runnable & wanted) >> lane & 1) Resume(base + static_cast<int>(lane));
    }
  }
}

void Block::Resume(int thread) {
  current = thread;
  threadIdx = {static_cast<unsigned>(thread), 0, 0};
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, fibers[thread].stack, kStackBytes);
#endif
  scheduler.SwitchTo(&fibers[thread].context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
}

int64_t Block::NextEvent() const {
  int64_t event = kNever;
  for (const Copy& copy : copies) event = std::min(event, copy.arrives);
  for (size_t i = 0; i < warps.size(); ++i) {
    int64_t ready = warps[i].runnable != 0 ? now : kNever;
    for (uint32_t left = warps[i].asleep; left != 0; left &= left - 1) {
      ready = std::min(ready, fibers[i * kWarpSize + __builtin_ctz(left)].wakes);
    }
    if (ready != kNever) event = std::min(event, std::max(ready, warps[i].stalled_until));
  }
  return event;
}

void Block::FinishCopies() {
  for (size_t i = 0; i < copies.size();) {
    if (copies[i].arrives > now) {
      ++i;
      continue;
    }
    const Copy copy = copies[i];
    copies[i] = copies.back();
    copies.pop_back();
    FinishCopy(copy);
  }
}

void Block::FinishCopy(const Copy& copy) {
  std::memcpy(copy.to, copy.from, copy.bytes);
  if (copy.barrier != nullptr) {
    Barrier* barrier = BarrierOf(copy.barrier);
    if (copy.bytes == kWord) {
      --barrier->pending;
    } else {
      barrier->bytes -= copy.bytes;
    }
    EndPhaseIfDone(barrier);
  } else {
    --copy.starter->copies_out[copy.group];
  }
  for (int thread = 0; thread < grid->threads; ++thread) {
    Warp& warp = warps[thread / kWarpSize];
    const uint32_t bit = 1u << (thread % kWarpSize);
    const bool waits = ((warp.runnable | warp.asleep | warp.ended) & bit) == 0;
    if (waits && fibers[thread].waits_at == kAtCopy) warp.runnable |= bit;
  }
}

void AddCopy(Copy copy) {
  const uint32_t unit = copy.bytes == kWord ? kWord : 16;
  if (copy.bytes == 0 || copy.bytes % unit != 0 || reinterpret_cast<uintptr_t>(copy.to) % unit != 0 ||
      reinterpret_cast<uintptr_t>(copy.from) % unit != 0) {
    Fail("a copy that is not aligned");
  }
  std::memset(copy.to, kNan, copy.bytes);
  const int kind = draw.Below(16);
  copy.arrives = now + (kind < 4 ? 0 : draw.Below(kind < 15 ? kSlowCopy : kVeryLate));
  block->copies.push_back(copy);
  MayYield();
}

// --- When nobody can go on

// With what the driver exits with for an error of CUDA.
[[noreturn]] void End() {
  std::printf("(JAX_EP_EMULATOR_SEED=%llu)\n", static_cast<unsigned long long>(Seed()));
  std::fflush(stdout);
  std::_Exit(1);
}

void Describe(const Block& b) {
  std::printf("  block %d of %d, %d threads:\n", b.index, b.grid->blocks, b.grid->threads);
  for (size_t i = 0; i < b.warps.size(); ++i) {
    std::printf("    warp %zu:", i);
    const char* last = nullptr;
    for (int lane = 0; lane < kWarpSize; ++lane) {
      if (b.warps[i].lanes >> lane == 0) break;
      const char* waits = b.fibers[i * kWarpSize + lane].waits_at;
      if (waits != last) std::printf(" from lane %d at %s;", lane, waits == nullptr ? "nothing" : waits);
      last = waits;
    }
    std::printf("\n");
  }
}

[[noreturn]] void Deadlock() {
  std::printf("\nemulator: nobody can go on:\n");
  for (const auto& b : blocks) Describe(*b);
  End();
}

}  // namespace

// --- Streams

struct Stream {
  int number;
  std::deque<Grid> launches;  // the first is under way if its blocks are
};

namespace {

std::vector<std::unique_ptr<Stream>> streams;

void Begin(Grid* grid) {
  grid->unfinished = grid->blocks;
  // Now and then late.
  const int64_t start = now + draw.Below(draw.OneIn(8) ? kVeryLate : kLateStart);
  for (int i = 0; i < grid->blocks; ++i) {
    auto& b = blocks.emplace_back(std::make_unique<Block>());
    b->grid = grid;
    b->index = i;
    b->next = start + draw.Below(kLateBlock);
    b->thread = std::thread(&Block::Main, b.get());
  }
}

bool BeginLaunches() {
  bool any = false;
  for (const auto& stream : streams) {
    if (stream->launches.empty()) continue;
    any = true;
    if (stream->launches.front().unfinished == 0) Begin(&stream->launches.front());
  }
  return any;
}

void GiveTurn(size_t which) {
  Block* b = blocks[which].get();
  b->turn.release();
  turn_ends.acquire();
  block = nullptr;
  if (b->ended < b->grid->threads) {
    if (draw.OneIn(200)) b->next = std::max(b->next, now + draw.Below(kStalledBlock));
    return;
  }
  b->thread.join();
  Grid* grid = b->grid;
  blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(which));
  if (--grid->unfinished == 0) grid->stream->launches.pop_front();
}

}  // namespace

Stream* MakeStream() {
  static int made = 0;
  return streams.emplace_back(std::make_unique<Stream>(Stream{made++, {}})).get();
}

void DestroyStream(Stream* stream) {
  Run();
  streams.erase(std::find_if(streams.begin(), streams.end(), [&](const auto& s) { return s.get() == stream; }));
}

void Enqueue(Stream* stream, int count, int threads, int shared_bytes, std::function<void()> body) {
  stream->launches.push_back({stream, count, threads, shared_bytes, std::move(body)});
}

void Run() {
  while (BeginLaunches()) {
    std::vector<size_t> ready;
    int64_t next = kNever;
    for (size_t i = 0; i < blocks.size(); ++i) {
      next = std::min(next, blocks[i]->next);
      if (blocks[i]->next <= now) ready.push_back(i);
    }
    if (next == kNever) Deadlock();
    if (ready.empty()) {
      now = next;
      continue;
    }
    GiveTurn(ready[draw.Below(static_cast<int>(ready.size()))]);
    now += kTurnNs;
  }
}

SharedArray::SharedArray(char* (*at)()) { SharedArrays().push_back(at); }

// --- What threads do

void Fail(const char* what) {
  std::printf("\nemulator: %s", what);
  if (block != nullptr) {
    std::printf(": stream %d, block %d of %d, thread %d", block->grid->stream->number, block->index,
                block->grid->blocks, current);
  }
  std::printf("\n");
  End();
}

int64_t Now() { return now; }

void Sleep(int64_t ns) {
  Me().wakes = now + ns;
  MyWarp().asleep |= MyBit();
  Wait("__nanosleep");
}

void MayYield() {
  if (draw.OneIn(64)) LeaveFiber();
}

const uint64_t* MeetWarp(unsigned mask, const char* operation, uint64_t value) {
  Warp& warp = MyWarp();
  if (mask != kAllLanes) Fail("an operation of some lanes only is not emulated");
  if (warp.ended != 0) Fail("an operation of a warp of which lanes have ended");
  if (warp.arrived != 0 && std::strcmp(warp.operation, operation) != 0) {
    Fail("lanes of a warp are at different operations");
  }
  warp.operation = operation;
  warp.values[current % kWarpSize] = value;
  warp.arrived |= MyBit();
  if (warp.arrived == warp.lanes) {
    std::copy(std::begin(warp.values), std::end(warp.values), warp.met);
    warp.arrived = 0;
    warp.runnable = warp.lanes;
  } else {
    Wait(operation);
  }
  return warp.met;
}

bool MeetBlock(const char* operation, bool value) {
  Block& b = *block;
  if (b.ended != 0) Fail("a barrier of a block of which threads have ended");
  if (b.arrived != 0 && std::strcmp(b.operation, operation) != 0) Fail("threads are at different barriers");
  b.operation = operation;
  b.any |= value;
  if (++b.arrived < b.grid->threads) {
    Wait(operation);
    return b.met_any;
  }
  b.met_any = b.any;
  b.any = false;
  b.arrived = 0;
  for (Warp& warp : b.warps) warp.runnable = warp.lanes;
  return b.met_any;
}

void MeetGrid() {
  Grid* grid = block->grid;
  if (block->ended != 0) Fail("a barrier of a grid of which threads have ended");
  if (++grid->at_barrier < grid->blocks * grid->threads) {
    Wait("the grid's barrier");
    return;
  }
  grid->at_barrier = 0;
  for (const auto& b : blocks) {
    if (b->grid != grid) continue;
    for (Warp& warp : b->warps) warp.runnable = warp.lanes;
    b->next = now;
  }
}

void InitBarrier(uint64_t* word, int arrivals) {
  const auto each = static_cast<uint8_t>(arrivals);
  const Barrier barrier{0, each, each, 0, Barrier::kMade};
  std::memcpy(word, &barrier, sizeof barrier);
  MayYield();
}

void StartCopy(void* to, const void* from, uint32_t bytes, uint64_t* word) {
  Barrier* barrier = BarrierOf(word);
  if (barrier->pending == 0) Fail("a copy with a barrier whose last one has not arrived");
  --barrier->pending;
  barrier->bytes += bytes;
  AddCopy({static_cast<char*>(to), static_cast<const char*>(from), bytes, word, nullptr, 0, 0});
}

void CopyWord(float* to, const float* from, uint64_t* word) {
  AddCopy({reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from), kWord, word, nullptr, 0, 0});
}

void Arrive(uint64_t* word) {
  Barrier* barrier = BarrierOf(word);
  if (barrier->pending == 0) Fail("one arrival too many");
  --barrier->pending;
  EndPhaseIfDone(barrier);
}

void AwaitCopy(uint64_t* word, uint32_t parity) {
  while (BarrierOf(word)->parity == parity) Wait(kAtCopy);
}

void StartCopyOut(void* to, const void* from, uint32_t bytes) {
  ++Me().copies_out.back();
  const size_t group = Me().copies_out.size() - 1;
  AddCopy({static_cast<char*>(to), static_cast<const char*>(from), bytes, nullptr, &Me(), group, 0});
}

void EndGroup() { Me().copies_out.push_back(0); }

void AwaitCopiesOut(int pending) {
  const std::vector<int>& groups = Me().copies_out;
  for (size_t i = 0; i + 1 + pending < groups.size(); ++i) {
    while (groups[i] != 0) Wait(kAtCopy);
  }
}

}  // namespace emulator
