"""A panel: controls over a configuration, a real run for every setting, and the pictures of what was measured.

    panel = Panel(model, parallel, train, {"tp": [1, 2, 4]}, draw=lambda report, panel: [timeline(report)])

A move of a control measures that setting, or shows what was measured before. Runs happen in threads of their own and
callbacks return at once, on whichever thread they come: a blocked one would keep Cancel from arriving.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from pcourse import world as worlds
from pcourse.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig
from pcourse.lab.check import Friendly
from pcourse.lab.draw.history import history
from pcourse.lab.experiments import Training
from pcourse.lab.front_end import front_end
from pcourse.lab.panel_view import View
from pcourse.lab.picture import Picture, stacked
from pcourse.lab.plots import communication, ledger, timeline
from pcourse.report import Report

PAUSE = 0.12  # seconds that a move waits for the next one, so that arrow keys do not start a run each
TICK = 0.04  # seconds between two looks of a cell that waits, and between two steps of the progress bar


class NothingMeasured(Friendly):
    """A report was asked for, and no run has finished."""


@dataclasses.dataclass(frozen=True)
class _Result:
    """What a finished run leaves: its report, and what was drawn of it."""

    values: dict  # of the controls
    report: Report
    body: str
    pictures: tuple[Picture, ...]

    @property
    def height(self) -> int:
        return sum(picture.size[1] + 8 for picture in self.pictures)


class _Run:
    """One measurement; a loud one was asked for by a cell, which is told how it ended."""

    def __init__(self, settings, values: dict, loud: bool):
        self.settings, self.values, self.loud = settings, values, loud
        self.gone = threading.Event()  # cancelled, or replaced by a newer one
        self.world = None
        self.next_look = 0.0

    def cancel(self) -> None:
        self.gone.set()
        if self.world is not None:
            self.world.close()  # not cancel(): a run that has not begun must not begin


class Panel:
    """Controls, Run and Cancel, progress, and the pictures of the newest result.

    `controls` maps fields of ModelConfig, ParallelConfig or TrainConfig to the values to choose from. `draw(report,
    panel)` returns pictures and HTML. With `after`, a Predict or Choose, the panel opens when that is locked; without
    a front end it is always open. `measure` stands in for `pcourse.measure` (a partial with another clock, say),
    `world` for how ranks are made (`World`). An `experiment` (see `experiments`) runs something else than training.
    """

    def __init__(
        self,
        model: ModelConfig | None = None,
        parallel: ParallelConfig | None = None,
        train: TrainConfig | None = None,
        controls: Mapping[str, Sequence] | None = None,
        draw: Callable[[Report, Panel], Sequence] | None = None,
        after=None,
        title: str = "",
        *,
        experiment=None,
        measure: Callable[..., Report] | None = None,
        world: Callable[[int], worlds.World] | None = None,
    ):
        self._experiment = experiment or Training(model, parallel, train, measure)
        self._controls = dict(controls or {})
        self._draw, self._after = draw or _draw_all, after
        self._world = world or worlds.World
        self._mutex = threading.RLock()
        self._run: _Run | None = None
        self._waiting = 0  # cells that wait for a report
        self._failure: Exception | None = None  # what a cell has not been told yet
        self._quiet = False
        self._shown: _Result | None = None
        self._results: dict[object, _Result] = {}
        self.reports: list[Report] = []
        values = {name: self._experiment.default(name, options) for name, options in self._controls.items()}
        self._view = View(title, self._controls, values, self._moved, self._clicked, self.cancel)
        self._close()
        if after is None:
            self._open()
        else:
            after.when_locked(self._open)

    # What lessons call.

    @property
    def report(self) -> Report | None:
        """The report on show; None before the first."""
        return self._shown.report if self._shown else None

    @property
    def settings(self) -> dict:
        """What the controls show, by name."""
        return self._view.values

    def start(self, **changes) -> None:
        """Set controls to `changes` and measure anew, as the Run button does. Returns at once."""
        self._require_open()
        self._set(changes)
        self._request(anew=True, loud=True)

    def cancel(self) -> None:
        """End the run, if there is one."""
        with self._mutex:
            run, self._run = self._run, None
            if run is None:
                return
            run.cancel()
            words = "The run was cancelled: press Run, then run this cell again."
            self._tell_cell(NothingMeasured(words), run.loud)
            self._view.rest("cancelled; Run starts again", "warning")
            self._view.stale(self._from_before())

    async def finished(self) -> Report:
        """Wait for the run that goes on and return the report on show. If nothing was run yet, run what is set.

        Raises PredictFirst while the panel is closed, NothingMeasured if the run is cancelled, and what the run raised
        if it failed.
        """
        self._require_open()
        if self._run is None and self._shown is None and self._failure is None:
            self.start()
        await self._ended()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return self._shown.report

    async def _ended(self) -> None:
        """Wait without blocking, so that Cancel arrives."""
        self._waiting += 1
        try:
            while self._run is not None:
                await asyncio.sleep(TICK)
        except BaseException:  # the cell was interrupted, and so is what it waits for
            self.cancel()
            self._failure = None
            raise
        finally:
            self._waiting -= 1

    async def sweep(self, **options: Sequence) -> list[Report]:
        """The reports of one control's values in turn, `await panel.sweep(tp=[1, 2, 4])`, measured where they are new.

        Afterwards the control stands where it stood.
        """
        self._require_open()
        ((name, values),) = options.items()
        before, reports = self.settings.get(name), []
        try:
            for value in values:
                self._set({name: value})
                self._request(anew=False, loud=True)
                reports.append(await self.finished())
        finally:
            self._set({name: before})
        self._request(anew=False, loud=True)
        await self.finished()
        return reports

    # What is shown where.

    @property
    def png(self) -> bytes | None:
        """The pictures on show in one image; None before the first result."""
        return stacked(self._shown.pictures) if self._shown and self._shown.pictures else None

    def _repr_mimebundle_(self, include=None, exclude=None, **_):
        """The live widgets, and for viewers without them the pictures of a finished run."""
        if self._shown is None and self._run is None and not front_end():
            self._run_to_the_end()
        data = dict(self._view.widget._repr_mimebundle_())
        data["text/plain"] = "A panel of controls and what they measure: run this cell to use it."
        if self._shown is None or not self._shown.pictures:
            return data
        data["text/plain"] = "\n\n".join(picture.alt for picture in self._shown.pictures)
        data["image/png"] = base64.b64encode(self.png).decode()
        width = max(picture.size[0] for picture in self._shown.pictures)
        return data, {"image/png": {"width": width, "height": sum(p.size[1] for p in self._shown.pictures)}}

    def _run_to_the_end(self) -> None:
        self.start()
        while self._run is not None:
            time.sleep(TICK)

    # Open and closed.

    def _require_open(self) -> None:
        if self._after is not None:
            self._after.require()

    def _close(self) -> None:
        self._view.allow(False)
        self._view.say("closed")
        self._view.place_holder("Lock your prediction above to open this panel")

    def _open(self) -> None:
        with self._mutex:
            self._view.allow(True)
            if self._run is None and self._shown is None:
                self._view.say("ready")
                self._view.place_holder("Press Run, or change a setting")

    # What the learner does. An exception in a callback would be shown nowhere.

    def _moved(self) -> None:
        if not self._quiet:
            self._guarded(anew=False)

    def _clicked(self) -> None:
        self._guarded(anew=True)

    def _guarded(self, anew: bool) -> None:
        try:
            self._request(anew, loud=False)
        except Exception as error:  # noqa: BLE001
            self._view.fail("The panel could not start this run", f"{type(error).__name__}: {error}")

    def _set(self, changes: Mapping) -> None:
        """Move controls without measuring each move."""
        for name, value in changes.items():
            if name not in self._controls:
                raise ValueError(f"this panel has no control {name!r}; it has {', '.join(self._controls) or 'none'}")
            if value not in self._controls[name]:
                legal = ", ".join(map(str, self._controls[name]))
                raise ValueError(f"{name}={value!r} is not among this panel's settings; {name} can be {legal}")
        with self._mutex:
            self._quiet = True
            try:
                for name, value in changes.items():
                    self._view.controls[name].value = value
            finally:
                self._quiet = False

    # Runs.

    def _request(self, anew: bool, loud: bool) -> None:
        """Show what the controls say: from before unless `anew`, else by a run, which replaces the one that goes on."""
        with self._mutex:
            if self._run is not None:
                self._run.cancel()
                self._run = None
            self._failure = None
            try:
                settings = self._experiment.settings(self._view.values)
            except ConfigError as error:
                self._refuse(error, loud)
                return
            known = self._results.get(settings)
            if known is not None and not anew:
                self._show(known, again=True)
                return
            self._run = _Run(settings, dict(self._view.values), loud)
            ranks = self._experiment.ranks_of(settings)
            self._view.busy(f"starting {ranks} rank{'s' if ranks > 1 else ''} …")
            pause = 0 if anew else PAUSE
            threading.Thread(target=self._work, args=(self._run, pause), name="pcourse-panel", daemon=True).start()

    def _refuse(self, error: ConfigError, loud: bool) -> None:
        self._tell_cell(error, loud)
        self._view.rest("this setting cannot run", "danger")
        self._view.fail("This setting cannot run", str(error))

    def _work(self, run: _Run, pause: float) -> None:
        """The thread of one run."""
        if run.gone.wait(pause):
            return
        try:
            run.world = self._world(self._experiment.ranks_of(run.settings))
            if run.gone.is_set():  # cancelled before there was a world to close
                return
            report = self._experiment.run(run.settings, run.world, _Progress(self, run))
            self._finish(run, report, self._drawn(run, report))
        except worlds.RunCancelled:
            self._cancelled(run)
        except BaseException as error:  # noqa: BLE001  shown in the panel, raised by finished()
            self._fail(run, error)

    def _drawn(self, run: _Run, report: Report) -> _Result:
        items = list(self._draw(report, self))
        body = "".join(item if isinstance(item, str) else item.html for item in items)
        return _Result(run.values, report, body, tuple(item for item in items if isinstance(item, Picture)))

    def _finish(self, run: _Run, report: Report, result: _Result) -> None:
        with self._mutex:
            if run.gone.is_set():
                return
            self._run = None
            self.reports.append(report)
            self._results[run.settings] = result
            self._show(result, again=False)

    def _show(self, result: _Result, again: bool) -> None:
        self._shown = result
        before = " (from before; Run measures anew)" if again else ""
        self._view.rest(f"{result.report.source}{before}", "" if again else "success")
        measured = [(r.values, r.report) for r in self._results.values() if isinstance(r.report, Report)]
        self._view.show(result.body + history(measured, result.report), result.height)

    def _cancelled(self, run: _Run) -> None:
        """Something else than this panel ended the run: its World was closed."""
        with self._mutex:
            if self._run is run:
                self.cancel()

    def _fail(self, run: _Run, error: Exception) -> None:
        with self._mutex:
            if run.gone.is_set():  # what a run says that was ended is of no interest
                return
            self._run = None
            self._tell_cell(error, run.loud)
            self._view.rest("failed; Run tries again", "danger")
            known = isinstance(error, (ConfigError, worlds.RankError))
            self._view.fail("The run failed", str(error) if known else f"{type(error).__name__}: {error}")

    def _tell_cell(self, error: Exception, loud: bool) -> None:
        """Keep `error` for the cell that waits, or that asked; a click that fails is no reason for a cell to fail."""
        self._failure = error if loud or self._waiting else None

    def _from_before(self) -> str:
        return f"from before: {self._shown.report.source}" if self._shown else ""


class _Progress:
    """What `measure` calls as its steps end; it ends a run that was cancelled while nothing else could."""

    def __init__(self, panel: Panel, run: _Run):
        self.panel, self.run = panel, run

    def __call__(self, step: int, of: int, note: str = "", **_) -> None:
        if self.run.gone.is_set():
            raise worlds.RunCancelled("the run was cancelled")
        now = time.monotonic()
        if now < self.run.next_look and step < of:
            return
        self.run.next_look = now + TICK
        with self.panel._mutex:
            if self.panel._run is self.run:
                self.panel._view.progress(step, of, note or f"step {step} of {of}")


def _draw_all(report: Report, _) -> list[Picture]:
    return [timeline(report), communication(report), ledger(report)]
