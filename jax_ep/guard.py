"""What goes into an exchange and comes out passes here: vmap is refused, tangents are made whole, results named."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def refuse_vmap(what: str, dims: Sequence[Any]) -> NoReturn:
    """NotImplementedError that says how to do without."""
    raise NotImplementedError(
        f"jax_ep.{what}: expected to be traced without jax.vmap over its operands, got vmap dimensions {tuple(dims)}; "
        "an exchange has one layout for all its tokens: reshape the mapped axis into the token axis "
        "([B, T, H] to [B * T, H], with max_tokens to match) or go over it with jax.lax.scan or jax.lax.map"
    )


# What all operands and results of an exchange pass: an identity, with two duties. It refuses vmap with the way
# out, which linear_call's own refusal does not name; and it makes all tangents and cotangents real arrays as soon as
# one of them is, since linear_call cannot take the symbolic zero of an operand that is not differentiated.

_guard_p = Primitive("jax_ep_guard")
_guard_p.multiple_results = True
_guard_p.def_abstract_eval(lambda *leaves, what: list(leaves))
_guard_p.def_impl(lambda *leaves, what: list(leaves))
mlir.register_lowering(_guard_p, lambda ctx, *leaves, what: list(leaves))
batching.primitive_batchers[_guard_p] = lambda args, dims, what: refuse_vmap(what, dims)


def _guard_jvp(primals: Sequence[Any], tangents: Sequence[Any], what: str) -> tuple[list[Any], Sequence[Any]]:
    if not jnp.issubdtype(primals[0].dtype, jnp.inexact):
        return _guard_p.bind(*primals, what=what), tangents
    real = _guard_p.bind(*map(ad.instantiate_zeros, tangents), what=what)
    return _guard_p.bind(*primals, what=what), real


def _guard_transpose(cotangents: Sequence[Any], *leaves: Any, what: str) -> list[Any]:
    real = _guard_p.bind(*map(ad.instantiate_zeros, cotangents), what=what)
    return [ct if ad.is_undefined_primal(leaf) else None for ct, leaf in zip(real, leaves, strict=True)]


ad.primitive_jvps[_guard_p] = _guard_jvp
ad.primitive_transposes[_guard_p] = _guard_transpose


def _pass(what: str, leaves: list[jax.Array]) -> list[jax.Array]:
    # Integers apart: in a linear transpose all that one primitive returns counts as linear.
    floating = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    parts = {
        kind: iter(_guard_p.bind(*(leaf for leaf, f in zip(leaves, floating, strict=True) if f == kind), what=what))
        for kind in set(floating)
    }
    return [next(parts[kind]) for kind in floating]


def operands(what: str, group: Any, *trees: Any) -> tuple[Any, ...]:
    """`trees` made ready for an exchange: vmap refused, all typed as varying over one set of mesh axes.

    That set is the group's axes and those that any operand varies over; without check_vma nothing has such a type and
    the pcast is void.
    """
    leaves, treedef = jax.tree.flatten(trees)
    varying = {name for leaf in leaves for name in _varying(leaf)} | set(group.axis)
    leaves = _pass(what, leaves)
    missing = [tuple(sorted(varying - _varying(leaf))) for leaf in leaves]
    leaves = [
        jax.lax.pcast(leaf, names, to="varying") if names else leaf for leaf, names in zip(leaves, missing, strict=True)
    ]
    return jax.tree.unflatten(treedef, leaves)


def results(what: str, name: str, tree: Any) -> Any:
    """What an exchange brought: vmap over its cotangents refused, named for the policies of `jax.checkpoint`."""
    leaves, treedef = jax.tree.flatten(tree)
    leaves = _pass(what, leaves)
    _give_checkpoint_name_a_transpose()
    return jax.tree.unflatten(treedef, [checkpoint_name(leaf, name) for leaf in leaves])


@functools.cache
def _give_checkpoint_name_a_transpose() -> None:
    # checkpoint_name is an identity that JAX has no transpose rule for: with it, and nothing else in the way,
    # jax.linear_transpose of dispatch and combine would fail. Its primitive has no public name.
    name_p = jax.make_jaxpr(lambda x: checkpoint_name(x, ""))(jax.ShapeDtypeStruct((), jnp.float32)).eqns[0].primitive
    ad.primitive_transposes.setdefault(name_p, lambda cotangent, x, **params: [cotangent])


def _varying(leaf: jax.Array) -> set[str]:
    return set(jax.typeof(leaf).manual_axis_type.varying)
