// The order that cuda/side_stream.h promises, by what it asks of CUDA.
#include <cstdio>
#include <cstdlib>

#include "cuda/side_stream.h"

using jax_ep::SideStream;

namespace {

const std::string kName = "xla";
const cudaStream_t kCompute = &kName;

void Expect(const char* what, const std::string& got, const std::string& wanted) {
  if (got == wanted) return;
  std::printf("%s: expected\n%s\ngot\n%s\n", what, wanted.c_str(), got.c_str());
  std::exit(1);
}

void ExpectProblem(const char* what, const std::string& got, const char* part) {
  if (got.find(part) != std::string::npos) return;
  std::printf("%s: expected a problem with \"%s\", got \"%s\"\n", what, part, got.c_str());
  std::exit(1);
}

const void* At(long address) { return reinterpret_cast<const void*>(address); }

// What the streams were given since the last time.
std::string Said() {
  std::string was;
  was.swap(said);
  return was;
}

int Launch(cudaStream_t stream) {
  said += *stream + ": kernel\n";
  return cudaSuccess;
}

}  // namespace

int main() {
  std::unique_ptr<SideStream> side;
  Expect("create", SideStream::Create(&side), "");
  Said();

  // Events: e0 what compute was given, e1 the last start, e2... of each exchange.
  Expect("start", side->Start(kCompute, At(16), {At(1), At(2)}, Launch), "");
  Expect("start", Said(), "xla: record e0\nurgent: wait e0\nurgent: kernel\nurgent: record e2\nurgent: record e1\n");
  Expect("another", side->Start(kCompute, At(32), {At(1)}, Launch), "");
  Expect("another", Said(), "xla: record e0\nurgent: wait e0\nurgent: kernel\nurgent: record e3\nurgent: record e1\n");
  side->Follow(kCompute);
  Expect("a whole operation", Said(), "xla: wait e1\n");
  capturing = true;
  side->Follow(kCompute);
  Expect("one in a graph", Said(), "xla: wait e1 external\n");
  capturing = false;
  Expect("done", side->Done(kCompute, At(32), {At(32), At(1)}), "");
  Expect("done of the second", Said(), "xla: wait e3\n");
  Expect("done", side->Done(kCompute, At(16), {At(2), At(16), At(1)}), "");
  Expect("done of the first", Said(), "xla: wait e2\n");

  // After a problem compute waits for all that was started, and nothing is left.
  const std::string all = "urgent: record e1\nxla: wait e1\n";
  ExpectProblem("done twice", side->Done(kCompute, At(16), {At(1), At(2)}), "done already");
  Expect("done twice", Said(), all);
  side->Start(kCompute, At(16), {At(1)}, Launch);
  Said();
  ExpectProblem("read elsewhere", side->Done(kCompute, At(16), {At(7)}), "what a start reads");
  Expect("read elsewhere", Said(), all);
  for (long i = 1; i <= SideStream::kMaxPending; ++i) Expect("eight", side->Start(kCompute, At(i), {}, Launch), "");
  Said();
  ExpectProblem("nine", side->Start(kCompute, At(99), {}, Launch), "at most 8");
  Expect("nine", Said(), all);
  Expect("after nine", side->Start(kCompute, At(99), {}, Launch), "");
  Said();
  ExpectProblem("a launch fails", side->Start(kCompute, At(5), {}, [](cudaStream_t) { return 1; }), "an error");
  Expect("a launch fails", Said(), "xla: record e0\nurgent: wait e0\n" + all);

  // Graphs that were recorded wait for e1 as long as they live.
  side.reset();
  Expect("events destroyed", std::to_string(destroyed), std::to_string(events - 1));
  std::puts("right");
}
