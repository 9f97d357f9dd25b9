"""One call of an operation, as far as it is known when the program is traced."""

from __future__ import annotations

import dataclasses
import os
import sys

import jax

_INSIDE = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (__file__, jax.__file__))


@dataclasses.dataclass(frozen=True)
class Call:
    """What the kernels of one call, forward and backward, are told.

    Attributes:
      num_sms: SMs that a kernel takes, 0 for the group's.
      site: where the user's program makes the call, "file.py:12": ranks that meet in different calls can tell.
    """

    num_sms: int = 0
    site: str = ""


def of_caller(num_sms: int = 0) -> Call:
    """The call that the innermost code outside of jax_ep and JAX is making."""
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(_INSIDE):
        frame = frame.f_back
    return Call(num_sms, f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
