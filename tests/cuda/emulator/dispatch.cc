#include <cstdint>

#include "tests/cuda/emulator/shared_array.h"

EMULATOR_SHARED_ARRAY(char, shared)

#include "cuda/dispatch.cu"
