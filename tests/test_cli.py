"""The command line: what it prints where, its exit codes, and that the package loads without torch."""

import io
import json
import os
import subprocess
import sys
from dataclasses import fields

import nbformat
import pytest
from jupyterlab.labapp import LabApp

import pcourse
from pcourse import ModelConfig, ParallelConfig, RankError, Report, TrainConfig, cli
from pcourse.options import GROUPS, HELP
from pcourse.progress import Progress

SIZES = {"layers": 1, "hidden": 32, "heads": 4, "sequence": 16, "batch": 2, "steps": 2, "warmup": 0, "tp": 2}
SMALL = [f"--{name}={value}" for name, value in SIZES.items()]


@pytest.fixture
def command(capsys):
    """command(*arguments) -> exit code, standard output, standard error."""

    def call(*arguments: str):
        try:
            code = cli.main(list(arguments))
        except SystemExit as e:
            code = e.code
        return code, *capsys.readouterr()

    return call


# --- the package -------------------------------------------------------------------------------------------------


def test_importing_the_package_and_its_command_line_loads_no_torch():
    script = "import sys, pcourse.cli; pcourse.World, pcourse.ModelConfig; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_public_name_loads_and_is_listed():
    assert set(pcourse.__all__) <= set(dir(pcourse))
    assert all(getattr(pcourse, name) for name in pcourse.__all__)


def test_a_name_that_is_not_there_is_answered_with_those_that_are():
    with pytest.raises(AttributeError, match="'mesure'; it has .*measure"):
        pcourse.mesure  # noqa: B018


# --- run ---------------------------------------------------------------------------------------------------------


def test_run_prints_a_report_that_can_be_read(command):
    code, out, err = command("run", *SMALL, "--backend", "threads")
    assert code == 0, err
    assert "measured on 2 threads" in out and "tp=2" in out
    for words in ("tokens/s", "loss", "tp all_reduce", "on the wire", "activations", "waiting", "rank 1"):
        assert words in out


def test_with_json_the_output_is_the_report_alone(command):
    code, out, err = command("run", *SMALL, "--backend", "threads", "--json")
    assert code == 0, err
    report = Report.from_json(out)
    assert (report.parallel.tp, report.model.layers, len(report.loss)) == (2, 1, 2)
    assert json.loads(out)["provenance"] == "measured"


def test_run_as_a_program_of_real_processes():
    program = [sys.executable, "-m", "pcourse", "run", *SMALL, "--ranks", "2", "--backend", "gloo", "--json"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert "2 CPU ranks over gloo" in Report.from_json(done.stdout).device


def configs(*arguments: str):
    return cli.configs_from(cli._parser().parse_args(["run", *arguments]))


def test_options_left_out_are_the_configs_own_defaults():
    assert configs() == (ModelConfig(), ParallelConfig(), TrainConfig())


VALUES = {int: ("3", 3), float: ("0.5", 0.5), str: ("gpipe", "gpipe")}
SPECIAL = {
    "heads": ("4", 4),
    "kv_heads": ("2", 2),
    "attention": ("fused", "fused"),
    "dtype": ("bfloat16", "bfloat16"),
    "partition": ("memory", "memory"),
    "recompute": ("full", "full"),
    "grad_dtype": ("float32", "float32"),
    "optimizer": ("sgd", "sgd"),
    "learning_rate": ("0.5", 0.5),
    "clip": ("0.5", 0.5),
    "hidden": ("64", 64),
    "ffn": ("100", 100),
}


@pytest.mark.parametrize(("config", "field"), [(c, f) for c in GROUPS.values() for f in fields(c)])
def test_every_field_is_an_option(config, field):
    flag = "--" + field.name.replace("_", "-")
    if isinstance(field.default, bool):
        given, value = [flag if not field.default else f"--no-{flag[2:]}"], not field.default
    else:
        text, value = SPECIAL.get(field.name) or VALUES[type(field.default)]
        given = [flag, text]
    assert config(**{field.name: value}) in configs(*given)
    assert field.name in HELP


def test_none_is_a_value_where_it_is_one():
    assert configs("--clip", "none", "--ffn", "none", "--learning-rate", "none") == configs()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--heads", "8", "--tp", "3"], "tp can be 1, 2, 4, 8"),
        (["run", "--ranks", "4", "--tp", "2"], "ranks can be 2"),
        (["run", "--dtype", "int8"], "dtype can be float32, bfloat16, float64"),
        (["run", "--layers", "many"], "argument --layers: 'many' is not a whole number"),
        (["run", "--clip", "x"], "argument --clip: 'x' is not a number or none"),
        (
            ["run", "--layer", "3"],
            "there is no option --layer 3; did you mean --layers?\n`python -m pcourse run --help`",
        ),
        (["run", "--timeout", "inf"], "argument --timeout: 'inf' is not a number of seconds above 0"),
        (["run", "--backend", "mpi"], "choose from"),
        (["rnu"], "choose from"),
        (["build", "--check", "--force"], "not allowed with argument"),
        (["build", "no_such_lesson"], "no notebook is called 'no_such_lesson'; there is "),
        (["check", "no_such_exercise"], "no notebook is called 'no_such_exercise'; there is "),
    ],
)
def test_wrong_arguments_leave_with_2_and_say_what_would_do(command, arguments, says):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert says in err and err.startswith("pcourse: ")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (RankError("rank 1 of 2 raised KeyError"), 1, "rank 1 of 2 raised KeyError"),
        (KeyboardInterrupt, 130, "interrupted"),
    ],
)
def test_a_run_that_fails_leaves_with_1_and_one_that_is_interrupted_with_130(command, monkeypatch, error, code, words):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("pcourse.train.measure", fail)
    assert command("run", *SMALL, "--json") == (code, "", f"pcourse: {words}\n")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_is_drawn_on_a_terminal_and_gone_at_the_end(monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with Progress("measuring") as progress:
        progress(1, 2, note="waiting for another run")
    assert "waiting for another run\n" in terminal.getvalue()
    assert f"[{'#' * 15}{'.' * 15}] 1/2" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_without_a_terminal_only_notes_are_written(capsys):
    with Progress("measuring") as progress:
        progress(1, 2)
        progress(2, 2, note="waiting for another run")
    assert capsys.readouterr().err == "waiting for another run\n"


# --- the course --------------------------------------------------------------------------------------------------


@pytest.fixture
def lab(monkeypatch, tmp_path):
    """A course in `tmp_path`, and a list of the options with which Lab was started."""
    started = []
    (tmp_path / "notebooks").mkdir()
    (tmp_path / cli.START).touch()
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    monkeypatch.setattr(LabApp, "launch_instance", started.append)
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "/mine")
    return started


def test_without_a_command_the_course_opens_at_its_start(command, lab, tmp_path):
    assert command()[0] == 0
    assert f"--ServerApp.root_dir={tmp_path}" in lab[0]
    assert "--LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb" in lab[0]
    assert os.environ["JUPYTER_CONFIG_PATH"].split(os.pathsep) == [str(tmp_path / "pcourse/jupyter"), "/mine"]


def test_labs_own_options_pass_through_and_win(command, lab):
    command("--no-browser", "--port", "8899", "--LabApp.default_url=/lab")
    assert lab[0][-4:] == ["--no-browser", "--port", "8899", "--LabApp.default_url=/lab"]
    assert sum(option.startswith("--LabApp.default_url") for option in lab[0]) == 1


@pytest.mark.parametrize(("user", "added"), [(0, True), (1000, False)])
def test_lab_starts_for_root_as_in_a_container_too(command, lab, monkeypatch, user, added):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    command("--no-browser")
    assert ("--allow-root" in lab[0]) is added


def test_a_package_without_its_notebooks_says_so(command, lab, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "ROOT", tmp_path / "elsewhere")
    code, _, err = command()
    assert code == 1 and "run pcourse from a clone" in err and not lab


# --- check -------------------------------------------------------------------------------------------------------

ANSWERS = {
    "class NotSolvedYet(Exception): pass\nclass CheckFailed(Exception): pass": "",
    "# is it?\nassert True": "check",
    "raise NotSolvedYet('write f above')": "check",
    "raise CheckFailed('the bias is added tp times')": "check",
    "missing": "check",
    "while True: pass": "",
}


def exercise(cells: dict[str, str]) -> nbformat.NotebookNode:
    """A notebook of these cells, each with its tag."""
    notebook = nbformat.v4.new_notebook()
    for source, tag in cells.items():
        notebook.cells.append(nbformat.v4.new_code_cell(source, metadata={"tags": [tag]} if tag else {}))
    return notebook


@pytest.fixture
def exercises(monkeypatch, tmp_path):
    """exercises(name, cells) writes one into a course without others."""
    (tmp_path / "exercises").mkdir()
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    return lambda name, cells: nbformat.write(exercise(cells), tmp_path / f"exercises/{name}.ipynb")


def test_check_tells_each_answer_apart(command, exercises):
    exercises("01_one", ANSWERS)
    code, out, _ = command("check", "01", "--timeout", "1")
    assert code == 1
    assert [line.split(maxsplit=1) for line in out.splitlines()] == [
        ["01_one"],
        ["solved", "assert True"],
        ["not", "solved yet  raise NotSolvedYet('write f above')"],
        ["write", "f above"],
        ["wrong", "raise CheckFailed('the bias is added tp times')"],
        ["the", "bias is added tp times"],
        ["wrong", "missing"],
        ["NameError:", "name 'missing' is not defined"],
        ["broken", "while True: pass"],
        ["it", "did not end within 1 s"],
    ]


def test_check_leaves_with_0_when_all_is_solved(command, exercises):
    exercises("01_one", {"assert True": "check"})
    code, out, _ = command("check", "--json")
    assert code == 0
    assert json.loads(out) == {"01_one": [{"cell": "assert True", "state": "solved", "message": ""}]}


def test_check_leaves_with_1_when_nothing_is_checked(command, exercises):
    assert command("check")[0] == 1
    exercises("01_one", {"1 + 1": ""})
    assert command("check")[0] == 1


def test_check_survives_an_answer_that_ends_the_kernel(command, exercises):
    exercises("01_one", {"import os; os._exit(1)": "", "assert True": "check"})
    code, out, _ = command("check")
    assert code == 1 and "a cell ended the kernel" in out
