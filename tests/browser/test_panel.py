"""A learner at a panel: predict, open, move, cancel, fail, go on. The runs are real."""

import re
import time

import labdriver
import pytest

CELLS = [
    """
from pcourse.config import ModelConfig, ParallelConfig, TrainConfig
from pcourse.lab import Panel, Predict
from pcourse.lab.plots import communication, timeline

guess = Predict("How many all-reduces does a layer need at tp = 2?", "all-reduces")
guess
""",
    """
import pcourse.train

def fails(comm):
    if comm.rank == 1:
        raise ValueError("shapes do not fit <here>")

def measure(model, parallel, train, world, progress):
    if model.layers == 3:
        world.run(fails)
    return pcourse.train.measure(model, parallel, train, world, progress=progress)

panel = Panel(
    ModelConfig(layers=1, hidden=64, heads=4, sequence=32),
    ParallelConfig(tp=2),
    TrainConfig(batch=4, steps=2, warmup=1),
    {"tp": [1, 2, 3], "layers": [1, 2, 3], "steps": [2, 20000]},
    draw=lambda report, panel: [timeline(report), communication(report)],
    after=guess,
    title="One layer, measured",
    measure=measure,
)
panel
""",
    'report = await panel.finished()\nprint("tp is", report.parallel.tp, "after", len(panel.reports))',
    "guess.score(4, {2: 'You counted the forward pass alone.'}, report)",
]
PREDICTION, PANEL, REPORT, SCORE = range(4)
SOON = 60_000  # milliseconds: a run, with what a loaded machine adds


@pytest.fixture(scope="module")
def notebook(lab, page):
    labdriver.write_notebook(lab.root / "panel.ipynb", CELLS)
    notebook = labdriver.open_notebook(page, lab, "panel.ipynb")
    for cell in (PREDICTION, PANEL, REPORT):
        notebook.run(cell)
    return notebook


@pytest.fixture
def panel(notebook, shot):
    return notebook.output(PANEL)


def lock(notebook, words):
    field = notebook.output(PREDICTION).get_by_label("Your prediction")
    field.fill(words)
    field.press("Enter")


def measured(notebook, panel, ranks):
    """Wait for a new result on so many ranks."""
    words = re.compile(rf"^measured on {ranks} CPU ranks?(?!.*from before)")
    notebook.say(words, panel).first.wait_for(timeout=SOON)


def test_a_panel_is_closed_until_the_prediction_is_locked(notebook, panel):
    notebook.say("Lock your prediction above to open this panel", panel).wait_for()
    assert panel.get_by_label("tp").is_disabled() and notebook.button("Run", panel).is_disabled()
    assert notebook.output(REPORT).inner_text().strip() == "Lock your prediction above, then run this cell again."
    lock(notebook, "two")
    notebook.say("“two” is not a number", notebook.output(PREDICTION)).wait_for()
    assert panel.get_by_label("tp").is_disabled()
    lock(notebook, "2")
    notebook.say(re.compile("Locked at .*: 2 all-reduces"), notebook.output(PREDICTION)).wait_for()
    notebook.say("Press Run", panel).wait_for()
    assert panel.get_by_label("tp").is_enabled()
    assert notebook.output(PREDICTION).get_by_label("Your prediction").is_disabled()


def test_run_measures_and_the_cell_below_has_the_report(notebook, panel):
    notebook.button("Run", panel).click()
    measured(notebook, panel, 2)
    picture = panel.locator("img[width]")
    assert "Timeline of one step on 2 ranks" in picture.get_attribute("alt")
    assert picture.evaluate("image => image.naturalWidth") == 2 * int(picture.get_attribute("width")) - 1
    notebook.run(REPORT)
    assert notebook.output(REPORT).inner_text().strip() == "tp is 2 after 1"
    notebook.run(SCORE)
    score = notebook.output(SCORE).inner_text()
    assert "Off by a factor of 2" in score and "forward pass alone" in score


def test_a_move_measures_by_itself_and_is_remembered(notebook, panel):
    panel.get_by_label("tp").select_option("1")
    measured(notebook, panel, 1)
    panel.get_by_label("tp").select_option("2")
    notebook.say("from before; Run measures anew", panel).wait_for()
    notebook.run(REPORT)
    assert notebook.output(REPORT).inner_text().strip() == "tp is 2 after 2"


def test_the_keyboard_does_it_too(notebook, panel):
    """Lab would take ArrowDown, and with "d" twice delete the cell."""
    cells = notebook.cells.count()
    layers = panel.get_by_label("layers")
    for key in ("ArrowDown", "d", "d", "x"):
        layers.focus()
        notebook.page.keyboard.press(key)
    assert notebook.cells.count() == cells and layers.evaluate("list => document.activeElement === list")
    measured(notebook, panel, 2)
    notebook.run(REPORT)
    assert notebook.output(REPORT).inner_text().strip() == "tp is 2 after 3"
    panel.get_by_label("layers").select_option("1")
    notebook.say("from before; Run measures anew", panel).wait_for()


def test_cancel_ends_a_long_run_at_once_and_nothing_moves(notebook, panel):
    height = panel.bounding_box()["height"]
    panel.get_by_label("steps").select_option("20000")
    notebook.say(re.compile(r"step \d+ of 20"), panel).wait_for(timeout=SOON)
    notebook.say("measuring; this is the result from before", panel).wait_for()
    assert abs(panel.bounding_box()["height"] - height) < 2
    start = time.monotonic()
    notebook.button("Cancel", panel).click()
    notebook.say("cancelled", panel).wait_for(timeout=SOON)
    assert time.monotonic() - start < 1.0
    assert notebook.button("Run", panel).is_enabled() and notebook.button("Cancel", panel).is_disabled()


def test_interrupting_a_waiting_cell_ends_its_run(notebook, panel):
    notebook.button("Run", panel).click()
    notebook.say(re.compile(r"step \d+ of 20"), panel).wait_for(timeout=SOON)
    notebook.start(REPORT)
    notebook.wait_busy(REPORT)
    notebook.interrupt()
    notebook.say("cancelled", panel).wait_for(timeout=SOON)
    notebook.wait_run(REPORT)
    panel.get_by_label("steps").select_option("2")
    notebook.say("from before; Run measures anew", panel).wait_for()


def test_what_cannot_run_is_said_in_place(notebook, panel):
    height = panel.bounding_box()["height"]
    panel.get_by_label("tp").select_option("3")
    panel.get_by_role("alert").filter(has_text="4 heads do not split over tp=3; tp can be 1, 2, 4").wait_for()
    assert abs(panel.bounding_box()["height"] - height) < 2
    panel.get_by_label("tp").select_option("2")
    panel.get_by_role("alert").wait_for(state="detached")


def test_a_rank_that_raises_is_shown_in_place_and_the_next_run_works(notebook, panel):
    panel.get_by_label("layers").select_option("3")
    alert = panel.get_by_role("alert")
    alert.filter(has_text="shapes do not fit <here>").wait_for(timeout=SOON)
    assert "rank 1 of 2" in alert.inner_text()
    panel.get_by_label("layers").select_option("1")
    alert.wait_for(state="detached")
    notebook.button("Run", panel).click()
    notebook.say("measuring; this is the result from before", panel).wait_for()
    measured(notebook, panel, 2)


def test_a_control_has_a_name_and_a_picture_has_words(notebook, panel):
    named = panel.locator("select").evaluate_all("lists => lists.map(list => list.labels[0].textContent)")
    assert named == ["tp", "layers", "steps"]
    assert panel.locator("img[width]").evaluate_all("images => images.every(image => image.alt.length > 40)")
