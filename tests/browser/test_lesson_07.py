"""Lesson 07 as a learner takes it: predict a time, measure full recompute, turn the policy, be refused."""

import re

SOON = 120_000  # milliseconds: a run, with what a loaded machine adds

NOTEBOOK = "notebooks/07_recomputing_activations.ipynb"
SETUP = (
    "from statistics import", "def over_a_step(", "def trade_off(", "def draw(", "slower = Predict(", "panel = Panel(",
)  # fmt: skip


def test_the_first_picture_is_there_and_no_answer_is(lesson, cell):
    lesson.output(cell("moments = {")).locator("img").first.wait_for(timeout=SOON)
    for answer in ("panel = Panel(", "less.score(", "slower.score(", "saves.score("):
        assert lesson.output(cell(answer)).inner_text().strip() == ""  # saved, it would spoil the prediction


def test_predict_measure_and_turn_the_policy(lesson, cell, shot):
    lesson.clear()
    for words in SETUP:
        lesson.run(cell(words))
    prediction, panel = lesson.output(cell("slower = Predict(")), lesson.output(cell("panel = Panel("))
    field = prediction.get_by_label("Your prediction")
    field.fill("33")
    field.press("Enter")
    lesson.say(re.compile("Locked at .*: 33 %"), prediction).wait_for(timeout=SOON)

    lesson.button("Run", panel).click()
    panel.locator('img[alt*="full: "]').first.wait_for(timeout=SOON)
    panel.get_by_label("recompute", exact=True).select_option("selective")
    panel.locator('img[alt*="selective: "]').first.wait_for(timeout=SOON)
    alternative = " ".join(image.get_attribute("alt") or "" for image in panel.locator("img").all())
    assert "formula, rank 0" in alternative and "full: " in alternative  # the one measured before stays in the picture

    panel.get_by_label("recompute_every").select_option("2")
    panel.locator('img[alt*="selective, every 2: "]').first.wait_for(timeout=SOON)
    panel.get_by_label("recompute", exact=True).select_option("none")
    lesson.say(re.compile("recompute_every=2 says which layers to recompute"), panel).first.wait_for(timeout=SOON)
