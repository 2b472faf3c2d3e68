"""Lesson 06 as a learner takes it: three predictions, two replicas measured, turned to ZeRO's stage 3, from before."""

import re

SOON = 90_000  # milliseconds: two runs, with what a loaded machine adds

NOTEBOOK = "notebooks/06_data_parallel_and_zero.ipynb"


def test_the_first_picture_is_there_before_anything_runs(lesson, cell):
    lesson.output(cell("plots.replicas(2")).locator("img").first.wait_for(timeout=SOON)
    assert lesson.output(cell("panel = Panel(")).inner_text().strip() == ""  # a saved answer would spoil the prediction


def test_predict_run_and_turn_to_stage_3(lesson, cell, shot):
    sent, held, run = cell("sent = Predict("), cell("stage_1 = Choose("), cell("panel = Panel(")
    lesson.clear()
    for number in (cell("plots.replicas(2"), sent, held, run):
        lesson.run(number)
    assert "Lock your verdict above" in lesson.output(run).inner_text()

    _lock(lesson.output(sent), "Your prediction", "3320832")
    lesson.output(held).get_by_label("the same", exact=True).check()
    lesson.button("Lock", lesson.output(held)).first.click()
    for number, guess in enumerate(("4", "4")):
        field = lesson.output(held).get_by_label("Your prediction").nth(number)
        field.fill(guess)
        field.press("Enter")
    lesson.say(re.compile("Locked at .*: the same"), lesson.output(held)).wait_for(timeout=SOON)
    lesson.say(re.compile("Locked at .*: 4 bytes a parameter"), lesson.output(held)).nth(1).wait_for(timeout=SOON)

    lesson.run(run)
    panel = lesson.output(run)
    lesson.button("Run", panel).click()
    lesson.say(re.compile(r"^measured on 2 CPU ranks"), panel).first.wait_for(timeout=SOON)
    assert panel.locator("img").count() >= 2 and "all-reduce" in panel.inner_text()
    panel.get_by_label("zero").select_option("3")
    panel.locator('img[alt*="dp=2, zero=3"]').first.wait_for(timeout=SOON)
    assert "reduce-scatter" in panel.inner_text() and "≠" not in panel.inner_text()
    panel.get_by_label("zero").select_option("0")
    lesson.say("from before; Run measures anew", panel).wait_for(timeout=SOON)
    assert "Measured here so far" in panel.inner_text()


def _lock(output, label: str, words: str) -> None:
    field = output.get_by_label(label)
    field.fill(words)
    field.press("Enter")
