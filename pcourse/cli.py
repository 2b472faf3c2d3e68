"""The command line: `python -m pcourse` opens the course, its commands measure, check and build.

Exit codes: 0, 1 (the run failed, or an answer is not right yet), 2 (wrong arguments), 130 (Ctrl-C).
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import math
import os
import sys
from dataclasses import asdict

from pcourse import __version__
from pcourse.config import ConfigError, ParallelConfig, validate
from pcourse.course import ROOT, UnknownName, pick
from pcourse.headless import BROKEN, SOLVED, Verdict, check_notebook
from pcourse.launch.torchrun import TorchrunWorld
from pcourse.options import add_config_options, configs_from
from pcourse.pace import CLOCKS, Pace, machine_of
from pcourse.progress import Progress
from pcourse.world import BACKENDS, RankError, World

PROGRAM = "python -m pcourse"
START = "notebooks/00_start_here.ipynb"
FAILED, WRONG_ARGUMENTS, INTERRUPTED = 1, 2, 130


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code, or leaves with it where argparse does."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help", "--version")):
            return open_course(argv)
        arguments, unknown = _parser().parse_known_args(argv)
        if unknown:
            arguments.refuse(f"there is no option {' '.join(unknown)}{_meant(unknown[0], arguments.options)}")
        code = arguments.command(arguments)
        sys.stdout.flush()
        return code
    except (ConfigError, UnknownName) as e:
        return _complain(e, WRONG_ARGUMENTS)
    except RankError as e:
        return _complain(e, FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:  # who read our output has seen enough; Python must not try to flush the rest at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _meant(option: str, legal: list[str]) -> str:
    close = difflib.get_close_matches(option.split("=")[0], legal, 1)
    return f"; did you mean {close[0]}?" if close else ""


def _complain(words, code: int) -> int:
    print(f"pcourse: {words}", file=sys.stderr)
    return code


# --- the course --------------------------------------------------------------------------------------------------


def open_course(lab_options: list[str]) -> int:
    """Open the course in JupyterLab; `lab_options` are Lab's own."""
    if not (ROOT / START).exists():
        return _complain(f"{START} is missing in {ROOT}; run pcourse from a clone of its repository", FAILED)
    from jupyterlab.labapp import LabApp

    ours = {"--ServerApp.root_dir": ROOT, "--LabApp.default_url": f"/lab/tree/{START}"}
    options = [f"{name}={value}" for name, value in ours.items() if not any(o.startswith(name) for o in lab_options)]
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # as in most containers, where Lab would refuse to start
        options.append("--allow-root")
    _add_lab_settings()
    LabApp.launch_instance([*options, *lab_options])
    return 0


def _add_lab_settings() -> None:
    """Defaults for this Lab, which the learner's own settings override: no box that asks about Jupyter's news."""
    folders = [str(ROOT / "pcourse/jupyter"), os.environ.get("JUPYTER_CONFIG_PATH")]
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, folders))


# --- run ---------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> int:
    """measure one configuration on this machine"""
    model, parallel, train = configs_from(arguments)
    _require_ranks(arguments.ranks, parallel)
    validate(model, parallel, train)
    pace = None if arguments.pace is None else Pace.parse(arguments.pace)
    clock = arguments.clock or ("wall" if pace is None else "paced")
    machine_of(clock, None, pace, parallel)  # refuses what does not go together before torch is loaded
    # Standard output is for the report alone; what a rank may print goes beside it.
    with Progress("measuring") as progress, contextlib.redirect_stdout(sys.stderr):
        from pcourse.train import measure

        world = TorchrunWorld.here() or World(parallel.ranks, backend=arguments.backend)
        kept = {"clock": clock, "pace": pace}
        report = measure(model, parallel, train, world, **kept, progress=progress, timeout=arguments.timeout)
    if isinstance(world, TorchrunWorld) and world.rank:  # torchrun has started several of us: one speaks
        return 0
    if arguments.json:
        print(report.to_json())
    else:
        from pcourse.summary import summary

        print(summary(report))
    return 0


def _run_options(parser: argparse.ArgumentParser) -> None:
    add_config_options(parser)
    group = parser.add_argument_group("the run")
    group.add_argument("--ranks", type=int, metavar="N", help="only checked: it must be tp · pp · dp · cp")
    group.add_argument("--backend", choices=BACKENDS, default="auto", help="what carries the messages [auto]")
    pace = "how long a stage's forward is to last, its backward twice that: 20ms, or 10ms,20ms by stage"
    group.add_argument("--pace", metavar="T", help=pace)
    clock = (
        "what passes: this machine's time, the pace's, or none, the pace's being reckoned [paced if there is a pace]"
    )
    group.add_argument("--clock", choices=CLOCKS, help=clock)
    group.add_argument("--timeout", type=_seconds, default=600, metavar="S", help="seconds a run may take [600]")
    group.add_argument("--json", action="store_true", help="write the report as JSON, and nothing else")


def _require_ranks(ranks: int | None, parallel: ParallelConfig) -> None:
    if ranks not in (None, parallel.ranks):
        degrees = " · ".join(f"{axis}={getattr(parallel, axis)}" for axis in ("tp", "pp", "dp", "cp"))
        raise ConfigError(
            f"{degrees} makes {parallel.ranks} ranks, not {ranks}; ranks can be {parallel.ranks}, or choose degrees "
            f"whose product is {ranks}"
        )


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")


# --- check -------------------------------------------------------------------------------------------------------


def check(arguments: argparse.Namespace) -> int:
    """run your exercises and say which answers are right"""
    import nbformat

    folder = ROOT / "exercises"
    names = pick(arguments.names, [path.stem for path in folder.glob("*.ipynb")])
    if not names:
        return _complain(f"there is no exercise in {folder}; run pcourse from a clone of its repository", FAILED)
    results: dict[str, list[Verdict]] = {}
    for name in names:
        try:
            notebook = nbformat.read(folder / f"{name}.ipynb", as_version=4)
        except nbformat.reader.NotJSONError:
            results[name] = [Verdict("the notebook", BROKEN, "it is not JSON: an unfinished merge?")]
            print(_verdicts_text(name, results[name]), file=sys.stderr if arguments.json else sys.stdout)
            continue
        with Progress(name) as progress:
            results[name] = check_notebook(notebook, folder, timeout=arguments.timeout, on_cell=progress)
        if not arguments.json:
            print(_verdicts_text(name, results[name]))
    if arguments.json:
        print(json.dumps({name: [asdict(verdict) for verdict in verdicts] for name, verdicts in results.items()}))
    return 0 if all(map(_all_solved, results.values())) else FAILED


def _check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="an exercise, or how its name begins [all]")
    parser.add_argument("--timeout", type=_seconds, default=120, metavar="S", help="seconds a cell may take [120]")
    parser.add_argument("--json", action="store_true", help="write what was found as JSON, and nothing else")


def _all_solved(verdicts: list[Verdict]) -> bool:
    return bool(verdicts) and all(verdict.state == SOLVED for verdict in verdicts)


def _verdicts_text(name: str, verdicts: list[Verdict]) -> str:
    lines = [name]
    for verdict in verdicts:
        lines.append(f"  {verdict.state:<14}  {verdict.cell}")
        lines += [f"  {'':<14}  {line}" for line in verdict.message.splitlines()]
    return "\n".join(lines)


# --- build -------------------------------------------------------------------------------------------------------


def build(arguments: argparse.Namespace) -> int:
    """for authors: make the notebooks from their sources"""
    from pcourse import authoring

    outcomes = []
    for outcome in authoring.build(arguments.names, check=arguments.check, force=arguments.force):
        outcomes.append(outcome)
        if not arguments.json and outcome.state != authoring.CURRENT:
            print(outcome)
    if arguments.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes]))
    return 0 if all(outcome.fine for outcome in outcomes) else FAILED


def _build_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="a notebook, or how its name begins [all]")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--check", action="store_true", help="build nothing, fail where a notebook is not as its source")
    how.add_argument("--force", action="store_true", help="build also what has not changed")
    parser.add_argument("--json", action="store_true", help="write what was done as JSON, and nothing else")


# --- the arguments -----------------------------------------------------------------------------------------------

COMMANDS = {"run": (run, _run_options), "check": (check, _check_options), "build": (build, _build_options)}


class _Parser(argparse.ArgumentParser):
    """An error is one line: the usage of `run` would fill a screen."""

    def error(self, message: str):
        self.exit(WRONG_ARGUMENTS, f"pcourse: {message}\n`{self.prog} --help` lists what there is\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        allow_abbrev=False,
        description="Without a command, opens the course in JupyterLab; Lab's own options may follow, such as "
        "--no-browser or --port=8899.",
        epilog=f"`{PROGRAM} COMMAND --help` lists the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"pcourse {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (command, add_options) in COMMANDS.items():
        words = command.__doc__
        sub = commands.add_parser(name, help=words, description=words.capitalize() + ".", allow_abbrev=False)
        add_options(sub)
        sub.set_defaults(command=command, refuse=sub.error, options=list(sub._option_string_actions))
    return parser
