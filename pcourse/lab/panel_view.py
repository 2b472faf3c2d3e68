"""What a panel looks like: its widgets, and what is written in them. It knows nothing of runs.

Everything may be called from any thread. Results are one HTML widget, replaced as a whole, so that nothing flickers;
what comes in between is laid over the old result, so that nothing below moves.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence

import ipywidgets as W

from pcourse.lab.keys import keep_keys
from pcourse.lab.palette import CSS_BAD, CSS_INK, CSS_LINE, CSS_MUTED, CSS_PAPER

FIRST_HEIGHT = 260  # pixels that are kept free before the first result comes


class View:
    """The widgets of one panel. `moved`, `run` and `cancel` are called when the learner does so."""

    def __init__(self, title: str, controls: Mapping[str, Sequence], values: Mapping, moved, run, cancel):
        self.controls = {name: _dropdown(name, options, values[name]) for name, options in controls.items()}
        for control in self.controls.values():
            control.observe(lambda _: moved(), names="value")
        self.run = W.Button(description="Run", icon="play", button_style="primary", tooltip="Measure anew")
        self.cancel = W.Button(description="Cancel", icon="stop", disabled=True, tooltip="End this run now")
        self.run.on_click(lambda _: run())
        self.cancel.on_click(lambda _: cancel())
        for button in (self.run, self.cancel):
            button.layout.width = "96px"
        self.bar = W.IntProgress(min=0, max=1, layout=W.Layout(width="150px"))
        self.status = W.HTML(layout=W.Layout(flex="1 1 260px"))
        self.result = W.HTML(layout=W.Layout(min_height=f"{FIRST_HEIGHT}px", width="100%"))
        self._body, self._height = "", FIRST_HEIGHT
        wrap = {"flex_flow": "row wrap", "align_items": "center"}
        head = f'<div style="color:{CSS_INK};font-weight:600;font-size:15px">{html.escape(title)}</div>'
        rows = [
            *([W.HTML(head)] if title else []),
            W.HBox(list(self.controls.values()), layout=W.Layout(grid_gap="4px 18px", **wrap)),
            W.HBox([self.run, self.cancel, self.bar, self.status], layout=W.Layout(min_height="44px", **wrap)),
            self.result,
        ]
        self.widget = keep_keys(W.VBox(rows, layout=W.Layout(margin="8px 0", width="100%")))

    @property
    def values(self) -> dict:
        """What the controls show."""
        return {name: control.value for name, control in self.controls.items()}

    def allow(self, allowed: bool) -> None:
        """Enable or disable every control and the Run button."""
        for widget in (*self.controls.values(), self.run):
            widget.disabled = not allowed

    def say(self, words: str) -> None:
        """The status line."""
        style = f"color:{CSS_MUTED};font-size:13px;line-height:1.4;padding-left:6px"
        self.status.value = f'<div role="status" aria-live="polite" style="{style}">{html.escape(words)}</div>'

    def busy(self, words: str) -> None:
        """A run has started: the result on show is from before."""
        self.run.disabled, self.cancel.disabled = True, False
        self.bar.bar_style, self.bar.value, self.bar.max = "info", 0, 1
        self.say(words)
        if self._body:
            self._show("measuring; this is the result from before")
        else:
            self.place_holder("Measuring …")

    def progress(self, step: int, of: int, words: str) -> None:
        self.bar.max, self.bar.value = max(1, of), step
        self.say(words)

    def rest(self, words: str, style: str = "") -> None:
        """No run goes on. `style` is the bar's: "success", "warning", "danger", or "" for an empty bar."""
        self.run.disabled, self.cancel.disabled = False, True
        self.bar.bar_style = style
        self.bar.value = self.bar.max if style else 0
        self.say(words)

    def show(self, body: str, height: int) -> None:
        """A result, which is as new as can be."""
        self._body = body
        if height > self._height:  # never lower again, so that what stands below does not jump
            self._height = height
            self.result.layout.min_height = f"{height}px"
        self._show()

    def stale(self, words: str) -> None:
        """The result on show is not what the controls say, and `words` say why."""
        self._show(words if self._body else "")

    def fail(self, headline: str, details: str) -> None:
        """Why there is no result: over the old one, whose place it keeps."""
        details = re.sub(r"\x1b\[[0-9;]*m", "", details)
        block = (
            f'<div role="alert" style="border:1px solid {CSS_BAD};border-left-width:5px;border-radius:4px;'
            f'background:{CSS_PAPER};color:{CSS_INK};padding:8px 12px;margin:4px 0;max-width:730px">'
            f'<div style="font-weight:600;margin-bottom:4px">{html.escape(headline)}</div>'
            '<pre style="font-family:var(--jp-code-font-family, monospace);font-size:12px;line-height:1.45;margin:0;'
            f'white-space:pre-wrap;max-height:340px;overflow:auto;color:{CSS_INK};background:none">{html.escape(details)}</pre></div>'
        )
        self._show(over=block)

    def place_holder(self, words: str) -> None:
        """Nothing to show yet, and why."""
        self.result.value = (
            f'<div style="display:flex;align-items:center;justify-content:center;min-height:{FIRST_HEIGHT - 20}px;'
            f"max-width:730px;border:1px dashed {CSS_LINE};border-radius:6px;color:{CSS_MUTED};font-size:14px;"
            f'padding:0 24px;text-align:center">{html.escape(words)}</div>'
        )

    def _show(self, mark: str = "", over: str = "") -> None:
        """The result; with a `mark` or something `over` it, faint, since it is not the newest."""
        if mark:
            over = (
                '<div style="max-width:730px;text-align:right">'
                f'<div style="display:inline-block;background:{CSS_PAPER};color:{CSS_INK};border:1px solid {CSS_LINE};'
                f'border-radius:4px;padding:2px 10px;font-size:12px">{html.escape(mark)}</div></div>'
            )
        if not over:
            self.result.value = self._body
            return
        faint = f'<div style="opacity:0.4">{self._body}</div>' if self._body else ""
        over = f'<div style="position:{"absolute" if faint else "static"};top:6px;left:0;right:0">{over}</div>'
        inside = self._height - 16  # less than the widget's own, whose margins would else make it grow
        self.result.value = f'<div style="position:relative;min-height:{inside}px">{faint}{over}</div>'


def _dropdown(name: str, options: Sequence, value) -> W.Dropdown:
    """A list to choose from: unlike sliders and toggles it tells a screen reader its name."""
    width = f"{max(len(name) * 8 + 96, 130)}px"
    control = W.Dropdown(
        description=name, options=[(_option_text(option), option) for option in options], value=value,
        layout=W.Layout(width=width),
    )  # fmt: skip
    control.style.description_width = "initial"
    return control


def _option_text(option) -> str:
    if isinstance(option, bool):
        return "on" if option else "off"
    return str(option)
