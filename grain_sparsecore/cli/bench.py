"""``bench``: measure speed and memory, beside jax-tpu-embedding if asked to."""

import argparse
import dataclasses
import json
from typing import Any

from grain_sparsecore.cli.files import Outputs, check_json, write_json
from grain_sparsecore.cli.options import add_json, positive
from grain_sparsecore.cli.output import format_table

_RATIOS = (
    ("once_cpu_ratio", "once cpu"),
    ("changed_cpu_ratio", "changed cpu"),
    ("once_wall_ratio", "once wall"),
    ("changed_wall_ratio", "changed wall"),
    ("busy_wall_ratio", "busy wall"),
)


def add_parser(subparsers: Any) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "bench",
        help="measure speed and memory",
        description=(
            "Prepares batches of published models' shapes and prints ns of CPU per "
            "id. Beside a peer it also prints the peer's time over ours, median of "
            "paired rounds: once (limits fit), changed (limits grew) and busy (a "
            "Python thread computes meanwhile); above 1, we are ahead."
        ),
    )
    parser.add_argument(
        "--cases",
        nargs="*",
        metavar="NAME",
        help="only these cases; without a name none, for --growth or --hosts alone",
    )
    parser.add_argument("--paths", nargs="+", metavar="NAME", help="only these paths")
    parser.add_argument(
        "--partitions", nargs="+", type=positive, metavar="N", help="32 256 if left out"
    )
    parser.add_argument(
        "--against", metavar="PEER", help="jax-tpu-embedding, if installed"
    )
    parser.add_argument(
        "--rounds", type=positive, metavar="N", help="paired rounds a case"
    )
    parser.add_argument(
        "--workers",
        nargs="+",
        type=_count,
        metavar="W",
        help="also measure the whole pipeline, with W worker processes",
    )
    parser.add_argument(
        "--reader-threads",
        nargs="+",
        type=positive,
        metavar="T",
        help="with --workers: threads that read in each process; 1 if left out",
    )
    parser.add_argument(
        "--growth",
        action="store_true",
        help="also measure batches whose tables, partitions or ids per sample grow",
    )
    parser.add_argument(
        "--hosts",
        nargs="+",
        type=positive,
        metavar="H",
        help="also measure the agreement of H local processes on limits",
    )
    parser.add_argument(
        "--windows",
        nargs="+",
        type=positive,
        metavar="K",
        help="with --hosts: batches per agreement; 1 8 32 if left out",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    """An argparse type: a whole number from 0 up."""
    return 0 if text == "0" else positive(text)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    check_json(args.json)
    # Imported here: the other commands need neither grain nor numba so early.
    from grain_sparsecore import bench

    given = {}
    for field in dataclasses.fields(bench.BenchOptions):
        value = getattr(args, field.name)
        if value is not None:
            given[field.name] = tuple(value) if isinstance(value, list) else value
    options = bench.BenchOptions(**given)
    rows = []
    for row in bench.run_bench(options):
        rows.append(row)
        name = f"{row['case']} N={row['n_partitions']} {row['path']}"
        print(f"{name}: {row['ns_per_id']['once_cpu']} ns/id", flush=True)
    if rows:
        print(f"\n{format_rows(rows)}", flush=True)
    result = {"rows": rows}
    for key, title, measure, format_part in (
        (
            "pipelines",
            "whole pipeline, per batch",
            bench.run_pipelines,
            format_pipelines,
        ),
        ("growth", "growth of a batch", bench.run_growth, format_growth),
        (
            "coordination",
            "agreement of local processes",
            bench.run_coordination,
            format_coordination,
        ),
    ):
        result[key] = list(measure(options))
        if result[key]:
            print(f"\n{title}\n{format_part(result[key])}", flush=True)
    outputs = Outputs()
    text = json.dumps(result, indent=2)
    outputs.write("json", args.json, lambda path: write_json(path, text))
    return outputs.code


def format_rows(rows: list[dict[str, Any]]) -> str:
    """The table for people."""
    ratios = [pair for pair in _RATIOS if pair[0] in rows[0]]
    header = ("case", "N", "path", "ns/id cpu", "busy wall ns/id", "layout ns/slot")
    header += ("peak B/id",)
    lines = []
    for row in rows:
        cells = [
            row["case"],
            row["n_partitions"],
            row["path"],
            row["ns_per_id"]["once_cpu"],
            row["ns_per_id"]["busy_wall"],
            row["repartition_ns_per_slot"],
            _or_dash(row["peak_bytes_per_id"]),
        ]
        for key, _ in ratios:
            low, high = row["spread"][key]
            cells.append(f"{row[key]:.2f} ({low:.2f}-{high:.2f})")
        lines.append(tuple(cells))
    return format_table((*header, *(title for _, title in ratios)), lines)


def format_pipelines(pipelines: list[dict[str, Any]]) -> str:
    """The table of the whole pipeline."""
    header = ("case", "N", "workers", "threads", "wall ms", "main cpu ms")
    header += ("worker cpu ms",)
    keys = ("case", "n_partitions", "workers", "reader_threads", "wall_ms")
    keys += ("main_cpu_ms",)
    lines = []
    for row in pipelines:
        share = row["main_share"]
        share = "-" if share is None else f"{share:.0%}"
        cells = (*(row[key] for key in keys), _or_dash(row["worker_cpu_ms"]), share)
        lines.append(cells)
    return format_table((*header, "main share"), lines)


def format_growth(rows: list[dict[str, Any]]) -> str:
    """The table of growing batches."""
    header = ("tables", "N", "ids/sample", "path", "slots/id", "ns/id cpu", "peak B/id")
    keys = ("tables", "n_partitions", "ids_per_sample", "path")
    lines = []
    for row in rows:
        lines.append(
            (
                *(row[key] for key in keys),
                f"{row['slots'] / row['ids']:.1f}",
                row["ns_per_id"],
                _or_dash(row["peak_bytes_per_id"]),
            )
        )
    return format_table(header, lines)


def format_coordination(rows: list[dict[str, Any]]) -> str:
    """The table of the agreement."""
    keys = ("hosts", "window", "round_ms", "batch_ms", "cpu_ms")
    header = ("hosts", "window", "round ms", "ms/batch", "cpu ms/batch")
    return format_table(header, [tuple(row[key] for key in keys) for row in rows])


def _or_dash(value: float | None) -> float | str:
    return "-" if value is None else value
