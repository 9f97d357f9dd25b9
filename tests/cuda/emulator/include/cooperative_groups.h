#pragma once

#include "tests/cuda/emulator/machine.h"

namespace cooperative_groups {

struct Grid {
  void sync() const { emulator::MeetGrid(); }
};
inline Grid this_grid() { return {}; }

}  // namespace cooperative_groups
