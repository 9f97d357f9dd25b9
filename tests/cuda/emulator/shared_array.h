// Where a kernel says `extern __shared__ T name[]`, this is the array. One for each name and type in a .cu file; all
// start at the same kind of memory that a launch asks for, and end with it.
#pragma once

#include "tests/cuda/emulator/machine.h"

#define EMULATOR_SHARED_ARRAY(T, name)                                                                  \
  namespace jax_ep {                                                                                    \
  namespace {                                                                                           \
  alignas(128) thread_local T name[emulator::kMaxSharedBytes / sizeof(T)];                              \
  const emulator::SharedArray name##_of_block([]() -> char* { return reinterpret_cast<char*>(name); }); \
  }                                                                                                     \
  }
