"""The notebook side without a browser: pictures, predictions, the panel over a pretended run, checks."""

import asyncio
import io
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from pcourse.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig
from pcourse.lab import (
    CheckFailed,
    Choose,
    Messages,
    NotSolvedYet,
    Panel,
    Predict,
    Scoreboard,
    check,
    plots,
)
from pcourse.lab import panel as panels
from pcourse.lab.draw.ring import ring_states
from pcourse.lab.experiments import changed
from pcourse.lab.front_end import PredictFirst, front_end
from pcourse.lab.picture import DPI, stacked
from pcourse.lab.plots import (
    Picture,
    communication,
    layer_communication,
    ledger,
    ring,
    split_matrix,
    timeline,
    tradeoff,
)
from pcourse.lab.predict import parse_number
from pcourse.lab.score import verdict_text
from pcourse.report import CommunicationRow, MemoryLedger, RankReport, Report, Span
from pcourse.split import ring_chunk
from pcourse.wording import bytes_text, number_text, seconds_text
from pcourse.world import RankError, RunCancelled

MIB = 2**20
PNG = b"\x89PNG\r\n\x1a\n"


def a_report(parallel=ParallelConfig(tp=2), model=ModelConfig(layers=2), scale=1, provenance="measured", spans=True):
    """A made-up report: every rank computes, sends, waits; `scale` 0 is nothing at all."""
    step = 0.040 * scale
    ranks = []
    for rank in range(parallel.ranks):
        work = (
            Span("forward", "forward", 0, 0.3 * step, 0),
            Span("waiting", "all_reduce mlp", 0.3 * step, (0.3 + 0.01 * rank) * step),
            Span("communication", "all_reduce mlp", (0.3 + 0.01 * rank) * step, 0.5 * step),
            Span("backward", "backward", 0.5 * step, 0.9 * step, 0),
            Span("mystery", "a new kind", 0.9 * step, 0.95 * step),
        )
        sent = CommunicationRow("tp", "all_reduce", 4, 3 * MIB * scale, 2 * MIB * scale, 0.2 * step, 0.2 * step)
        held = [int(n * MIB * scale) for n in (4, 4, 8, 6, 1)]
        memory = MemoryLedger(*held, peak=21 * MIB * scale, at_peak={"parameters": held[0], "optimizer": held[2]})
        seconds = {"compute": 0.75 * step, "communication": 0.2 * step, "waiting": 0.0, "idle": 0.05 * step}
        ranks.append(RankReport(rank, memory, (sent,) if scale else (), work if spans else (), seconds))
    return Report(
        provenance, f"{parallel.ranks} made-up ranks", model, parallel, TrainConfig(), step, (step, step), (step,) * 3,
        1.0, (5.0,), (1.0,), tuple(ranks), "2026-11-29T17:03:00",
    )  # fmt: skip


def assert_drawn(picture: Picture) -> None:
    data, sizes = picture._repr_mimebundle_()
    assert picture.png.startswith(PNG)
    assert data["text/plain"] == picture.alt and len(picture.alt) > 20
    assert ("<img alt=" in data["text/html"] and 'width="' in data["text/html"]) or "<table" in data["text/html"]
    width, height = picture.size
    assert sizes["image/png"] == {"width": width, "height": height}
    pixels = int.from_bytes(picture.png[16:20], "big")
    assert abs(pixels - width * DPI / 96) <= 2  # twice what is shown
    assert len(picture.png) < 120_000


# --- pictures --------------------------------------------------------------------------------------------------------

ODD = {
    "two ranks": a_report(),
    "one rank": a_report(ParallelConfig()),
    "eight ranks": a_report(ParallelConfig(tp=8)),
    "sixteen ranks": a_report(ParallelConfig(tp=8, dp=2)),
    "nothing": a_report(scale=0),
    "no spans": a_report(spans=False, provenance="predicted"),
}


@pytest.mark.parametrize("report", ODD.values(), ids=ODD)
@pytest.mark.parametrize("draw", [timeline, ledger, communication])
def test_every_picture_draws_every_report(draw, report):
    picture = draw(report)
    assert_drawn(picture)
    assert report.source in picture.alt


def test_the_words_hold_the_numbers():
    report = a_report()
    assert "rank 1: compute 30.0 ms (75 %), communication 8.00 ms (20 %)" in timeline(report).alt
    assert "rank 0: parameters 4.00 MiB" in ledger(report).alt and "peak of the sum 21.0 MiB" in ledger(report).alt
    assert "gradients 0 B" in ledger(report, at_peak=True).alt


def test_a_prediction_stands_beside_its_measurement():
    picture = ledger(a_report(), expected=a_report(provenance="predicted"))
    assert picture.alt.index("measured, rank 0") < picture.alt.index("predicted, rank 0")
    assert picture.alt.index("predicted, rank 0") < picture.alt.index("measured, rank 1")
    assert_drawn(picture)


def test_equal_ranks_share_a_bar_where_there_are_many():
    picture = ledger([("tp=8", a_report(ParallelConfig(tp=8))), ("tp=2", a_report())])
    assert "tp=8, ranks 0–7" in picture.alt
    assert_drawn(picture)


def test_alternative_text_is_escaped():
    report = replace(a_report(), device='a "machine" <b>')
    assert "<b>" not in timeline(report).html and "&quot;machine&quot;" in timeline(report).html


def test_communication_stands_beside_theory():
    equal = communication(a_report(), {("tp", "all-reduce"): {"calls": 4, "payload": 3 * MIB, "wire": 2 * MIB}})
    assert "= theory" in equal.alt and "≠" not in equal.alt
    other = communication(a_report(), {("tp", "all_reduce"): {"calls": 2}, ("dp", "all_reduce"): {"calls": 1}})
    assert "4 ≠ 2" in other.alt and "calls: twice theory" in other.alt
    assert "none where theory has 1" in other.alt
    part = communication(a_report(), {("tp", "all_reduce"): {"calls": 4}})
    assert "= theory (calls)" in part.alt
    assert "nothing is sent" in communication(a_report(scale=0)).alt


def test_theory_may_differ_from_rank_to_rank():
    report = a_report(ParallelConfig(tp=3))
    row = {part: getattr(report.ranks[0].communication[0], part) for part in ("calls", "payload", "wire")}
    key = (report.ranks[0].communication[0].axis, report.ranks[0].communication[0].operation)
    words = communication(report, [{key: row}, {key: row}, {key: {**row, "calls": 1}}]).alt
    assert "each of ranks 0–1" in words and "rank 2" in words and "= theory" in words and "≠ 1" in words


def test_ranks_that_send_other_bytes_have_rows_of_their_own():
    report = a_report(ParallelConfig(tp=4))
    last = replace(report.ranks[3], communication=(replace(report.ranks[3].communication[0], wire=7),))
    words = communication(replace(report, ranks=(*report.ranks[:3], last))).alt
    assert "each of ranks 0–2" in words and "rank 3" in words


@pytest.mark.parametrize(
    "value, wanted, words",
    [
        (4, 4, "equal to theory"),
        (8, 4, "twice theory"),
        (4, 12, "theory is 3 times this"),
        (5, 4, "1 more than theory (+25 %)"),
        (0, 4, "none where theory has 4"),
        (4, 0, "4 where theory has none"),
    ],
)
def test_differences_in_words(value, wanted, words):
    assert plots.difference_text(value, wanted) == words


def test_a_tradeoff_takes_repetitions_single_numbers_and_gaps():
    picture = tradeoff(
        [1, 2, 4], {"small": [(1, 2, 3), [2, 2], 4], "large": [None, 5, 6.5]}, x="tp", y="step time", unit="seconds",
        source=a_report(), formula=("theory", lambda tp: tp), marks=[(2, 5, "turns here")],
    )  # fmt: skip
    assert_drawn(picture)
    assert "small: 2.00 s at 1" in picture.alt and "turns here" in picture.alt and "dashed: theory" in picture.alt
    assert_drawn(tradeoff([1], {"one": [0]}, x="tp", y="bytes", unit="bytes", source="measured here"))
    with pytest.raises(ValueError, match="2 values for 3 settings"):
        tradeoff([1, 2, 4], {"small": [1, 2]}, x="tp", y="time", source="")


@pytest.mark.parametrize("along", ["columns", "rows", "pair"])
@pytest.mark.parametrize("rows, columns, parts", [(4, 8, 2), (4, 8, 1), (8, 8, 3), (64, 256, 8)])
def test_a_cut_matrix(along, rows, columns, parts):
    assert_drawn(split_matrix(rows, columns, parts, along))


def test_a_cut_that_cannot_be_is_refused_with_what_can():
    with pytest.raises(ValueError, match="along can be columns, rows, pair"):
        split_matrix(4, 8, 2, "diagonal")
    with pytest.raises(ValueError, match="parts can be 1 to 4"):
        split_matrix(4, 8, 5, "rows")


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_layer(tp):
    assert_drawn(layer_communication(tp))
    assert ("four in all" in layer_communication(tp).alt) == (tp > 1)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_a_ring_ends_with_every_sum_complete(n):
    assert_drawn(ring(n))
    assert_drawn(ring(n, step=n - 1))
    assert ring_states(n)[-1] == [[n] * n] * n
    for rank in range(n):
        scattered = {ring_chunk(n, rank, step) for step in range(n - 1)}
        gathered = {ring_chunk(n, rank, step) for step in range(n - 1, 2 * n - 2)}
        # Comm counts wire bytes by this: all but the own shard, then all but the next rank's.
        assert scattered == set(range(n)) - {rank} and gathered == set(range(n)) - {(rank + 1) % n}


@pytest.mark.parametrize(
    "wrong", [lambda: ring(1), lambda: ring(9), lambda: ring(4, 6), lambda: layer_communication(0)]
)
def test_what_cannot_be_drawn_says_what_can(wrong):
    with pytest.raises(ValueError, match="can be|must be"):
        wrong()


@pytest.mark.parametrize("draw", [timeline, ledger, lambda report: layer_communication(report.parallel.tp)])
def test_type_that_was_written_before_stands_where_matplotlib_would_write_it(draw):
    picture = draw(a_report())
    canvas = FigureCanvasAgg(picture.figure)
    picture.figure.set_dpi(DPI)
    canvas.draw()
    expected = np.asarray(canvas.buffer_rgba())[:, :, :3].astype(int)
    drawn = np.asarray(Image.open(io.BytesIO(picture.drawn))).astype(int)
    apart = {(x, y): abs(np.roll(drawn, (y, x), (0, 1)) - expected).mean() for x in (-1, 0, 1) for y in (-1, 0, 1)}
    assert min(apart, key=apart.get) == (0, 0) and apart[0, 0] < 1.5


def test_pictures_stack_into_one_image():
    assert stacked([timeline(a_report()), communication(a_report())]).startswith(PNG)


@pytest.mark.parametrize(
    "n, words", [(0, "0 B"), (999, "999 B"), (1024, "1.00 KiB"), (1.5 * MIB, "1.50 MiB"), (12 * MIB, "12.0 MiB"),
                 (1023 * 1024, "1.00 MiB"), (3 * 2**50, "3072 TiB"), (-MIB, "-1.00 MiB")],
)  # fmt: skip
def test_bytes_for_people(n, words):
    assert bytes_text(n) == words


@pytest.mark.parametrize(
    "seconds, words", [(0, "0 s"), (1.23e-5, "12.3 µs"), (0.0412, "41.2 ms"), (0.99999, "1.00 s"), (1.234, "1.23 s"),
                       (123, "2 min 3 s")],
)  # fmt: skip
def test_seconds_for_people(seconds, words):
    assert seconds_text(seconds) == words


def test_numbers_for_people():
    assert [number_text(n) for n in (2000, 2.5, 123456.7, 0.333333)] == ["2,000", "2.5", "123,457", "0.3333"]


# --- predictions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, unit, value",
    [("2,000", "", 2000), ("1e6", "", 10**6), ("7/8", "", 0.875), (" 4 calls ", "calls", 4), ("50 %", "%", 50),
     ("-1.5", "", -1.5), ("1,234,567.5", "", 1234567.5)],
)  # fmt: skip
def test_numbers_that_are_read(text, unit, value):
    assert parse_number(text, unit) == value


@pytest.mark.parametrize("text", ["", "four", "2,5", "1/0", "nan", "1e999", "1,00"])
def test_numbers_that_are_not(text):
    with pytest.raises(ValueError, match="number"):
        parse_number(text)


def test_a_prediction_is_locked_once_and_kept():
    guess = Predict("How many calls?", "calls", name="locked once")
    seen = []
    guess.when_locked(lambda: seen.append(guess.value))
    assert not guess.locked and guess.value is None
    guess.lock("2")
    guess.lock(7)
    again = Predict("How many calls?", "calls", name="locked once")  # the cell is run once more
    assert guess.locked and again.locked and again.value == 2 and seen == [2]
    assert again._field.disabled and again._button.disabled and "Locked at" in again._message.value


def test_a_bad_number_is_explained_in_place():
    guess = Predict("How many?", name="bad number")
    guess._field.value = "<four>"
    guess._lock_field()
    assert not guess.locked and "&lt;four&gt;" in guess._message.value


@pytest.mark.parametrize(
    "guess, measured, words",
    [(4, 4, "Exactly right."), (4.2, 4, "Close: 5 % too high."), (2, 4, "Off by a factor of 2: you said too little."),
     (12, 4, "Off by a factor of 3: you said too much."),
     (10**6, 4, "Off by a factor of 250,000: you said too much."), (0, 4, "Off by 4: you said too little."),
     (3, 0, "Off by 3: you said too much."), (-1, 4, "Off by 5: you said too little.")],
)  # fmt: skip
def test_feedback_is_honest(guess, measured, words):
    assert verdict_text(guess, measured) == words


def test_a_score_shows_both_numbers_and_the_sentence_that_fits(capsys):
    guess = Predict("How many?", "calls", name="scored")
    words = {2: "You counted the forward pass alone."}
    assert "No prediction was locked" in guess.compare(4, words).text
    assert "forward pass" not in guess.compare(4, words).html
    guess.lock(2)
    result = guess.compare(4, words, a_report())
    assert "you said: 2 calls, measured: 4 calls" in result.text and "factor of 2" in result.text
    assert "forward pass alone" in result.html and "made-up ranks" in result.html
    guess.score(4)
    assert "you said: 2 calls" in capsys.readouterr().out


def test_a_verdict_is_locked_too():
    choice = Choose("The memory halves.", ["holds", "wrong"], name="a verdict")
    choice._lock_field()
    assert not choice.locked and "Choose one first" in choice._message.value
    choice.lock("holds")
    choice.lock("wrong")
    assert choice.value == "holds" and "holds" in repr(choice)
    with pytest.raises(ValueError, match="not among"):
        choice.lock("maybe")


# --- the panel -------------------------------------------------------------------------------------------------------


class PretendedWorld:
    """What a run is closed by."""

    def __init__(self, size):
        self.size, self.closed = size, threading.Event()

    def close(self):
        self.closed.set()


class Measure:
    """A pretended measurement: it takes as long as `hold` says, and ends as the world is closed."""

    def __init__(self):
        self.calls, self.hold, self.error = [], threading.Event(), None
        self.hold.set()

    def __call__(self, model, parallel, train, world, progress):
        assert world.size == parallel.ranks
        self.calls.append((parallel.tp, model.hidden))
        progress(1, 2)
        while not self.hold.is_set():
            if world.closed.wait(0.005):
                raise RunCancelled("closed")
        progress(2, 2)
        if self.error:
            raise self.error
        return a_report(parallel, model)


@pytest.fixture
def measure():
    return Measure()


def words_of(report, panel):
    return [f"<p>tp {report.parallel.tp}</p>"]


def a_panel(measure, **more):
    controls = {"tp": [1, 2, 4, 3], "hidden": [128, 256]}
    model, parallel = ModelConfig(layers=2), ParallelConfig(tp=2)
    return Panel(
        model, parallel, None, controls, **{"draw": words_of, "measure": measure, "world": PretendedWorld, **more}
    )


def finished(panel):
    return asyncio.run(panel.finished())


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


@pytest.fixture
def looked_at(monkeypatch):
    """As if a front end had sent the cell."""
    monkeypatch.setenv("PCOURSE_HEADLESS", "0")


def test_a_panel_runs_what_its_controls_show(measure):
    panel = a_panel(measure)
    report = finished(panel)
    assert measure.calls == [(2, 256)] and panel.report is report and panel.reports == [report]
    assert "tp 2" in panel._view.result.value and report.source in panel._view.status.value


def test_a_move_measures_once_and_is_remembered(measure):
    panel = a_panel(measure)
    for tp in (4, 2, 4):
        panel._view.controls["tp"].value = tp
        assert finished(panel).parallel.tp == tp
    assert measure.calls == [(4, 256), (2, 256)] and len(panel.reports) == 2
    assert "from before" in panel._view.status.value and "tp 4" in panel._view.result.value


def test_run_measures_anew(measure):
    panel = a_panel(measure)
    finished(panel)
    panel._view.run.click()
    finished(panel)
    panel.start(tp=1)
    assert finished(panel).parallel.tp == 1
    assert measure.calls == [(2, 256), (2, 256), (1, 256)] and len(panel.reports) == 3


def test_only_the_last_of_many_moves_counts(measure):
    panel = a_panel(measure)
    for _ in range(3):
        for tp in (1, 2, 4):
            panel._view.controls["tp"].value = tp
    assert finished(panel).parallel.tp == 4
    assert measure.calls == [(4, 256)]


def test_a_move_during_a_run_replaces_it(measure):
    panel = a_panel(measure)
    measure.hold.clear()
    panel.start()
    until(lambda: measure.calls)
    panel._view.controls["tp"].value = 4
    until(lambda: len(measure.calls) == 2)
    measure.hold.set()
    assert finished(panel).parallel.tp == 4 and [r.parallel.tp for r in panel.reports] == [4]


def test_cancel_ends_a_run_and_the_next_one_works(measure):
    panel = a_panel(measure)
    finished(panel)
    measure.hold.clear()
    panel.start(tp=4)
    until(lambda: "step 1 of 2" in panel._view.status.value)
    assert panel._view.run.disabled and not panel._view.cancel.disabled
    assert "this is the result from before" in panel._view.result.value and "tp 2" in panel._view.result.value
    panel._view.cancel.click()
    assert "cancelled" in panel._view.status.value and panel._view.cancel.disabled and not panel._view.run.disabled
    with pytest.raises(panels.NothingMeasured, match="cancelled"):  # the cell asked for tp=4
        finished(panel)
    assert finished(panel).parallel.tp == 2  # the last that finished
    measure.hold.set()
    panel.start()
    assert finished(panel).parallel.tp == 4


def test_a_cell_that_waits_is_told_that_its_run_was_cancelled(measure):
    panel = a_panel(measure)
    measure.hold.clear()

    async def cancelled():
        waiting = asyncio.create_task(panel.sweep(tp=[1, 4]))
        await asyncio.sleep(0.05)
        panel.cancel()
        await waiting

    with pytest.raises(panels.NothingMeasured, match="press Run"):
        asyncio.run(cancelled())


def test_interrupting_the_cell_ends_the_run(measure):
    panel = a_panel(measure)
    measure.hold.clear()

    async def interrupted():
        waiting = asyncio.create_task(panel.finished())
        await asyncio.sleep(0.05)
        waiting.cancel()
        await waiting

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    assert panel._run is None and panel._failure is None


def test_what_cannot_run_is_shown_in_place_before_anything_starts(measure):
    panel = a_panel(measure)
    finished(panel)
    panel._view.controls["tp"].value = 3
    assert "8 heads do not split over tp=3" in panel._view.result.value and "tp 2" in panel._view.result.value
    assert measure.calls == [(2, 256)]
    assert finished(panel).parallel.tp == 2  # a click that could not run is no reason for a cell to fail
    panel.start(tp=3)
    with pytest.raises(ConfigError, match="tp can be 1, 2, 4, 8"):  # but what a cell asked for is
        finished(panel)


def test_a_failing_run_is_shown_in_place_and_the_next_one_works(measure):
    panel = a_panel(measure)
    measure.error = RankError("rank 1 of 2 raised ValueError: \x1b[31mno <b>\x1b[0m")
    panel.start()
    with pytest.raises(RankError, match="rank 1 of 2"):
        finished(panel)
    assert "no &lt;b&gt;" in panel._view.result.value and "\x1b" not in panel._view.result.value
    measure.error = None
    panel._view.run.click()
    assert finished(panel).parallel.tp == 2 and "rank 1 of 2" not in panel._view.result.value


def test_a_picture_that_cannot_be_drawn_is_told(measure):
    panel = a_panel(measure, draw=lambda report, panel: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        finished(panel)
    assert "ZeroDivisionError" in panel._view.result.value


def test_height_only_grows(measure):
    panel = a_panel(measure, draw=lambda report, panel: [timeline(report)])
    heights = []
    for tp in (1, 4, 1):
        panel.start(tp=tp)
        finished(panel)
        heights.append(int(panel._view.result.layout.min_height.removesuffix("px")))
    assert heights[0] < heights[1] == heights[2]


def test_a_closed_panel_opens_when_its_prediction_locks(measure, looked_at):
    guess = Predict("How many?", name="opens a panel")
    panel = a_panel(measure, after=guess)
    assert "Lock your prediction above to open this panel" in panel._view.result.value
    assert all(w.disabled for w in (*panel._view.controls.values(), panel._view.run))
    for closed in (panel.start, lambda: finished(panel)):
        with pytest.raises(PredictFirst, match="then run this cell again") as error:
            closed()
        assert len(error.value._render_traceback_()) == 1
    guess.lock(4)
    assert not any(w.disabled for w in (*panel._view.controls.values(), panel._view.run))
    assert finished(panel).parallel.tp == 2


def test_without_a_front_end_a_closed_panel_runs_through(measure):
    panel = a_panel(measure, after=Predict("How many?", name="never locked"))
    assert finished(panel).parallel.tp == 2


def test_a_sweep_measures_what_is_new_and_comes_back(measure):
    panel = a_panel(measure)
    finished(panel)
    reports = asyncio.run(panel.sweep(tp=[1, 2, 4]))
    assert [r.parallel.tp for r in reports] == [1, 2, 4] and panel.settings["tp"] == 2
    assert measure.calls == [(2, 256), (1, 256), (4, 256)]


def test_a_panel_shown_without_a_front_end_holds_a_finished_run(measure):
    panel = a_panel(measure, draw=lambda report, panel: [timeline(report), communication(report)])
    data, sizes = panel._repr_mimebundle_()
    assert {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"} <= set(data)
    assert "Timeline of one step" in data["text/plain"] and sizes["image/png"]["height"] > 400


@pytest.mark.parametrize(
    "controls, words",
    [
        ({"hiden": [1]}, "did you mean 'hidden'"),
        ({"hidden": [1, 2]}, "must be among"),
        ({"q": [1]}, "it can be layers"),
    ],
)
def test_controls_that_cannot_be_are_refused(controls, words):
    with pytest.raises(ValueError, match=words):
        Panel(controls=controls)


def test_a_setting_that_no_control_has_is_refused(measure):
    panel = a_panel(measure)
    with pytest.raises(ValueError, match="it has tp, hidden"):
        panel.start(batch=4)
    with pytest.raises(ValueError, match="tp can be 1, 2, 4, 3"):
        panel.start(tp=8)


def test_fields_that_follow_others_follow():
    base = (ModelConfig(), ParallelConfig(), TrainConfig())
    model, _, train = changed(base, {"hidden": 512, "optimizer": "sgd"})
    assert model.ffn == 2048 and train.learning_rate == TrainConfig(optimizer="sgd").learning_rate


def test_every_control_has_a_name(measure):
    for name, control in a_panel(measure)._view.controls.items():
        assert control.description == name


def test_a_real_run_in_threads():
    """The panel over pcourse.train itself."""
    from pcourse.world import World

    model = ModelConfig(layers=1, hidden=32, heads=4, sequence=16)
    panel = Panel(
        model, ParallelConfig(tp=2), TrainConfig(batch=2, steps=2, warmup=0), {"tp": [1, 2]},
        world=lambda size: World(size, backend="threads"),
    )  # fmt: skip
    report = finished(panel)
    assert report.ranks[0].row("tp", "all_reduce").calls >= 4 and len(panel._shown.pictures) == 3


# --- front ends ------------------------------------------------------------------------------------------------------


def test_no_kernel_is_no_front_end(monkeypatch):
    assert not front_end()

    class Shell:
        def get_parent(self):
            return {"metadata": {"cellId": "a cell"}}

    monkeypatch.setattr("IPython.get_ipython", Shell)
    assert front_end()
    monkeypatch.setenv("PCOURSE_HEADLESS", "1")
    assert not front_end()


def test_messages_are_an_experiment():
    """A panel that times messages: its controls, its refusal of others, its result."""
    from pcourse.world import World

    experiment = Messages(sizes=(64, 1024), repetitions=2)
    panel = Panel(
        experiment=experiment,
        controls={"operation": ["all_reduce", "send"], "ranks": [2, 3]},
        draw=lambda cost, panel: [f"{cost.operation} over {cost.ranks}"],
        world=lambda size: World(size, backend="threads"),
    )
    cost = finished(panel)
    assert (cost.operation, cost.ranks, len(cost.times)) == ("all_reduce", 2, 2) and panel.report is cost
    panel.start(operation="send", ranks=2)
    assert finished(panel).operation == "send" and "send over 2" in panel._view.result.value
    panel.start(ranks=3)
    with pytest.raises(ConfigError, match="ranks can be 2"):
        finished(panel)
    with pytest.raises(ValueError, match="it can be operation, ranks"):
        Panel(experiment=experiment, controls={"tp": [1]})


def test_noise_is_not_scored_as_truth():
    guess = Predict("How many times as fast?", name="a noisy ratio")
    guess.lock(1.0)
    noisy, clear = guess.compare(0.8, spread=(0.5, 1.2)), guess.compare(0.8, spread=(0.7, 0.9))
    assert noisy.verdict == "Within what the noise of this measurement leaves open."
    assert clear.verdict == guess.compare(0.8).verdict and "from 0.7 to 0.9" in clear.text


def test_a_panel_lists_what_it_has_measured(measure):
    panel = a_panel(measure)
    finished(panel)
    assert "Measured here so far" not in panel._view.result.value
    panel.start(tp=4)
    finished(panel)
    table = panel._view.result.value.partition("Measured here so far")[2]
    assert table.count("<tr") == 3 and "font-weight:600" in table


def test_an_answer_can_be_required(looked_at, monkeypatch):
    guess = Predict("How many?", name="required")
    with pytest.raises(PredictFirst, match="Lock your prediction above"):
        guess.require()
    verdict = Choose("It holds.", ["holds", "wrong"], name="required verdict")
    with pytest.raises(PredictFirst, match="Lock your verdict above"):
        verdict.require()
    monkeypatch.setenv("PCOURSE_HEADLESS", "1")
    guess.require()
    guess.lock(1)
    monkeypatch.setenv("PCOURSE_HEADLESS", "0")
    guess.require()


def test_nbclient_is_no_front_end():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    source = "from pcourse.lab.front_end import front_end\nimport sys\nprint(front_end(), 'torch' in sys.modules)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    assert notebook.cells[0].outputs[0].text == "False False\n"


@pytest.mark.parametrize("module, heavy", [("lab", "torch"), ("summary", "torch"), ("summary", "matplotlib")])
def test_what_need_not_be_loaded_is_not(module, heavy):
    code = f"import sys, pcourse.{module}; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.getcwd()}).returncode == 0


# --- checks ----------------------------------------------------------------------------------------------------------


@check
def adds(f):
    """adds sums the list"""
    got = f([1, 2])
    assert got == 3, f"adds([1, 2]) gave {got}; the sum is 3"


def stub(xs):
    raise NotImplementedError("your code here")


def raises(xs):
    return xs[7]


def test_a_right_answer_is_told_in_one_line(capsys):
    adds(sum)
    assert capsys.readouterr().out == "\x1b[1;32mRight.\x1b[0m adds sums the list\n"


@pytest.mark.parametrize(
    "answer, kind, words",
    [
        (stub, NotSolvedYet, "write stub above"),
        (max, CheckFailed, "gave 2; the sum is 3"),
        (raises, CheckFailed, "raises raised IndexError: list index out of range\n  in raises, line"),
        (lambda xs: None + 1, CheckFailed, "raised TypeError"),
    ],
)
def test_wrong_answers_are_told_in_a_few(answer, kind, words):
    with pytest.raises(kind) as error:
        adds(answer)
    assert words in str(error.value) and error.value.__suppress_context__
    assert len(error.value._render_traceback_()) <= 2


def test_the_learners_line_is_shown():
    with pytest.raises(CheckFailed, match=r"return xs\[7\]"):
        adds(raises)


def test_a_stub_that_a_rank_ran_is_still_a_stub():
    @check
    def runs(f):
        """runs"""
        error = RankError("rank 1 of 2 raised NotImplementedError", 1, 2)
        try:
            f([])
        except Exception as cause:
            raise error from cause

    with pytest.raises(NotSolvedYet):
        runs(stub)
    with pytest.raises(CheckFailed, match="raises raised IndexError on rank 1 of 2"):
        runs(raises)


def test_a_run_that_fails_by_itself_is_passed_on():
    @check
    def hangs(f):
        raise RankError("the run is stuck: rank 0 was waiting in recv")

    with pytest.raises(RankError, match="waiting in recv"):
        hangs(sum)


def test_a_scoreboard_says_what_is_missing(capsys):
    board = Scoreboard("Ring over 4 ranks", "measured here")
    board.add("bytes sent", 6 * MIB, 6 * MIB, "bytes")
    board.add("calls", 8, 6)
    board.add("overlap", 0.9, 0.5, at_most=False)
    assert not board.met
    words = repr(board)
    assert "= target" in words and "2 more than the target" in words and "better:" in words
    assert_drawn(board.picture)

    @check
    def costs(f):
        """costs little"""
        return board

    costs(sum)
    assert "Ring over 4 ranks" in capsys.readouterr().out
