"""The notebook side of the course: predict, run, compare, check.

`Predict` and `Choose` lock an answer, `Panel` runs and shows, `plots` draws, `check` frames exercises. No torch here.
"""

from pcourse.lab.check import CheckFailed, NotSolvedYet, Scoreboard, check
from pcourse.lab.experiments import Messages
from pcourse.lab.panel import Panel
from pcourse.lab.plots import (
    Picture,
    bytes_text,
    communication,
    layer_communication,
    ledger,
    ring,
    seconds_text,
    split_matrix,
    timeline,
    tradeoff,
)
from pcourse.lab.predict import Choose, Predict
from pcourse.lab.source import show_source

__all__ = [
    "CheckFailed", "Choose", "Messages", "NotSolvedYet", "Panel", "Picture", "Predict", "Scoreboard", "bytes_text",
    "check", "communication", "layer_communication", "ledger", "ring", "seconds_text", "show_source", "split_matrix",
    "timeline", "tradeoff",
]  # fmt: skip
