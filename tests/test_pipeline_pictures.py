"""Pictures of pipelines: schedules in time, the model cut into stages; and the simulator fed with measured times."""

from dataclasses import replace
from itertools import product

import pytest
from matplotlib.backends.backend_agg import RendererAgg

from pcourse.config import ModelConfig, ParallelConfig, TrainConfig
from pcourse.cost.simulate import simulate
from pcourse.cost.stage_times import resimulate, stage_times
from pcourse.lab import plots
from pcourse.lab.picture import DPI, Picture
from pcourse.parallel.partition import part_bytes, part_parameters, partition
from pcourse.parallel.schedules import make_schedule
from pcourse.report import MemoryLedger, RankReport, Report, Span
from pcourse.wording import bytes_text

MIB = 2**20


def walk(name="1f1b", p=4, m=8, v=1, forward=1, backward_input=1, backward_weight=1, transfer=0):
    return simulate(make_schedule(name, p, m, v), forward, backward_input, backward_weight, transfer)


def a_report(simulation, tp=1, optimizer=0.0, provenance="measured", messages=0.0) -> Report:
    """What a run would report that kept to `simulation` to the instant: computes, receives, then the optimizer.

    A stage that runs dry waits for the message, which takes the last `messages` seconds of the gap.
    """
    schedule = simulation.schedule
    step = simulation.step_seconds + optimizer
    parallel = ParallelConfig(
        tp=tp, pp=schedule.stages, micro_batches=schedule.micro_batches, chunks=schedule.chunks, schedule=schedule.name
    )
    ranks = []
    for rank in range(parallel.ranks):
        computes = simulation.spans[rank // tp]
        spans, at = [], 0.0
        for span in computes:
            if span.start - at > messages > 0:
                spans.append(Span("waiting", f"recv {span.kind} of {span.micro_batch}", at, span.start - messages))
                label = spans[-1].label
                spans.append(Span("communication", label, span.start - messages, span.start))
            spans.append(span)
            at = span.end
        if optimizer:
            spans.append(Span("optimizer", "optimizer", simulation.step_seconds, step))
        seconds = {"compute": simulation.busy[rank // tp] + optimizer, "communication": 0.0, "waiting": 0.0}
        seconds["idle"] = step - seconds["compute"]
        held = MemoryLedger(40 * MIB, 40 * MIB, 80 * MIB, (4 - rank // tp) * 30 * MIB, MIB, (290 - 30 * rank) * MIB)
        ranks.append(RankReport(rank, held, (), tuple(spans), seconds))
    return Report(
        provenance, f"{parallel.ranks} made-up ranks", ModelConfig(), parallel, TrainConfig(), step, (step, step),
        (step,) * 3, 1.0, (5.0,), (1.0,), tuple(ranks), "2026-11-29T17:03:00",
    )  # fmt: skip


def drawn_spans(picture: Picture) -> dict[str, int]:
    """How many spans of each kind and chunk are on the picture."""
    found: dict[str, int] = {}
    for axes in picture.figure.axes:
        for artist in axes.patches + axes.artists:
            if hasattr(artist, "get_path") and artist.get_gid():
                path = artist.get_path()
                found[artist.get_gid()] = found.get(artist.get_gid(), 0) + sum(path.codes == path.MOVETO)
    return found


def written(picture: Picture) -> list[str]:
    texts = list(picture.figure.texts)
    return [text.get_text() for text in texts + [text for axes in picture.figure.axes for text in axes.texts]]


def assert_inside(picture: Picture) -> None:
    """Nothing that is written leaves the sheet."""
    picture.figure.set_dpi(DPI)
    width, height = picture.figure.bbox.size
    renderer = RendererAgg(int(width), int(height), DPI)
    for text in picture.figure.texts:
        place = text.get_window_extent(renderer)
        assert place.x0 >= 0 and place.y0 >= 0 and place.x1 <= width and place.y1 <= height, text.get_text()


# --- what was measured, walked again ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name, v", [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)])
def test_a_report_that_kept_to_a_walk_gives_it_back(name, v, tp):
    times = {"forward": [0.01, 0.02, 0.015, 0.01], "backward_input": [0.02] * 4, "backward_weight": [0.01] * 4}
    walked = walk(name, 4, 8, v, **times, transfer=0.002)
    report = a_report(walked, tp=tp, messages=0.002, optimizer=0.01)
    found = stage_times(report)
    split = name.startswith("zb")
    assert found["forward"] == pytest.approx(times["forward"])
    assert found["backward_input"] == pytest.approx([0.02 if split else 0.03] * 4)
    assert found["backward_weight"] == pytest.approx([0.01 if split else 0] * 4)
    assert found["transfer"] == pytest.approx(0.002)
    again = resimulate(report)
    assert again.step_seconds == pytest.approx(walked.step_seconds)  # the optimizer is not in it
    assert [*map(list, again.ends)] == [pytest.approx(ends) for ends in walked.ends]
    assert again.source == f"predicted from stage times {report.source}, and messages of 2.00 ms"


def test_stage_times_are_medians():
    report = a_report(walk(p=2, m=3, forward=0.01))
    spans = [
        replace(s, end=s.end + 1) if (s.kind, s.micro_batch) == ("forward", 1) else s for s in report.ranks[0].spans
    ]
    slow = replace(report, ranks=(replace(report.ranks[0], spans=tuple(spans)), report.ranks[1]))
    assert stage_times(slow)["forward"] == pytest.approx([0.01, 0.01])


def test_what_is_sent_inside_a_compute_belongs_to_it():
    report = a_report(walk(p=1, m=1, forward=0.01, backward_input=0.01, backward_weight=0.01))
    pieces = (
        Span("forward", "forward", 0.0, 0.004, 0),
        Span("communication", "all_reduce mlp", 0.004, 0.006),
        Span("forward", "forward", 0.006, 0.010, 0),
        *report.ranks[0].spans[1:],
    )
    cut = replace(report, ranks=(replace(report.ranks[0], spans=pieces),))
    assert stage_times(cut)["forward"] == pytest.approx([0.010])


def test_a_message_counts_only_if_its_receiver_saw_it_whole():
    walked = walk(p=2, m=2, forward=0.01, backward_input=0.01, backward_weight=0.01, transfer=0.004)
    report = a_report(walked)  # no waiting seen
    late = (Span("communication", "recv activation", 0.010, 0.0101), *report.ranks[1].spans)
    report = replace(report, ranks=(report.ranks[0], replace(report.ranks[1], spans=late)))
    assert stage_times(report)["transfer"] == 0
    assert "messages that take no time" in resimulate(report).source


def test_a_report_without_spans_says_what_is_missing():
    report = a_report(walk())
    empty = replace(report, ranks=tuple(replace(rank, spans=()) for rank in report.ranks))
    with pytest.raises(ValueError, match="stage 0 has no forward of a micro-batch"):
        resimulate(empty)


# --- schedules in time -----------------------------------------------------------------------------------------------

LEGAL = [
    (name, p, m, v)
    for name, p, m, v in product(
        ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"), (1, 2, 8), (1, 32), (1, 2, 4)
    )
    if (v == 2 if name == "zb-v" else v == 1 or name == "interleaved") and (name != "interleaved" or m % p == 0)
]


@pytest.mark.parametrize("name, p, m, v", LEGAL)
def test_every_schedule_is_drawn_whole(name, p, m, v):
    picture = plots.pipeline(walk(name, p, m, v))
    split = name.startswith("zb")
    kinds = ("forward", "backward-input", "backward-weight") if split else ("forward", "backward")
    assert drawn_spans(picture) == {f"{kind} {chunk}": p * m for kind in kinds for chunk in range(v)}
    assert f"stage {p - 1}" in written(picture)
    if m == 32 or p == 1:
        assert picture.png.startswith(b"\x89PNG") and len(picture.png) < 120_000


@pytest.mark.parametrize("p, m", [(4, 8), (2, 3), (8, 32), (1, 4)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_is_the_closed_form_in_both_conventions(name, p, m):
    of_wall, of_ideal = 100 * (p - 1) / (m + p - 1), 100 * (p - 1) / m
    words = f"bubble {of_wall:.3g} % of the wall clock, {of_ideal:.3g} % of the ideal ({3 * m}: "
    for picture in (plots.pipeline(walk(name, p, m)), plots.pipeline(a_report(walk(name, p, m)))):
        assert words.split("(")[0] in picture.alt
        assert any(words.split("(")[0] in text for text in written(picture))
    assert words in plots.pipeline(walk(name, p, m)).alt


def test_interleaving_divides_the_bubble():
    assert "bubble 15.8 % of the wall clock, 18.8 % of the ideal" in plots.pipeline(walk("interleaved", v=2)).alt


def test_the_words_say_what_is_seen():
    alt = plots.pipeline(walk("1f1b")).alt
    assert "1f1b, 4 stages, 8 micro-batches, simulated: step 33" in alt
    assert "times in units of one forward" in alt
    assert "stage 0 computes 24, 4 in flight" in alt and "stage 3 computes 24, 1 in flight" in alt
    assert alt.endswith("predicted from a walk of the schedule, a micro-batch taking a stage: forward 1, backward 2.")
    assert (
        "forward 2 to 3, backward 4, a message 0.5"
        in plots.pipeline(walk(forward=[2, 3, 3, 2], backward_input=4, backward_weight=0, transfer=0.5)).alt
    )


def test_measured_beside_its_walk():
    report = a_report(walk(forward=0.01, backward_input=0.01, backward_weight=0.01), optimizer=0.03)
    picture = plots.pipeline(report, resimulate(report), title="1F1B")
    assert picture.alt.startswith("1F1B. 1f1b, 4 stages, 8 micro-batches, measured: step 360 ms · bubble ")
    assert "(270 ms: the busiest stage's compute and optimizer)" in picture.alt
    assert "simulated: step 330 ms · bubble 27.3 % of the wall clock, 37.5 % of the ideal (240 ms: " in picture.alt
    assert report.source in written(picture) and resimulate(report).source in written(picture)
    assert drawn_spans(picture)["optimizer 0"] == 4 and drawn_spans(picture)["forward 0"] == 64
    assert_inside(picture)


def test_numbers_stand_where_they_fit():
    def numbers(picture):
        return [text.get_text() for axes in picture.figure.axes for text in axes.texts]

    assert sorted(numbers(plots.pipeline(walk("zb-h1")))) == sorted(str(k) for k in range(8) for _ in range(4 * 3))
    assert numbers(plots.pipeline(walk("1f1b", 8, 32))) == []
    some = numbers(plots.pipeline(walk("1f1b", 4, 16)))  # what is long has a number where what is short has none
    assert len(some) == 4 * 16


def test_of_several_ranks_a_stage_the_first_is_drawn_and_it_says_so():
    picture = plots.pipeline(a_report(walk(p=2, m=2, forward=0.01), tp=2))
    assert "4 made-up ranks, 2026-11-29 17:03, the first rank of each stage" in picture.alt
    assert drawn_spans(picture) == {"forward 0": 4, "backward 0": 4}


@pytest.mark.parametrize("draw", [lambda: plots.pipeline(), lambda: plots.pipeline(walk(), names=["a", "b"])])
def test_a_pipeline_needs_runs_and_as_many_names(draw):
    with pytest.raises(ValueError, match="needs a Report|give one for each"):
        draw()


def test_units_do_not_mix():
    report = a_report(walk(forward=0.01))
    with pytest.raises(ValueError, match='say unit="seconds"'):
        plots.pipeline(report, walk())
    assert (
        "simulated: step 330 ms"
        in plots.pipeline(report, walk(forward=0.01, backward_input=0.01, backward_weight=0.01), unit="seconds").alt
    )


@pytest.mark.parametrize("name, v", [("1f1b", 1), ("zb-v", 2), ("interleaved", 4)])
def test_nothing_written_is_cut_off(name, v):
    times = {"forward": [0.0101, 0.0123, 0.0132, 0.02], "backward_input": 0.0111, "backward_weight": 0.0091}
    walked = walk(name, 4, 8, v, **times, transfer=0.003)
    assert_inside(plots.pipeline(a_report(walked, optimizer=0.01, messages=0.003), title="all"))
    assert_inside(plots.pipeline(walked, walked, unit="seconds", names=["one", "two"]))


# --- the model cut into stages ---------------------------------------------------------------------------------------

MODEL = ModelConfig(layers=8, vocab=8192)
IN_FLIGHT = [4, 3, 2, 1]


def cuts(model=MODEL, parts=4):
    return {
        rule: partition(model, parts, rule, sequences=2, in_flight=IN_FLIGHT if parts == 4 else None)
        for rule in ("uniform", "compute", "memory")
    }


def test_bars_are_what_the_parts_weigh():
    picture = plots.partition(MODEL, cuts(), in_flight=IN_FLIGHT, sequences=2)
    for rule, parts in cuts().items():
        for stage, (part, held) in enumerate(zip(parts, IN_FLIGHT, strict=True)):
            weighs = bytes_text(part_bytes(part, MODEL, sequences=2, in_flight=held))
            assert f"stage {stage} ({part}) {weighs}" in picture.alt[picture.alt.index(f"{rule}: ") :]
    assert "in flight 4, 3, 2, 1 micro-batches of 2 sequences of 256" in picture.alt
    assert "predicted from the formulas" in picture.alt


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weight", ["memory", "compute", "parameters"])
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_every_cut_is_drawn(weight, parts, tied):
    model = MODEL.but(tied=tied)
    picture = plots.partition(model, cuts(model, parts), weight=weight, sequences=2)
    assert picture.png.startswith(b"\x89PNG") and len(picture.png) < 120_000
    assert_inside(picture)
    pieces = drawn_boxes(picture)
    assert sum(name.endswith("head") for name in pieces) == 3  # in each cut on one stage
    assert sum(name.endswith("embedding") for name in pieces) == (0 if weight == "compute" else 3)


def drawn_boxes(picture: Picture) -> list[str]:
    return [a.get_gid() for axes in picture.figure.axes for a in axes.patches + axes.artists if a.get_gid()]


def test_one_stage_holds_a_tied_matrix_once():
    alt = plots.partition(MODEL, {"all": partition(MODEL, 1)}, weight="parameters").alt
    assert f"{part_parameters(partition(MODEL, 1)[0], MODEL) / 1e6:.3g} M" in alt


def test_a_limit_names_what_is_beyond_it():
    limit = 110 * MIB
    picture = plots.partition(MODEL, cuts(), in_flight=IN_FLIGHT, sequences=2, limit=limit)
    over = [
        f"over by {bytes_text(n - limit)}"
        for parts in cuts().values()
        for part, held in zip(parts, IN_FLIGHT, strict=True)
        if (n := part_bytes(part, MODEL, sequences=2, in_flight=held)) > limit
    ]
    assert len(over) == 3 and [text for text in written(picture) if text.startswith("over by")] == over
    assert picture.alt.count("over by") == 3 and "The limit is 110 MiB" in picture.alt
    assert_inside(picture)


def test_measured_stands_beside_the_formula():
    report = a_report(walk(forward=[0.01, 0.01, 0.01, 0.02], backward_input=0.01, backward_weight=0.01))
    memory = plots.partition(MODEL, cuts(), measured={"uniform": report}, limit=100 * MIB)
    assert "measured 290 MiB" in memory.alt and report.source in memory.alt and "measured peak" in written(memory)
    compute = plots.partition(MODEL, cuts(), weight="compute", measured={"memory": report})
    assert "measured 30.0 ms" in compute.alt and "measured 40.0 ms" in compute.alt
    given = plots.partition(
        MODEL, cuts(), weight="parameters", measured={"uniform": [1e6, 2e6, 3e6, 4e6]}, source="measured on paper"
    )
    assert "measured 3 M" in given.alt and "measured on paper" in given.alt


@pytest.mark.parametrize(
    "more, words",
    [
        ({"weight": "money"}, "weight can be memory, compute, parameters"),
        ({"in_flight": [1, 2]}, "2 numbers for the 4 stages of 'uniform'"),
        ({"measured": {"other": [1] * 4}}, "they are uniform, compute, memory"),
        ({"measured": {"uniform": [1] * 3}, "source": "measured"}, "3 stages for the 4"),
        ({"measured": {"uniform": [1] * 4}}, "say where the measured numbers are from"),
    ],
)
def test_a_partition_that_cannot_be_drawn_says_why(more, words):
    with pytest.raises(ValueError, match=words):
        plots.partition(MODEL, cuts(), **more)


def test_nothing_to_cut_is_refused():
    with pytest.raises(ValueError, match="at least one cut"):
        plots.partition(MODEL, {})
    with pytest.raises(ValueError, match="tp=2 cuts them"):
        plots.partition(MODEL, cuts(), measured={"uniform": a_report(walk(), tp=2)})
