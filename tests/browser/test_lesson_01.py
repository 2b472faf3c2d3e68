"""Lesson 01 as a learner takes it: lock two predictions, see the ledger beside its formula, turn a setting."""

import re

SOON = 90_000  # milliseconds: a run, with what a loaded machine adds

NOTEBOOK = "notebooks/01_where_memory_goes.ipynb"


def test_the_first_picture_is_there_before_anything_runs(lesson, cell):
    lesson.output(cell("plots.ledger(report)")).locator("img").first.wait_for(timeout=SOON)
    assert lesson.output(cell("panel = Panel(")).inner_text().strip() == ""  # a saved answer would spoil the prediction


def test_predict_run_and_compare_with_the_formula(lesson, cell, shot):
    predict, run = cell("states = Predict("), cell("panel = Panel(")
    lesson.clear()
    for number in (cell("plots.ledger(report)"), predict, cell("def made_of("), run):
        lesson.run(number)
    assert "Lock your prediction above" in lesson.output(run).inner_text()
    for number, (answer, words) in enumerate((("12", "12 bytes"), ("4", "4 times"))):
        field = lesson.output(predict).get_by_label("Your prediction").nth(number)
        field.fill(answer)
        field.press("Enter")
        lesson.say(re.compile(f"Locked at .*: {words}"), lesson.output(predict)).first.wait_for(timeout=SOON)
    lesson.run(run)

    panel = lesson.output(run)
    lesson.button("Run", panel).click()
    lesson.say(re.compile(r"^measured on 1 "), panel).first.wait_for(timeout=SOON)
    alternative = panel.locator("img").first.get_attribute("alt")
    assert "measured, rank 0: parameters 3.21 MiB" in alternative
    assert "formula, rank 0: parameters 3.21 MiB" in alternative
    assert "attention: scores" in panel.inner_text()

    panel.get_by_label("attention").select_option("fused")
    panel.get_by_label("dtype").select_option("bfloat16")
    panel.locator('img[alt*="formula, rank 0: parameters 1.61 MiB"]').first.wait_for(timeout=SOON)
