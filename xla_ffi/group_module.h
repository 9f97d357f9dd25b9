// What Python needs of groups: memory at creation, nothing at run time.
#pragma once

#include <nanobind/nanobind.h>

namespace jax_ep {

void DefineGroups(nanobind::module_& module);

}  // namespace jax_ep
