"""An order among arrays: what is computed from one that was tied comes behind all that were tied with it.

To XLA it is `jax.lax.optimization_barrier`, which to JAX is one operation: all that goes into it is alive and
differentiated together. Here each array is by itself in this. One without a tangent gets none, and one that nobody
uses needs nothing: so no exchange is left with one half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, Var
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

Tree = TypeVar("Tree")


def tie(tree: Tree, behind: Any = ()) -> Tree:
    """The same arrays, each of them behind all of these and of `behind`, which has no part in derivatives."""
    leaves, treedef = jax.tree.flatten(tree)
    others = jax.tree.leaves(behind)
    return jax.tree.unflatten(treedef, _tie_p.bind(*map(jnp.asarray, (*leaves, *others)), results=len(leaves)))


def recompute(primitive: Primitive) -> None:
    """Whatever a policy of `jax.checkpoint` says, no result of `primitive` is kept for the backward pass.

    A policy decides result by result. If it kept what is under way and had its done repeated, one start would have two.
    """
    pe.partial_eval_jaxpr_custom_rules[primitive] = _recompute


def _recompute(saveable: Any, unknown: Sequence[bool], there: Sequence[bool], eqn: Any) -> tuple[Any, ...]:
    wanted = [v for v, is_there in zip(eqn.invars, there, strict=True) if isinstance(v, Var) and not is_there]
    results = len(eqn.outvars)
    known = None if any(unknown) else eqn
    return known, eqn, [any(unknown)] * results, [True] * results, wanted


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, results: int) -> tuple[Any, Any]:
    return _tie_p.bind(*primals, results=results), _of_nonzero(tangents[:results])


def _transpose(cotangents: Sequence[Any], *leaves: Any, results: int) -> list[Any]:
    tied = zip(_of_nonzero(cotangents), leaves, strict=False)
    none = [None] * (len(leaves) - results)
    return [*(ct if ad.is_undefined_primal(leaf) else None for ct, leaf in tied), *none]


def _of_nonzero(arrays: Sequence[Any]) -> list[Any]:
    """Ties tangents or cotangents, of which a symbolic zero stays one."""
    there = [array for array in arrays if type(array) is not ad.Zero]
    tied = iter(_tie_p.bind(*there, results=len(there)))
    return [array if type(array) is ad.Zero else next(tied) for array in arrays]


def _without_unused(used: Sequence[bool], *live_and_eqn: Any) -> tuple[list[bool], Any]:
    eqn = live_and_eqn[-1]  # the only one before jax 0.12
    if not any(used):
        return [False] * len(eqn.invars), None
    wanted = [*used, *[True] * (len(eqn.invars) - len(used))]
    invars = [var for var, is_wanted in zip(eqn.invars, wanted, strict=True) if is_wanted]
    outvars = [var for var, is_used in zip(eqn.outvars, used, strict=True) if is_used]
    return wanted, eqn.replace(invars=invars, outvars=outvars, params={"results": len(outvars)})


def _barrier(*leaves: jax.Array, results: int) -> Sequence[jax.Array]:
    return jax.lax.optimization_barrier(leaves)[:results]


_tie_p = Primitive("jax_ep_tie")
_tie_p.multiple_results = True
_tie_p.def_abstract_eval(lambda *leaves, results: list(leaves[:results]))
_tie_p.def_impl(lambda *leaves, results: list(leaves[:results]))  # outside of jit everything comes in its order
mlir.register_lowering(_tie_p, mlir.lower_fun(_barrier, multiple_results=True))
ad.primitive_jvps[_tie_p] = _jvp
ad.primitive_transposes[_tie_p] = _transpose
batching.primitive_batchers[_tie_p] = lambda args, dims, results: (_tie_p.bind(*args, results=results), dims[:results])
pe.dce_rules[_tie_p] = _without_unused
recompute(_tie_p)
