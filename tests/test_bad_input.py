"""What does not fit is refused while tracing, in words: expected, got, what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep

RANKS, TOKENS, TOP_K, EXPERTS, HIDDEN = 2, 4, 2, 6, 8
SIZES = {"max_tokens": TOKENS, "hidden": HIDDEN, "num_experts": EXPERTS, "top_k": TOP_K, "dtype": jnp.float32}
ROWS = RANKS * TOKENS * TOP_K


def make_mesh(shape: tuple[int, ...] = (RANKS,), axes: tuple[str, ...] = ("ep",)) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices("cpu")[: np.prod(shape)]).reshape(shape), axes)


def make_group(**changes) -> jax_ep.Group:
    return jax_ep.create_group(make_mesh(), "ep", **{**SIZES, "implementation": "reference", **changes})


@pytest.fixture(scope="module")
def group():
    with make_group() as group:
        yield group


@pytest.fixture(params=["whole", "in halves"])
def form(request, monkeypatch):
    """The operations as they are, and by start and done, of which start must call itself so in what it says."""

    def of_halves(start, done):
        def operation(*args, **options):
            try:
                return done(start(*args, **options))
            except (TypeError, ValueError, RuntimeError) as error:
                assert str(error).startswith((f"{start.__name__}:", f"{start.__name__} ", "layout")), error
                raise

        return operation

    if request.param == "in halves":
        monkeypatch.setattr(jax_ep, "dispatch", of_halves(jax_ep.dispatch_start, jax_ep.dispatch_done))
        monkeypatch.setattr(jax_ep, "combine", of_halves(jax_ep.combine_start, jax_ep.combine_done))


def trace(body, mesh: jax.sharding.Mesh, **changes):
    """Trace `body` in shard_map, running nothing, on arguments of the group's sizes but for `changes`."""
    arguments = {
        "x": ((TOKENS, HIDDEN), jnp.float32),
        "index": ((TOKENS, TOP_K), jnp.int32),
        "weights": ((TOKENS, TOP_K), jnp.float32),
        "y": ((ROWS, HIDDEN), jnp.float32),
        "row_weights": ((ROWS,), jnp.float32),
    } | changes
    ranks = int(np.prod(list(mesh.shape.values())))
    shapes = {
        name: jax.ShapeDtypeStruct((ranks * shape[0], *shape[1:]), dtype) for name, (shape, dtype) in arguments.items()
    }
    specs = P(tuple(mesh.axis_names))
    inside = jax.shard_map(lambda a: body(SimpleNamespace(**a)), mesh=mesh, in_specs=specs, out_specs=specs)
    return jax.eval_shape(inside, shapes)


def refuses(error: type[Exception], expected: str, got: str, remedy: str, call, *args, **kwargs) -> None:
    with pytest.raises(error) as info:
        call(*args, **kwargs)
    message = str(info.value)
    before, _, after = message.partition("got ")
    assert "expected" in before, message
    assert expected in before, message
    assert got in after, message
    assert remedy in after, message


def combine_rows(a: SimpleNamespace, group: jax_ep.Group, **options) -> jax.Array:
    """Combine, reached by a layout that fits."""
    return jax_ep.combine(a.y, jax_ep.layout(a.index, group=group), **options)


OPERATIONS = {
    "layout": lambda a, group: jax_ep.layout(a.index, group=group),
    "dispatch": lambda a, group: jax_ep.dispatch(a.x, a.index, group=group),
    "dispatch with a handle": lambda a, group: jax_ep.dispatch(a.x, handle=a.handle),
    "combine": lambda a, group: jax_ep.combine(a.y, a.handle),
    "weighted combine": lambda a, group: jax_ep.combine(a.y, a.handle, a.row_weights),
}


def arrays_and_handle(group: jax_ep.Group) -> SimpleNamespace:
    """Arrays as one rank has them, and a handle of the group (of shapes only)."""
    handle = trace(lambda a: jax_ep.layout(a.index, group=group), make_mesh())
    local = jax.tree.map(lambda a: jnp.zeros((a.shape[0] // RANKS, *a.shape[1:]), a.dtype), handle)
    return SimpleNamespace(
        x=jnp.zeros((TOKENS, HIDDEN)),
        index=jnp.zeros((TOKENS, TOP_K), jnp.int32),
        y=jnp.zeros((ROWS, HIDDEN)),
        row_weights=jnp.zeros(ROWS),
        handle=local,
    )


def test_what_is_no_array(form, group):
    mesh = make_mesh()
    rows = SimpleNamespace()
    refuses(
        TypeError,
        "an array",
        "SimpleNamespace",
        "routing.index",
        trace,
        lambda a: jax_ep.layout(rows, group=group).slots,
        mesh,
    )
    refuses(
        TypeError,
        "an array",
        "SimpleNamespace",
        "tokens [T, H]",
        trace,
        lambda a: jax_ep.dispatch(rows, a.index, group=group).x,
        mesh,
    )
    refuses(
        TypeError,
        "an array",
        "SimpleNamespace",
        "rows.x",
        trace,
        lambda a: jax_ep.combine(rows, jax_ep.layout(a.index, group=group)),
        mesh,
    )


@pytest.mark.parametrize("operation", OPERATIONS)
def test_outside_shard_map(form, group, operation):
    a = arrays_and_handle(group)
    call = OPERATIONS[operation]
    refuses(RuntimeError, "('ep',)", "none", "jax.shard_map", call, a, group)
    refuses(RuntimeError, "('ep',)", "none", "jax.shard_map", jax.jit(lambda: call(a, group)))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_inside_shard_map_over_another_axis(form, group, operation):
    a = arrays_and_handle(group)

    def body(unused):
        OPERATIONS[operation](a, group)
        return unused

    other = make_mesh(axes=("data",))
    refuses(RuntimeError, "('ep',)", "('data',)", "axis_names", trace, lambda u: body(u.x), other)
    both = make_mesh((2, 2), ("data", "ep"))
    only_data = jax.shard_map(body, mesh=both, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    refuses(RuntimeError, "('ep',)", "('data',)", "axis_names", jax.eval_shape, jax.jit(only_data), jnp.zeros(2))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_inside_shard_map_over_more_ranks(form, group, operation):
    a = arrays_and_handle(group)

    def body(unused):
        OPERATIONS[operation](a, group)
        return unused.x

    refuses(RuntimeError, "{'ep': 2}", "{'ep': 4}", "create the group with the mesh", trace, body, make_mesh((4,)))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_closed_group(form, operation):
    group = make_group()
    a = arrays_and_handle(group)
    group.close()
    assert group.closed

    def body(unused):
        OPERATIONS[operation](a, group)
        return unused.x

    serial = f"group {group.serial}"
    refuses(RuntimeError, "open group", serial, "create_group", trace, body, make_mesh())


MORE = ((TOKENS + 1, HIDDEN), jnp.float32)
MORE_INDEX = ((TOKENS + 1, TOP_K), jnp.int32)


@pytest.mark.parametrize(
    ("changes", "call", "error", "expected", "got", "remedy"),
    [
        pytest.param(*case[1:], id=case[0])
        for case in [
            # name, changed arguments, call, error, expected, got, what to do
            ("layout of more tokens than max_tokens", {"index": MORE_INDEX},
             lambda a, g: jax_ep.layout(a.index, group=g),
             ValueError, "max_tokens=4", "5", "max_tokens=5"),
            ("dispatch of more tokens than max_tokens", {"x": MORE, "index": MORE_INDEX},
             lambda a, g: jax_ep.dispatch(a.x, a.index, group=g),
             ValueError, "max_tokens=4", "5", "max_tokens=5"),
            ("tokens and index of different calls", {"x": ((3, HIDDEN), jnp.float32)},
             lambda a, g: jax_ep.dispatch(a.x, a.index, group=g),
             ValueError, "4 tokens", "3", "same call"),
            ("hidden of tokens", {"x": ((TOKENS, 7), jnp.float32)},
             lambda a, g: jax_ep.dispatch(a.x, a.index, group=g),
             ValueError, "hidden=8", "(4, 7)", "hidden=7"),
            ("hidden of rows", {"y": ((ROWS, 7), jnp.float32)},
             combine_rows,
             ValueError, "(16, 8)", "(16, 7)", "handle"),
            ("number of rows", {"y": ((ROWS + 1, HIDDEN), jnp.float32)},
             combine_rows,
             ValueError, "(16, 8)", "(17, 8)", "handle"),
            ("top-k of the index", {"index": ((TOKENS, 3), jnp.int32)},
             lambda a, g: jax_ep.layout(a.index, group=g),
             ValueError, "top_k=2", "(4, 3)", "top_k=3"),
            ("top-k below the group's, not said", {"index": ((TOKENS, 1), jnp.int32)},
             lambda a, g: jax_ep.dispatch(a.x, a.index, group=g),
             ValueError, "top_k=2", "(4, 1)", "top_k=1"),
            ("top-k of the call above the group's", {"index": ((TOKENS, 3), jnp.int32)},
             lambda a, g: jax_ep.dispatch(a.x, a.index, group=g, top_k=3),
             ValueError, "top_k=2", "3", "top_k=3"),
            ("index of one axis", {"index": ((TOKENS,), jnp.int32)},
             lambda a, g: jax_ep.layout(a.index, group=g),
             ValueError, "[tokens, top_k]", "(4,)", "reshape"),
            ("index of floats", {"index": ((TOKENS, TOP_K), jnp.float32)},
             lambda a, g: jax_ep.layout(a.index, group=g),
             TypeError, "integer", "float32", "index"),
            ("integer tokens", {"x": ((TOKENS, HIDDEN), jnp.int32)},
             lambda a, g: jax_ep.dispatch(a.x, a.index, group=g),
             TypeError, "float16, bfloat16, float32", "int32", "cast"),
            ("FP8 tokens without scales", {"x": ((TOKENS, HIDDEN), jnp.float8_e4m3fn)},
             lambda a, g: jax_ep.dispatch(a.x, a.index, group=g),
             TypeError, "float16, bfloat16, float32", "float8_e4m3fn", "scales"),
            ("integer rows", {"y": ((ROWS, HIDDEN), jnp.int32)},
             combine_rows,
             TypeError, "float16, bfloat16, float32", "int32", "cast"),
            ("tokens wider than the group's dtype", {},
             lambda a, g: jax_ep.dispatch(a.x, a.index, group=make_group(dtype=jnp.bfloat16)),
             TypeError, "bfloat16", "float32", "dtype=float32"),
            ("weights of another top-k", {"weights": ((TOKENS, 3), jnp.float32)},
             lambda a, g: jax_ep.dispatch(a.x, a.index, a.weights, group=g),
             ValueError, "(4, 2)", "(4, 3)", "routing.weights"),
            ("weights of other tokens", {"weights": ((3, TOP_K), jnp.float32)},
             lambda a, g: jax_ep.dispatch(a.x, handle=jax_ep.layout(a.index, group=g), weights=a.weights),
             ValueError, "(4, 2)", "(3, 2)", "routing.weights"),
            ("integer weights", {"weights": ((TOKENS, TOP_K), jnp.int32)},
             lambda a, g: jax_ep.dispatch(a.x, a.index, a.weights, group=g),
             TypeError, "floating", "int32", "cast"),
            ("integer row weights", {"row_weights": ((ROWS,), jnp.int32)},
             lambda a, g: combine_rows(a, g, weights=a.row_weights),
             TypeError, "floating", "int32", "rows.weights"),
            ("weights of other rows", {"row_weights": ((ROWS + 1,), jnp.float32)},
             lambda a, g: combine_rows(a, g, weights=a.row_weights),
             ValueError, "(16,)", "(17,)", "rows.weights"),
            ("token weights in combine", {},
             lambda a, g: combine_rows(a, g, weights=a.weights),
             ValueError, "(16,)", "(4, 2)", "rows.weights"),
            ("rows in place of their handle", {},
             lambda a, g: jax_ep.combine(a.y, jax_ep.dispatch(a.x, a.index, group=g)),  # type: ignore
             TypeError, "rows.handle", "Rows", ""),
            ("dispatch by the handle of another group", {},
             lambda a, g: jax_ep.dispatch(a.x, handle=jax_ep.layout(a.index, group=make_group()), group=g),
             ValueError, "handle of group", "group", "dispatch or layout"),
            ("combine by the handle of another group", {},
             lambda a, g: jax_ep.combine(a.y, jax_ep.layout(a.index, group=make_group()), group=g),
             ValueError, "handle of group", "group", "dispatch or layout"),
            ("dispatch in rank order by a handle in expert order", {},
             lambda a, g: jax_ep.dispatch(a.x, handle=jax_ep.layout(a.index, group=g), row_order="rank"),
             ValueError, "'rank'", "'expert'", "layout"),
            ("dispatch in expert order by a handle in rank order", {},
             lambda a, g: jax_ep.dispatch(
                 a.x, handle=jax_ep.layout(a.index, group=g, row_order="rank"), row_order="expert"),
             ValueError, "'expert'", "'rank'", "layout"),
            ("expert rows combined by a handle in rank order", {},
             lambda a, g: jax_ep.combine(a.y, jax_ep.layout(a.index, group=g, row_order="rank")),
             ValueError, "(8, 8)", "(16, 8)", "handle"),
            ("weighted combine in rank order", {"y": ((8, HIDDEN), jnp.float32)},
             lambda a, g: jax_ep.combine(
                 a.y, jax_ep.layout(a.index, group=g, row_order="rank"), a.row_weights),
             ValueError, "None", "weights", 'row_order="expert"'),
            ("dispatch by a handle of another alignment", {},
             lambda a, g: jax_ep.dispatch(a.x, handle=jax_ep.layout(a.index, group=g), alignment=8),
             ValueError, "alignment=8", "alignment=1", "alignment"),
            ("an unknown row order", {},
             lambda a, g: jax_ep.layout(a.index, group=g, row_order="token"),  # type: ignore[arg-type]
             ValueError, "'expert', 'rank'", "'token'", ""),
            ("an unknown wire", {},
             lambda a, g: jax_ep.dispatch(a.x, a.index, group=g, wire="int8"),  # type: ignore[arg-type]
             ValueError, "'fp8', 'fp8_ue8m0'", "'int8'", ""),
            ("raw rows of an exchange that is not quantised", {},
             lambda a, g: jax_ep.dispatch(a.x, a.index, group=g, dequantize=False),
             ValueError, "True", "False", 'wire="fp8"'),
            ("scales of another shape", {},
             lambda a, g: jax_ep.dispatch(
                 (a.x.astype(jnp.float8_e4m3fn), jnp.ones((TOKENS, 2))), a.index, group=g),
             ValueError, "(4, 1)", "(4, 2)", "jax_ep.quantize"),
            ("a quantised pair of other dtypes", {},
             lambda a, g: jax_ep.dispatch((a.x, jnp.ones((TOKENS, 1))), a.index, group=g),
             TypeError, "float8_e4m3fn", "float32", "jax_ep.quantize"),
            ("neither index nor handle", {},
             lambda a, g: jax_ep.dispatch(a.x, group=g),
             ValueError, "handle", "neither", "group=..."),
            ("no group", {},
             lambda a, g: jax_ep.dispatch(a.x, a.index),
             ValueError, "create_group", "None", "group=..."),
        ]
    ],
)  # fmt: skip
def test_operation(form, group, changes, call, error, expected, got, remedy):
    refuses(error, expected, got, remedy, trace, lambda a: call(a, group), make_mesh(), **changes)


CREATE_GROUP: list[tuple[dict[str, Any], type[Exception], str, str, str]] = [
    ({"num_experts": 5}, ValueError, "2 ranks", "5", "use 6 experts"),
    ({"capacity": 8, "capacity_factor": 1.5}, ValueError, "at most one", "capacity=8", "drop one"),
    ({"capacity": -1}, ValueError, "at least 0", "-1", ""),
    ({"capacity": 1.5}, TypeError, "capacity: expected an integer", "1.5", ""),
    ({"capacity_factor": -0.5}, ValueError, "above 0", "-0.5", ""),
    ({"capacity_factor": float("nan")}, ValueError, "finite", "nan", ""),
    ({"alignment": 0}, ValueError, "alignment: expected at least 1", "0", ""),
    ({"max_tokens": -1}, ValueError, "max_tokens: expected at least 0", "-1", ""),
    ({"hidden": 0}, ValueError, "hidden: expected at least 1", "0", ""),
    ({"top_k": 0}, ValueError, "top_k: expected at least 1", "0", ""),
    ({"top_k": 2.0}, TypeError, "top_k: expected an integer", "2.0", ""),
    ({"num_experts": True}, TypeError, "num_experts: expected an integer", "True", ""),
    ({"dtype": jnp.int32}, TypeError, "float16, bfloat16, float32", "int32", ""),
    ({"dtype": jnp.float8_e4m3fn}, TypeError, "float16, bfloat16, float32", "float8_e4m3fn", 'wire="fp8"'),
    ({"implementation": "nccl"}, ValueError, '"auto", "cuda" or "reference"', "'nccl'", ""),
]


@pytest.mark.parametrize(
    ("changes", "error", "expected", "got", "remedy"),
    CREATE_GROUP,
    ids=[", ".join(case[0]) for case in CREATE_GROUP],
)
def test_create_group(changes, error, expected, got, remedy):
    refuses(error, expected, got, remedy, make_group, **changes)


@pytest.mark.parametrize(
    ("mesh", "axis", "error", "expected", "got"),
    [
        (make_mesh, "tp", ValueError, "'ep': 2", "tp"),
        (make_mesh, ("ep", "ep"), ValueError, "distinct", "('ep', 'ep')"),
        (make_mesh, 0, TypeError, "axis", "0"),
        (lambda: jax.devices("cpu"), "ep", TypeError, "jax.sharding.Mesh", "list"),
    ],
)
def test_create_group_on_a_wrong_axis(mesh, axis, error, expected, got):
    refuses(error, expected, got, "", jax_ep.create_group, mesh(), axis, **SIZES)
