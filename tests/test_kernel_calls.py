"""The custom calls that kernels are reached by, as JAX traces them. Nothing runs, so no GPU is needed."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxlib.mlir import ir

import jax_ep
from jax_ep import kernels
from jax_ep.call import Call
from jax_ep.layout import Handle

TOKENS, HIDDEN, TOP_K, EXPERTS = 4, 128, 2, 4


@pytest.fixture
def make_group(monkeypatch) -> Callable[..., jax_ep.Group]:
    """Of a group that says that it has kernels, where there are none."""
    native = types.SimpleNamespace(
        dispatch_pieces=lambda row_bytes: 2, layout_scratch_words=lambda experts: 1, open_sides=lambda serial: None
    )
    monkeypatch.setattr(kernels, "_register", lambda: None)
    monkeypatch.setattr(kernels._native, "require", lambda: native)
    mesh = jax.make_mesh((1,), ("ep",), (AxisType.Auto,), devices=jax.devices("cpu")[:1])
    sizes = {"max_tokens": TOKENS, "hidden": HIDDEN, "num_experts": EXPERTS, "top_k": TOP_K}

    def make(**changes) -> jax_ep.Group:
        group = jax_ep.create_group(mesh, "ep", **sizes, implementation="reference", **changes)
        return dataclasses.replace(group, implementation="cuda")

    return make


@pytest.fixture
def handle(make_group):
    group = make_group()
    ints = lambda *shape: jnp.zeros(shape, jnp.int32)  # noqa: E731
    return Handle(
        ints(1, TOKENS, TOP_K), ints(EXPERTS), ints(EXPERTS), ints(1), ints(1), group, "expert", 1, TOKENS * TOP_K
    )


def custom_calls(function, *arguments) -> Iterator:
    yield from (
        equation for equation in jax.make_jaxpr(function)(*arguments).eqns if equation.primitive.name == "ffi_call"
    )


x = jnp.ones((TOKENS, HIDDEN), jnp.bfloat16)
y = jnp.ones((TOKENS * TOP_K, HIDDEN), jnp.bfloat16)
scales = jnp.ones((TOKENS, 1))
weights, words = jnp.ones((TOKENS, TOP_K)), jnp.ones(TOKENS * TOP_K)
CALLS = {
    "dispatch": lambda handle: kernels.dispatch(handle, x, None, None, Call()),
    "dispatch with weights": lambda handle: kernels.dispatch(handle, x, None, weights, Call()),
    "dispatch that quantises": lambda handle: kernels.dispatch(handle, x, None, None, Call(), "float32"),
    "dispatch of FP8": lambda handle: kernels.dispatch(
        handle, x.astype(jnp.float8_e4m3fn), scales, weights, Call(), "float32"
    ),
    "gradient": lambda handle: kernels.gradient(handle, x, y, words, Call()),
    "combine": lambda handle: kernels.combine(handle, y, None, None, Call()),
    "combine with weights": lambda handle: kernels.combine(handle, y, words, None, Call()),
    "combine with words": lambda handle: kernels.combine(handle, y, None, words, Call()),
}


@pytest.mark.parametrize("name", CALLS)
def test_operands_have_elements(name, handle):
    """One without could be taken out of a loop and a shard_map, where XLA's Shardy crashes on it (jaxlib 0.11)."""
    (call,) = custom_calls(CALLS[name], handle)
    assert all(operand.aval.size > 0 for operand in call.invars)


@pytest.mark.parametrize("name", CALLS)
def test_attributes_say_what_is_there(name, handle):
    (call,) = custom_calls(CALLS[name], handle)
    said = {key: bool(value) for key, value in dict(call.params["attributes"]).items() if key.startswith("has_")}
    expected = {
        "dispatch": {"has_scales": False, "has_weights": False, "has_y": False},
        "dispatch with weights": {"has_scales": False, "has_weights": True, "has_y": False},
        "dispatch that quantises": {"has_scales": False, "has_weights": False, "has_y": False},
        "dispatch of FP8": {"has_scales": True, "has_weights": True, "has_y": False},
        "gradient": {"has_scales": False, "has_weights": False, "has_y": True},
        "combine": {"has_weights": False, "has_words": False},
        "combine with weights": {"has_weights": True, "has_words": False},
        "combine with words": {"has_weights": False, "has_words": True},
    }
    assert said == expected[name]


# Start and done, in programs lowered for GPUs.


def dispatch(group, x, index, weights, **options):
    pending = jax_ep.dispatch_start(x, index, weights, group=group, **options)
    between, pending = jax_ep.beside(pending, jnp.sin, weights if x is None else jax.tree.leaves(x)[-1])
    return jax_ep.dispatch_done(pending), between


def combine(group, x, index, weights, **options):
    """Of rows without an exchange before."""
    handle = jax_ep.layout(index, group=group, **options)
    rows = jnp.resize(x, (handle.capacity, HIDDEN))
    row_weights = None if weights is None else jnp.resize(weights, handle.capacity)
    pending = jax_ep.combine_start(rows, handle, row_weights)
    between, pending = jax_ep.beside(pending, jnp.sin, x)
    return jax_ep.combine_done(pending), between


def quantised(group, x, index, weights, **options):
    return dispatch(group, jax_ep.quantize(x), index, weights, **options)


def loss(function, group, x, index, weights, **options):
    rows, between = function(group, x, index, weights, **options)
    return sum((leaf.astype(jnp.float32) ** 2).sum() for leaf in jax.tree.leaves((rows, between)) if leaf.size)


def gradient(function):
    def both(group, x, index, weights, **options):
        return jax.grad(lambda x, w: loss(function, group, x, index, w, **options), argnums=(0, 1))(x, weights)

    return both


def layers(group, x, index, weights):
    def layer(x, _):
        rows, between = dispatch(group, x, index, weights)
        return combine(group, rows.x[:TOKENS] + between.sum().astype(x.dtype), index, weights)[0], None

    return jax.grad(lambda x: jax.lax.scan(jax.checkpoint(layer), x, None, length=2)[0].astype(jnp.float32).sum())(x)


def without_weights(function):
    return lambda group, x, index, weights, **options: function(group, x, index, None, **options)


# name: program, starts in it, options
HALVES: dict[str, tuple[Callable[..., Any], list[str], dict[str, Any]]] = {
    "dispatch": (without_weights(dispatch), ["dispatch"], {}),
    "dispatch with weights": (dispatch, ["dispatch"], {}),
    "dispatch in rank order": (dispatch, ["dispatch"], {"row_order": "rank"}),
    "dispatch that quantises": (dispatch, ["dispatch"], {"wire": "fp8"}),
    "dispatch of raw FP8": (dispatch, ["dispatch"], {"wire": "fp8_ue8m0", "dequantize": False}),
    "dispatch of FP8": (quantised, ["dispatch"], {}),
    "dispatch of FP8 that stays": (quantised, ["dispatch"], {"dequantize": False}),
    "combine": (without_weights(combine), ["combine"], {}),
    "combine in rank order": (without_weights(combine), ["combine"], {"row_order": "rank"}),
    "combine with weights": (combine, ["combine"], {}),
    "gradient of dispatch": (gradient(dispatch), ["dispatch", "combine"], {}),
    "gradient of dispatch in rank order": (gradient(dispatch), ["dispatch", "combine"], {"row_order": "rank"}),
    "gradient of dispatch that quantises": (gradient(dispatch), ["dispatch", "combine"], {"wire": "fp8"}),
    "gradient of combine": (gradient(without_weights(combine)), ["combine", "dispatch"], {}),
    "gradient of combine with weights": (gradient(combine), ["combine", "dispatch"], {}),
    "layers": (layers, ["dispatch", "combine", "dispatch", "dispatch", "combine"], {}),
}
index = jnp.zeros((TOKENS, TOP_K), jnp.int32)


def operations(operation: Any) -> Iterator[Any]:
    yield operation
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from operations(inner.operation)


def lowered(group: jax_ep.Group, program: Callable[..., Any], **options: Any) -> tuple[Any, list[Any], list[Any]]:
    """A program for GPUs, to be held for as long as its starts and dones, which come with it."""
    specs = {"mesh": group.mesh, "in_specs": P("ep"), "out_specs": P("ep"), "check_vma": False}
    f = jax.jit(jax.shard_map(lambda *arrays: program(group, *arrays, **options), **specs))
    module = f.trace(x, index, weights).lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    calls = [op for op in operations(module.operation) if op.name == "stablehlo.custom_call"]
    halves = [[call for call in calls if name_of(call).endswith(half)] for half in ("_start", kernels.DONE)]
    return module, *halves


def name_of(call: Any) -> str:
    return ir.StringAttr(call.attributes["call_target_name"]).value


def origin(value: Any) -> Any:
    """What an array is, before barriers and behind the choice of a platform."""
    while isinstance(value.owner, ir.OpView | ir.Operation):
        operation, number = value.owner, ir.OpResult(value).result_number
        if operation.name == "stablehlo.optimization_barrier":
            value = operation.operands[number]
        elif operation.name == "stablehlo.case" and len(operation.regions) == 1:
            value = list(operation.regions[0].blocks[0].operations)[-1].operands[number]
        else:
            break
    return value


def size(value: Any) -> int:
    shape = ir.RankedTensorType(value.type).shape
    return int(jnp.prod(jnp.array(shape)))


@pytest.mark.parametrize("name", HALVES)
def test_done_is_given_all_that_start_reads_and_writes(name, make_group):
    """What it writes in the place of done's results, and what it reads, so that XLA leaves it alone until then."""
    program, expected, options = HALVES[name]
    _program, starts, dones = lowered(make_group(), program, **options)
    assert [name_of(start) for start in starts] == [f"jax_ep_{kind}_start" for kind in expected]
    for start, done in zip(starts, dones, strict=True):
        count = len(done.results)
        operands = [origin(operand) for operand in done.operands]
        words = "has_words = false" not in str(start.attributes["mhlo.backend_config"])
        written = [result for result in start.results if size(result)][: None if words else 1]
        assert operands[:count] == written
        assert [str(result.type) for result in done.results] == [str(result.type) for result in written]
        in_place = [f"output_tuple_indices = [{n}]" if count > 1 else "operand_index = 0" for n in range(count)]
        aliases = [str(alias) for alias in done.attributes["output_operand_aliases"]]
        assert all(f"operand_index = {n}" in alias for n, alias in enumerate(aliases)) and len(aliases) == count
        assert all(where in alias for where, alias in zip(in_place, aliases, strict=True))
        read = [origin(operand) for operand in start.operands]
        assert all(operand in operands[count:] for operand in read), "XLA may reuse it too early"


def test_equal_starts_are_told_apart(make_group):
    """XLA would make one of them for two dones, and a copy of what is under way."""

    def twice(group, x, index, weights):
        handle = jax_ep.layout(index, group=group)
        pending = [jax_ep.dispatch_start(x, handle=handle) for _ in range(2)]
        return [jax_ep.dispatch_done(each).x for each in pending]

    _program, starts, dones = lowered(make_group(), twice)
    first, second = (str(start.attributes["mhlo.backend_config"]) for start in starts)
    assert len(dones) == 2 and first != second
    _program, again, _ = lowered(make_group(), twice)  # the numbers are the program's: equal in every process
    tags = [
        [re.search(r"tag = (\d+)", str(s.attributes["mhlo.backend_config"]))[1] for s in of] for of in (starts, again)
    ]
    assert tags[0] == tags[1]


@pytest.mark.parametrize("name", HALVES)
def test_start_and_done_share_one_layout(name, make_group):
    """Of tokens, rows and weights: else XLA may lay them out anew for each of the two."""
    program, _, options = HALVES[name]
    _program, starts, _ = lowered(make_group(), program, **options)
    for start in starts:
        floats = [operand for operand in start.operands if "i32" not in str(operand.type)]
        assert floats and {name_of(origin(operand).owner) for operand in floats} == {"LayoutConstraint"}


@pytest.mark.parametrize("name", HALVES)
def test_what_start_reads_and_done_gives_is_in_memory_by_itself(name, make_group):
    """XLA has a call read a part of an array, and write one, where that lies: not through a barrier."""
    program, _, options = HALVES[name]
    _program, starts, dones = lowered(make_group(), program, **options)
    barrier = "stablehlo.optimization_barrier"
    for start, done in zip(starts, dones, strict=True):
        assert {operand.owner.name for operand in (*start.operands, *done.operands)} <= {
            barrier,
            "stablehlo.custom_call",
        }
        assert {operand.owner.name for operand in start.operands} == {barrier}
        assert {use.owner.name for result in done.results for use in result.uses} == {barrier}


@pytest.mark.parametrize("name", HALVES)
def test_nothing_is_converted_on_its_way_to_start(name, make_group):
    """A conversion would be an array of its own, and done would be given another one."""
    program, _, options = HALVES[name]
    _program, starts, _ = lowered(make_group(), program, **options)
    made_by = [origin(operand).owner for start in starts for operand in start.operands]
    assert all("bitcast_convert" not in getattr(owner, "name", "") for owner in made_by)


@pytest.mark.parametrize(("tokens", "changes"), [(0, {}), (TOKENS, {"capacity": 0})], ids=["no tokens", "no rows"])
@pytest.mark.parametrize("name", ["dispatch with weights", "combine with weights", "gradient of dispatch"])
def test_nothing_is_started_where_there_is_nothing_to_move(name, tokens, changes, make_group):
    program = HALVES[name][0]
    few = lambda group, *arrays: program(group, *(array[:tokens] for array in arrays))  # noqa: E731
    assert lowered(make_group(**changes), few)[1:] == ([], [])
