"""Lesson 05 as a learner takes it: predict a bubble, run four paced stages, turn schedule and stages, be refused."""

import re

SOON = 90_000  # milliseconds: two runs, with what a loaded machine adds

NOTEBOOK = "notebooks/05_filling_the_pipeline.ipynb"


def test_the_first_picture_is_there_before_anything_runs(lesson, cell):
    lesson.output(cell('plots.pipeline(walk("naive"')).locator("img").first.wait_for(timeout=SOON)
    assert lesson.output(cell("panel = Panel(")).inner_text().strip() == ""  # a saved answer would spoil the prediction


def test_predict_run_and_turn_the_schedule(lesson, cell, shot):
    predict, run = cell("guess = Predict("), cell("panel = Panel(")
    lesson.clear()
    for number in (cell('plots.pipeline(walk("naive"'), predict, cell("unpaced = {}"), run):
        lesson.run(number)
    prediction, panel = lesson.output(predict), lesson.output(run)
    field = prediction.get_by_label("Your prediction")
    field.fill("30")
    field.press("Enter")
    lesson.say(re.compile("Locked at .*: 30 %"), prediction).wait_for(timeout=SOON)

    lesson.button("Run", panel).click()
    lesson.say(re.compile(r"^paced to 40 ms forward, 80 ms backward a stage, on 4 CPU ranks"), panel).first.wait_for(
        timeout=SOON
    )
    assert panel.locator("img").count() >= 3
    alternative = " ".join(image.get_attribute("alt") or "" for image in panel.locator("img").all())
    assert "1f1b, 4 stages, 4 micro-batches, paced" in alternative and "measured" in alternative

    panel.get_by_label("pp").select_option("2")
    lesson.say(re.compile(r"^paced to 80 ms forward, 160 ms backward a stage, on 2 CPU ranks"), panel).first.wait_for(
        timeout=SOON
    )
    panel.get_by_label("chunks").select_option("2")
    lesson.say(re.compile("1f1b has one chunk on each stage, not chunks=2"), panel).first.wait_for(timeout=SOON)
    panel.get_by_label("schedule").select_option("zb-v")
    panel.locator('img[alt*="zb-v, 2 stages of 2 chunks, 4 micro-batches, paced"]').first.wait_for(timeout=SOON)
