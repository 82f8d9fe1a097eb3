"""``train``: train the model of a configuration, in one process or several."""

import argparse
import contextlib
import sys
from typing import Any, TextIO

from grain_sparsecore.cli.files import Outputs, check_json
from grain_sparsecore.cli.options import (
    add_config,
    add_dump_failing,
    add_json,
    positive,
    with_dump_failing,
)
from grain_sparsecore.cli.output import (
    ProgressPrinter,
    format_summary,
    own_stdout,
    warnings_on,
)
from grain_sparsecore.cli.reporting import (
    add_limits,
    add_metrics,
    add_report,
    check_outputs,
    forwarded,
    make_watcher,
    write_record,
    write_results,
)
from grain_sparsecore.config import Config, load_config
from grain_sparsecore.launch import has_joined, join_job, launch, local_device_count
from grain_sparsecore.summary import TrainSummary
from grain_sparsecore.watching import RunWatcher


def add_parser(subparsers: Any) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "train",
        help="train the model of a configuration",
        description=(
            "Trains the model of CONFIG and prints a summary. Without --processes it "
            "runs in this process, as part of the job that JAX_COORDINATOR_ADDRESS, "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID name where they are set."
        ),
    )
    add_config(parser)
    parser.add_argument(
        "--processes",
        type=positive,
        metavar="P",
        help="start P local processes, each a host with CPU devices of its own",
    )
    parser.add_argument(
        "--devices-per-process",
        type=positive,
        metavar="D",
        help="CPU devices of each such process (1)",
    )
    parser.add_argument(
        "--join",
        action="store_true",
        help="join the job that JAX finds: Cloud TPU, Slurm, Kubernetes, MPI",
    )
    parser.add_argument(
        "--steps", type=positive, metavar="N", help="steps to train (train.steps)"
    )
    add_dump_failing(parser)
    add_json(parser)
    add_limits(parser)
    add_report(parser)
    add_metrics(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    local = args.processes is not None or args.devices_per_process is not None
    if local and args.join:
        args.parser.error("--join does not go with --processes: one job or the other")
    check_json(args.json)
    check_outputs(args)
    # Before any process is started: errors of the file are said once, and at once.
    config = load_config(args.config, overrides=args.set)
    config = with_dump_failing(config, args.dump_failing)
    if local:
        _check_topology(config, args.processes or 1, args.devices_per_process)
        return launch(
            _arguments_of_each(args),
            processes=args.processes or 1,
            devices_per_process=args.devices_per_process,
        )
    return _train(args, config)


def _check_topology(
    config: Config, processes: int, devices_per_process: int | None
) -> None:
    """Refuses what no process could use, before there are any."""
    devices = local_device_count(devices_per_process)
    if devices is not None:
        config.layout(
            config.topology.on_devices(
                global_count=processes * devices, local_count=devices
            )
        )


def _arguments_of_each(args: argparse.Namespace) -> list[str]:
    arguments = ["train", args.config]
    for text in args.set:
        arguments += ["--set", text]
    if args.steps is not None:
        arguments += ["--steps", str(args.steps)]
    if args.json is not None:
        arguments += ["--json", str(args.json)]
    if args.dump_failing is not None:
        arguments += ["--dump-failing", str(args.dump_failing)]
    return arguments + forwarded(args)


def _train(args: argparse.Namespace, config: Config) -> int:
    join_job(detect=args.join, timeout_seconds=config.pipeline.timeout_seconds)
    import jax

    from grain_sparsecore.train import train

    stream = own_stdout() if has_joined() else sys.stdout
    first = jax.process_index() == 0
    printer = ProgressPrinter(stream, terminal=stream.isatty())
    outputs = Outputs()
    watcher = make_watcher(args, config.layout(), outputs) if first else None
    with warnings_on(stream) if first else contextlib.nullcontext():
        summary = train(
            config,
            steps=args.steps,
            on_step=printer if first else None,
            watcher=watcher,
        )
        if first:
            printer.end()
            _report(args, config, summary, watcher, stream, outputs)
    return outputs.code


def _report(
    args: argparse.Namespace,
    config: Config,
    summary: TrainSummary,
    watcher: RunWatcher | None,
    stream: TextIO,
    outputs: Outputs,
) -> None:
    """Prints and writes what the job left behind; what cannot fail comes first."""
    asked = args.steps or config.train.steps
    if summary.steps < asked:
        print(
            f"the input ended after {summary.steps} of {asked} steps "
            "(source.epochs = 0 repeats it without end)",
            file=stream,
        )
    print(format_summary(summary), file=stream, flush=True)
    write_results(
        args,
        outputs,
        summary.to_json(),
        summary.limits,
        layout=config.layout(),
        steps=summary.steps,
    )
    if watcher is not None:
        record = watcher.finish(summary, title=args.config, config=config)
        if record is not None:
            write_record(args, record, outputs)
