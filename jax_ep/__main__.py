"""`python -m jax_ep bench ...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jax_ep", description="Expert parallelism for JAX.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    bench = commands.add_parser("bench", help="measure, and write a record", description="Measure, write a record.")
    benchmarks = bench.add_subparsers(required=True, metavar="BENCHMARK")
    layout = benchmarks.add_parser(
        "layout",
        help="layout in JAX and by the compiled module",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    layout.add_argument("--tokens", type=int, default=32768, help="tokens of all ranks together")
    layout.add_argument("--top-k", type=int, default=8)
    layout.add_argument("--experts", type=int, default=256)
    layout.add_argument("--ranks", type=int, nargs="+", default=[1, 8], help="ranks that share tokens and experts")
    layout.add_argument("--runs", type=int, default=50)
    layout.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the record")
    layout.set_defaults(run=_bench_layout)
    options = parser.parse_args(arguments)
    return options.run(options)


def _bench_layout(options: argparse.Namespace) -> int:
    from jax_ep.bench import layout

    sizes = {"tokens": options.tokens, "top_k": options.top_k, "num_experts": options.experts}
    results = [result for ranks in options.ranks for result in layout.run(**sizes, ranks=ranks, runs=options.runs)]
    return _report("layout", results, options.out)


def _report(benchmark: str, results: list, folder: Path) -> int:
    from jax_ep.bench.record import Record

    print(
        f"{'op':10} {'implementation':16} {'order':7} {'ranks':>5} {'tokens':>7} {'median us':>10} {'p10':>9} "
        f"{'p90':>9}"
    )
    for r in results:
        print(
            f"{r.op:10} {r.implementation:16} {r.row_order:7} {r.ranks:5} {r.tokens:7} "
            f"{r.median_us:10.1f} {r.p10_us:9.1f} {r.p90_us:9.1f}"
        )
    print(f"record: {Record.here(results).write(folder, benchmark)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
