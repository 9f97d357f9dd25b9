"""`python -m jax_ep bench ...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


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
    _add_throughput_options(throughput)
    throughput.set_defaults(run=_bench_throughput)
    overlap = benchmarks.add_parser(
        "overlap",
        help="exchanges beside a matmul, on all local devices",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_overlap_options(overlap)
    overlap.set_defaults(run=_bench_overlap)
    plot = benchmarks.add_parser(
        "plot",
        help="draw the times of records, and write them as a Markdown table",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    plot.add_argument("records", type=Path, nargs="+", metavar="RECORD")
    plot.add_argument("--over", choices=("tokens", "sms"), default="tokens", help="what the times are drawn over")
    plot.add_argument("--ops", nargs="+", help="draw and write these only, such as combine_backward; all if not given")
    plot.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture and the table")
    plot.set_defaults(run=_bench_plot)
    options = parser.parse_args(arguments)
    return options.run(options)


def _bench_layout(options: argparse.Namespace) -> int:
    from jax_ep.bench import layout

    sizes = {"tokens": options.tokens, "top_k": options.top_k, "num_experts": options.experts}
    results = [result for ranks in options.ranks for result in layout.run(**sizes, ranks=ranks, runs=options.runs)]
    return _report("layout", results, options.out)


def _add_throughput_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096], help="tokens of each rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--routing", choices=("uniform", "zipf"), default="uniform", help="how tokens pick experts")
    parser.add_argument("--sms", type=int, nargs="+", default=[0], help="SMs of a kernel; 0 for the group's choice")
    parser.add_argument("--row-orders", nargs="+", choices=("expert", "rank"), default=["expert", "rank"])
    parser.add_argument(
        "--phases", choices=("forward", "backward", "all"), default="all", help="of jax_ep's operations"
    )
    parser.add_argument(
        "--peers", action=argparse.BooleanOptionalAction, default=True, help="with what XLA offers instead, forward"
    )
    parser.add_argument(
        "--ragged-timeout", type=float, default=120.0, help="seconds for ragged_all_to_all of each number of tokens"
    )
    parser.add_argument("--implementation", choices=("auto", "cuda", "reference"), default="auto")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the record")


def _bench_throughput(options: argparse.Namespace) -> int:
    from jax_ep.bench import throughput, workload

    plan = throughput.Plan(
        sizes=[
            workload.Sizes(tokens, options.hidden, options.experts, options.top_k, options.routing)
            for tokens in options.tokens
        ],
        sms=options.sms,
        implementation=options.implementation,
        phases=throughput.PHASES if options.phases == "all" else (options.phases,),
        row_orders=options.row_orders,
        with_peers=options.peers,
        runs=options.runs,
        ragged_timeout_s=options.ragged_timeout,
    )
    results, rate = throughput.measure(plan)
    if rate is not None:
        print(f"link: {rate:.1f} GB/s each way at once, by the copy engines")
    return _report("throughput", results, options.out, link_gigabytes_per_second=rate)


def _add_overlap_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096], help="tokens of each rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument(
        "--intermediate", type=int, nargs="+", default=[2048], help="of the experts whose matmul runs beside it"
    )
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--sms", type=int, nargs="+", default=[0, 8, 16, 32], help="SMs of a kernel; 0: by the formula")
    parser.add_argument("--row-orders", nargs="+", choices=("expert", "rank"), default=["expert", "rank"])
    parser.add_argument("--timelines", action=argparse.BooleanOptionalAction, default=True, help="by JAX's profiler")
    parser.add_argument("--implementation", choices=("auto", "cuda", "reference"), default="auto")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the record")


def _bench_overlap(options: argparse.Namespace) -> int:
    from jax_ep.bench import overlap, workload

    plan = overlap.Plan(
        sizes=[workload.Sizes(tokens, options.hidden, options.experts, options.top_k) for tokens in options.tokens],
        intermediates=options.intermediate,
        sms=options.sms,
        row_orders=options.row_orders,
        implementation=options.implementation,
        runs=options.runs,
        with_timelines=options.timelines,
    )
    results, timelines = overlap.measure(plan)
    return _report("overlap", results, options.out, timelines=timelines)


def _bench_plot(options: argparse.Namespace) -> int:
    try:
        from jax_ep.bench import plot
    except ModuleNotFoundError as error:
        print(f"bench plot: expected matplotlib, got none ({error}); pip install matplotlib", file=sys.stderr)
        return 2
    over = {"tokens": "tokens", "sms": "num_sms"}[options.over]
    for path in plot.write(options.records, options.out, over=over, ops=options.ops):
        print(path)
    return 0


def _report(benchmark: str, results: list, folder: Path, **machine: Any) -> int:
    from jax_ep.bench.record import Record

    columns = "{:17} {:24} {:13} {:6} {:>5} {:>6} {:>4} {:>10} {:>10} {:>10} {:>10} {:>10}  {}"
    heads = ("op", "implementation", "dtype", "order", "ranks", "tokens", "SMs", "median us", "p10", "p90", "limit us")
    print(columns.format(*heads, "moved/must", "note"))
    for r in results:
        times = ("-" if us is None else f"{us:.1f}" for us in (r.median_us, r.p10_us, r.p90_us, r.limit_us))
        which = (r.op, r.implementation, r.dtype, r.row_order, r.ranks, r.tokens, r.num_sms or "-")
        moved = "-" if r.moved_over_must is None else f"{r.moved_over_must:.2f}"
        print(columns.format(*which, *times, moved, r.note))
    print(f"record: {Record.here(results, **machine).write(folder, benchmark)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
