"""An order among arrays: what is computed from one that was tied comes behind all that were tied with it.

To XLA it is `jax.lax.optimization_barrier`. To JAX that is one operation: all that goes into it is alive, differentiated
and typed together. Here each array is by itself in all of this: one without a tangent gets none, and what only an array
needs that nobody uses goes away, so that no exchange is left with one half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, Var
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

Tree = TypeVar("Tree")


def tie(tree: Tree) -> Tree:
    """The same arrays, each of them behind all."""
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, _tie_p.bind(*map(jnp.asarray, leaves)))


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


def _of_nonzero(arrays: Sequence[Any]) -> list[Any]:
    """Ties tangents or cotangents, of which a symbolic zero stays one."""
    there = [array for array in arrays if type(array) is not ad.Zero]
    tied = iter(_tie_p.bind(*there) if there else ())
    return [array if type(array) is ad.Zero else next(tied) for array in arrays]


def _transpose(cotangents: Sequence[Any], *leaves: Any) -> list[Any]:
    tied = _of_nonzero(cotangents)
    return [ct if ad.is_undefined_primal(leaf) else None for ct, leaf in zip(tied, leaves, strict=True)]


def _without_unused(used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    def those(variables: Sequence[Any]) -> list[Any]:
        return [variable for variable, is_used in zip(variables, used, strict=True) if is_used]

    return list(used), eqn.replace(invars=those(eqn.invars), outvars=those(eqn.outvars)) if any(used) else None


_barrier: Callable[..., Any] = mlir.lower_fun(
    lambda *leaves: jax.lax.optimization_barrier(leaves), multiple_results=True
)

_tie_p = Primitive("jax_ep_tie")
_tie_p.multiple_results = True
_tie_p.def_abstract_eval(lambda *leaves: list(leaves))
_tie_p.def_impl(lambda *leaves: list(leaves))  # outside of jit everything comes in its order
mlir.register_lowering(_tie_p, _barrier)
ad.primitive_jvps[_tie_p] = lambda primals, tangents: (_tie_p.bind(*primals), _of_nonzero(tangents))
ad.primitive_transposes[_tie_p] = _transpose
batching.primitive_batchers[_tie_p] = lambda args, dims: (_tie_p.bind(*args), dims)
pe.dce_rules[_tie_p] = _without_unused
recompute(_tie_p)
