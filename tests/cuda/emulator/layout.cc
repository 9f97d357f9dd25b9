#include <cstdint>

#include "tests/cuda/emulator/shared_array.h"

EMULATOR_SHARED_ARRAY(int32_t, histogram)
EMULATOR_SHARED_ARRAY(int32_t, shared)

#include "cuda/layout.cu"
