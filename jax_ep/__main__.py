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
    throughput = benchmarks.add_parser(
        "throughput",
        help="dispatch and combine of many tokens on all local devices",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    throughput.add_argument("--tokens", type=int, nargs="+", default=[4096], help="tokens of each rank")
    throughput.add_argument("--hidden", type=int, default=7168)
    throughput.add_argument("--experts", type=int, default=256)
    throughput.add_argument("--top-k", type=int, default=8)
    throughput.add_argument("--sms", type=int, nargs="+", default=[0], help="SMs of a kernel; 0 for the group's choice")
    throughput.add_argument("--implementation", choices=("auto", "cuda", "reference"), default="auto")
    throughput.add_argument("--runs", type=int, default=15)
    throughput.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the record")
    throughput.set_defaults(run=_bench_throughput)
    options = parser.parse_args(arguments)
    return options.run(options)


def _bench_layout(options: argparse.Namespace) -> int:
    from jax_ep.bench import layout

    sizes = {"tokens": options.tokens, "top_k": options.top_k, "num_experts": options.experts}
    results = [result for ranks in options.ranks for result in layout.run(**sizes, ranks=ranks, runs=options.runs)]
    return _report("layout", results, options.out)


def _bench_throughput(options: argparse.Namespace) -> int:
    from jax_ep.bench import throughput
    from jax_ep.bench.record import Result

    results: list[Result] = []
    for number, (tokens, sms) in enumerate((t, s) for t in options.tokens for s in options.sms):
        sizes = throughput.Sizes(tokens, options.hidden, options.experts, options.top_k, sms)
        results += throughput.run(
            sizes, implementation=options.implementation, runs=options.runs, peers=number % len(options.sms) == 0
        )
    return _report("throughput", results, options.out)


def _report(benchmark: str, results: list, folder: Path) -> int:
    from jax_ep.bench.record import Record

    columns = "{:10} {:18} {:13} {:7} {:>5} {:>7} {:>5} {:>10} {:>10} {:>10}"
    print(columns.format("op", "implementation", "dtype", "order", "ranks", "tokens", "SMs", "median us", "p10", "p90"))
    for r in results:
        times = (f"{us:.1f}" for us in (r.median_us, r.p10_us, r.p90_us))
        print(columns.format(r.op, r.implementation, r.dtype, r.row_order, r.ranks, r.tokens, r.num_sms or "-", *times))
    print(f"record: {Record.here(results).write(folder, benchmark)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
