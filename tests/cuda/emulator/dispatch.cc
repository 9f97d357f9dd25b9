#include <cstdint>

#include "tests/cuda/emulator/shared_array.h"

EMULATOR_SHARED_ARRAY(int32_t, tables)

#include "cuda/dispatch.cu"
