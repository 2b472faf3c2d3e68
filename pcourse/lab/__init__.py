"""The notebook side of the course: predict, run, compare, check.

`Predict` and `Choose` lock an answer, `Panel` runs and shows, `plots` draws, `check` frames exercises. No torch here.
"""

from pcourse.lab import plots
from pcourse.lab.check import CheckFailed, NotSolvedYet, Scoreboard, check
from pcourse.lab.experiments import Messages
from pcourse.lab.panel import Panel
from pcourse.lab.predict import Choose, Predict
from pcourse.lab.source import show_source
from pcourse.wording import bytes_text, seconds_text
from pcourse.world import warm_up

__all__ = [
    "CheckFailed", "Choose", "Messages", "NotSolvedYet", "Panel", "Predict", "Scoreboard", "bytes_text", "check",
    "plots", "seconds_text", "show_source",
]  # fmt: skip

warm_up()  # while the learner reads, the fork server loads torch for the first run
