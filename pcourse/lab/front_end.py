"""Whether a person looks on, and the one line that a lesson says when they must answer first."""

from __future__ import annotations

import os

from pcourse.lab.check import Friendly


class PredictFirst(Friendly):
    """What follows is closed until the prediction above it is locked."""


def front_end() -> bool:
    """Whether a person looks on: JupyterLab and VS Code name the cell in what they send, nbclient and nbval do not.

    PCOURSE_HEADLESS=1 says no, 0 says yes, whatever the request carries.
    """
    if (said := os.environ.get("PCOURSE_HEADLESS")) in ("0", "1"):
        return said == "0"
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None or not hasattr(shell, "get_parent"):
        return False
    return "cellId" in shell.get_parent().get("metadata", {})
