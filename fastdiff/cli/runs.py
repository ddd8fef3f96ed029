"""``fastdiff watch``, ``report``, ``compare`` and ``ledger``: what the records of finished or running runs tell."""

import argparse
import json
import sys

from fastdiff.config.arguments.types import VECTORS, Subcommands, at_most, count, local_path, picture, positive
from fastdiff.console import log, show
from fastdiff.errors import ConfigError
from fastdiff.outputs import require_output
from fastdiff.terminal import columns


def add(commands: Subcommands) -> None:
    """Register the commands."""
    _add_watch(commands)
    _add_report(commands)
    _add_compare(commands)
    _add_ledger(commands)


def _add_watch(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "watch",
        help="show runs live on a page of this machine",
        description="Serves a page on 127.0.0.1 until Ctrl-C: losses, also by noise level, gradient norm, learning "
        "rate, throughput and its gaps, memory, validations, sample pictures, restarts and configurations of one or "
        "several runs, while they train or afterwards. It only reads the run folders.",
    )
    parser.add_argument(
        "runs", type=local_path, nargs="*", metavar="RUN", help="run folders, or folders of runs; default: runs"
    )
    parser.add_argument("--port", type=at_most(65535), help="port; default: the first free one from 7007 on")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument(
        "--no-token",
        dest="token",
        action="store_false",
        help="let other users of this machine read the page without the token of its address",
    )
    parser.set_defaults(run=_watch)


def _add_report(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "report",
        help="write the page of runs to one file",
        description="Writes the page of `fastdiff watch`, with its pictures, to one HTML file that needs no server, no "
        "network and no other file.",
    )
    parser.add_argument("runs", type=local_path, nargs="+", metavar="RUN", help="run folder")
    parser.add_argument("out", type=local_path, metavar="OUT.html", help="file to write")
    parser.set_defaults(run=_report)


def _add_compare(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "compare",
        help="compare the validation losses of two runs",
        description="Prints and draws the difference between the losses of two runs, by bin of the log SNR, with its "
        "standard error. Both must have been trained with the same --validation.data and --validation.samples.",
    )
    parser.add_argument("a", type=local_path, metavar="RUN_A", help="run folder")
    parser.add_argument("b", type=local_path, metavar="RUN_B", help="run folder to compare with RUN_A")
    parser.add_argument("--step", type=count, metavar="N", help="step to compare; default: the newest of both runs")
    parser.add_argument("--png", type=picture(*VECTORS), help="picture to write; default: RUN_B/compare-RUN_A.png")
    parser.set_defaults(run=_compare)


def _add_ledger(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "ledger",
        help="account for the time of a run: goodput, costs, stragglers, and what more of it would bring",
        description="Sums RUN/ledger.jsonl: every second since the first start, through kills and requeues, is a step "
        "kept or lost, a wait for data, compilation, start, save, validation, sampling, stop, queue, or unknown. With "
        "validations in the run it also extrapolates their loss.",
    )
    parser.add_argument("folder", type=local_path, metavar="RUN", help="run folder")
    parser.add_argument("--price", type=positive, metavar="DOLLARS", help="price of a GPU-hour")
    parser.add_argument("--watts", type=positive, metavar="W", help="power of a GPU; default: as measured")
    parser.add_argument(
        "--next",
        type=positive,
        metavar="GPU_HOURS",
        help="GPU-hours whose gain is to be expected; default: a tenth of those so far",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=_ledger)


def _watch(arguments: argparse.Namespace) -> None:
    from fastdiff.dashboard.access import new_token
    from fastdiff.dashboard.folders import Folders
    from fastdiff.dashboard.server import HOST, bind, serve

    folders = Folders(arguments.runs)
    listening = bind(arguments.port)
    address = f"http://{HOST}:{listening.getsockname()[1]}"
    token = new_token() if arguments.token else None
    show(f"{folders.in_words()}: {address} (Ctrl-C ends)")
    show(f"for other users of this machine: {address}{f'/?token={token}' if token else ', without a token'}")
    if arguments.open:
        import webbrowser

        webbrowser.open(address)
    try:
        serve(folders, listening, token)
    except KeyboardInterrupt:
        print("\nno longer served; the runs go on")


def _report(arguments: argparse.Namespace) -> None:
    from fastdiff.dashboard.report import write_report

    if arguments.out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{arguments.out}: expected the name of a file to write, with .html, as the last argument")
    size = write_report(arguments.runs, arguments.out)
    show(f"written: {arguments.out} ({size / 2**20:.1f} MiB)")


def _compare(arguments: argparse.Namespace) -> None:
    from fastdiff.evaluation.comparison import compare, draw, in_words, read_both

    found = compare(*read_both(arguments.a, arguments.b, arguments.step))
    path = arguments.png or arguments.b / f"compare-{arguments.a.resolve().name}.png"
    if arguments.png is None:
        log.info(f"the picture goes into RUN_B, {path}; --png names another place")
    require_output(path)
    show(in_words(found, columns(sys.stdout)))
    draw(found, path)
    show(f"drawn: {path}")


def _ledger(arguments: argparse.Namespace) -> None:
    from fastdiff.config.run_record import require_run
    from fastdiff.evaluation import forecast
    from fastdiff.evaluation.validation_files import steps_of
    from fastdiff.ledger import report
    from fastdiff.ledger.reader import read_ledger

    folder = arguments.folder
    require_run(folder)
    sums = read_ledger(folder)
    cost = report.costs(sums, arguments.price, arguments.watts)
    gpu_hours = arguments.next or sums.gpu_hours / 10
    steps = round(gpu_hours * sums.steps_kept / sums.gpu_hours) if sums.gpu_hours else 0
    ahead = forecast.look_ahead(folder, steps) if steps and steps_of(folder) else None
    if arguments.json:
        found = report.as_json(folder, sums, cost)
        print(json.dumps(found | {"outlook": None if ahead is None else forecast.as_json(ahead)}, indent=1))
        return
    show(report.in_words(folder, sums, cost, columns(sys.stdout)))
    show("")
    show("no forecast: the run has no validation, or no step" if ahead is None else forecast.in_words(ahead, gpu_hours))
