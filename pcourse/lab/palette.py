"""The colours of the course, the same for the same thing in every picture and in every widget.

They are Okabe and Ito's, which colour-blind readers can tell apart; hatches and labels carry the same meaning again.
"""

from __future__ import annotations

from matplotlib.colors import to_rgb

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, BLACK = "#0072B2", "#D55E00", "#CC79A7", "#000000"

INK, MUTED, LINE, PALE = "#1F2328", "#59636E", "#D1D9E0", "#F3F5F7"
GOOD, BAD = "#00694D", "#B04A00"
WHOLE = "#DDE3E9"  # what every rank holds whole

# One colour and one hatch per kind of time, wherever time is drawn.
TIME = {
    "forward": (SKY, ""),
    "backward": (BLUE, ""),
    "backward-input": (BLUE, ""),
    "backward-weight": (GREEN, "..."),
    "recompute": (SKY, "\\\\\\"),
    "optimizer": (PURPLE, "xxx"),
    "compute": (BLUE, ""),
    "communication": (ORANGE, ""),
    "waiting": (YELLOW, "////"),
    "idle": (PALE, ""),
}
# One colour and one hatch per kind of memory. Activations are the forward's work, gradients the backward's.
MEMORY = {
    "parameters": (GREEN, ""),
    "gradients": (BLUE, "////"),
    "optimizer": (PURPLE, "xxx"),
    "activations": (SKY, ""),
    "temporary": (YELLOW, "..."),
}
RANKS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW, "#7A8490")

# The same inks in a page: the theme's own in Lab, light or dark; elsewhere those above.
CSS_INK = f"var(--jp-content-font-color1, {INK})"
CSS_MUTED = f"var(--jp-content-font-color2, {MUTED})"
CSS_LINE = f"var(--jp-border-color1, {LINE})"
CSS_FAINT_LINE = f"var(--jp-border-color2, {LINE})"
CSS_PAPER = "var(--jp-layout-color1, #FFFFFF)"
CSS_GOOD = f"var(--jp-success-color1, {GOOD})"
CSS_BAD = f"var(--jp-error-color1, {BAD})"


def rank_colour(rank: int) -> str:
    """The colour of `rank`, the same in every picture."""
    return RANKS[rank % len(RANKS)]


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on `colour`."""
    red, green, blue = to_rgb(colour)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.52 else "#FFFFFF"


def tint(colour: str, share: float = 0.3) -> tuple[float, float, float]:
    """`colour` thinned with white to `share` of its strength, so that ink stays readable on it."""
    return tuple(1 - share * (1 - part) for part in to_rgb(colour))


def edge_of(colour) -> tuple[float, float, float]:
    """A darker shade of `colour`: its outline, and its hatch."""
    return tuple(0.62 * part for part in to_rgb(colour))
