"""The canonical pictures of the course, each with one look everywhere.

Of runs, measured or predicted alike: `timeline`, `pipeline`, `ledger`, `communication`, `tradeoff`, and `course`, of
memory through a step; under each stands where its numbers are from. Without a run: `partition`, `replicas`,
`split_matrix`, `layer_communication`, `ring`. Each returns a `Picture`.
"""

from pcourse.lab.draw.communication import communication, difference_text
from pcourse.lab.draw.layer import layer_communication
from pcourse.lab.draw.ledger import course, ledger
from pcourse.lab.draw.partition import partition
from pcourse.lab.draw.pipeline import pipeline
from pcourse.lab.draw.product import split_matrix
from pcourse.lab.draw.replicas import replicas
from pcourse.lab.draw.ring import ring
from pcourse.lab.draw.timeline import timeline
from pcourse.lab.draw.tradeoff import tradeoff
from pcourse.lab.picture import Picture

__all__ = [
    "Picture", "communication", "course", "difference_text", "layer_communication", "ledger", "partition", "pipeline",
    "replicas", "ring", "split_matrix", "timeline", "tradeoff",
]  # fmt: skip
