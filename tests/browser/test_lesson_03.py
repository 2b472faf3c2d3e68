"""Lesson 03 as a learner takes it: open it in JupyterLab, predict, measure, turn tp, cancel. The runs are real."""

import re
import time

SOON = 60_000  # milliseconds: a run, with what a loaded machine adds


NOTEBOOK = "notebooks/03_tensor_parallelism.ipynb"


def test_the_pictures_are_there_before_anything_runs(lesson, cell):
    lesson.output(cell("import torch.nn.functional")).locator("img").first.wait_for(timeout=SOON)
    assert lesson.output(cell("panel = Panel(")).inner_text().strip() == ""  # a saved answer would spoil the prediction


def test_predict_run_turn_and_cancel(lesson, cell, shot):
    predict, run, explain = cell("guess = Predict("), cell("panel = Panel("), cell("await panel.finished()")
    lesson.clear()
    for number in (cell("import torch.nn.functional"), predict, run, explain):
        lesson.run(number)
    prediction, panel = lesson.output(predict), lesson.output(run)
    assert "Lock your prediction above" in lesson.output(explain).inner_text()

    field = prediction.get_by_label("Your prediction")
    field.fill("2")
    field.press("Enter")
    lesson.say(re.compile("Locked at .*: 2 all-reduces"), prediction).wait_for(timeout=SOON)

    lesson.button("Run", panel).click()
    lesson.say(re.compile(r"^measured on 2 CPU ranks"), panel).first.wait_for(timeout=SOON)
    panel.get_by_label("tp").select_option("4")
    lesson.say(re.compile(r"^measured on 4 CPU ranks"), panel).first.wait_for(timeout=SOON)
    assert panel.locator("img").count() >= 2 and "all-reduce" in panel.inner_text()

    panel.get_by_label("hidden").select_option("256")
    panel.get_by_label("sequence").select_option("128")
    lesson.button("Run", panel).click()
    start = time.monotonic()
    lesson.button("Cancel", panel).click()
    lesson.say("cancelled", panel).wait_for(timeout=SOON)
    assert time.monotonic() - start < 2
    panel.get_by_label("hidden").select_option("128")
    panel.get_by_label("sequence").select_option("64")
    lesson.say("from before; Run measures anew", panel).wait_for(timeout=SOON)

    lesson.run(explain)
    score = lesson.output(explain).inner_text()
    assert "4 all-reduces" in score and "Two is one direction only" in score
