"""JupyterLab on loopback, driven in Debian's Chromium: what a learner does, done by a test.

    with labdriver.server(root) as lab, labdriver.browser() as page:
        notebook = labdriver.open_notebook(page, lab, "lesson.ipynb")
        notebook.run_all()

Lab saves by itself, so `root` must be a copy (`copy_of`). Every wait is for something that is seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
LONG = 90_000  # milliseconds: a loaded machine is slow, a broken page is broken for ever

# A box with news would lie over the notebook; cells off screen would not be in the page.
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {
        "fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True,
    },
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
}  # fmt: skip
DARK = {"@jupyterlab/apputils-extension/themes": {"theme": "JupyterLab Dark"}}


def missing() -> str:
    """Why no browser can be driven here; "" if one can."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "playwright is not installed (pip install playwright)"
    return "" if os.path.exists(CHROMIUM) else f"there is no {CHROMIUM} (apt-get install chromium)"


@dataclass(frozen=True)
class Lab:
    """A running server: where it answers, its token, and the folder that it shows."""

    url: str
    token: str
    root: Path


def copy_of(checkout: Path, folder: Path) -> Path:
    """A copy of the checkout for Lab to save into, without what is large or made."""
    ignored = shutil.ignore_patterns(".git", ".venv", "venv", "build", "dist", "__pycache__", ".*_cache", "*.egg-info")
    return Path(shutil.copytree(checkout, folder, ignore=ignored, symlinks=True))


@contextlib.contextmanager
def server(root: Path, settings: Mapping[str, Mapping] | None = None) -> Iterator[Lab]:
    """JupyterLab over `root`, with configuration, settings and runtime files of its own."""
    token, port, home = secrets.token_hex(16), _free_port(), Path(tempfile.mkdtemp(prefix="lab-"))
    _write_settings(home / "settings", {**SETTINGS, **(settings or {})})
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
        "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}",
        "--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.extension_manager=readonly",
    ]  # fmt: skip
    log = home / "lab.log"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command, env=_environment(home, root), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for_answer(f"{url}/api?token={token}", process, log)
        yield Lab(url, token, root)
    finally:
        _stop(process)
        shutil.rmtree(home, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(home: Path, root: Path) -> dict[str, str]:
    own = {
        "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "run",
        "IPYTHONDIR": "ipython", "JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
    }  # fmt: skip
    environment = {**os.environ, **{name: str(home / folder) for name, folder in own.items()}}
    environment["PYTHONPATH"] = str(root)  # the copy's package, not one that is installed
    environment.pop("PCOURSE_HEADLESS", None)
    return environment


def _write_settings(folder: Path, settings: Mapping[str, Mapping]) -> None:
    for plugin, values in settings.items():
        path = folder / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))


def _wait_for_answer(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + LONG / 1000
    while True:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=2).read()
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"JupyterLab did not start:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.2)


def _stop(process: subprocess.Popen) -> None:
    """Interrupt twice, as Ctrl-C and its confirmation do; kernels end with their server."""
    for _ in range(2):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def browser(width: int = 1280, height: int = 900, scale: float = 1.0):
    """A page of a headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, headless=True)
        try:
            context = chromium.new_context(viewport={"width": width, "height": height}, device_scale_factor=scale)
            yield context.new_page()
        finally:
            chromium.close()


def write_notebook(path: Path, cells: Sequence[str]) -> Path:
    """A notebook of code cells, not yet run."""
    document = {
        "cells": [
            {
                "cell_type": "code", "id": f"cell-{number}", "metadata": {}, "execution_count": None, "outputs": [],
                "source": source,
            }
            for number, source in enumerate(cells)
        ],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }  # fmt: skip
    path.write_text(json.dumps(document))
    return path


class Notebook:
    """One open notebook. Code cells count from 0."""

    def __init__(self, page):
        self.page = page
        self.panel = page.locator(".jp-NotebookPanel:visible")
        self.cells = self.panel.locator(".jp-CodeCell")

    def cell(self, number: int):
        return self.cells.nth(number)

    def output(self, number: int):
        """Everything below the cell."""
        return self.cell(number).locator(".jp-OutputArea")

    def run_all(self) -> None:
        """Run > Run All Cells; returns at once."""
        self._menu("Run", "Run All Cells")

    def clear(self) -> None:
        """Edit > Clear Outputs of All Cells: a saved prompt such as "[1]:" would look like that of a new run."""
        self._menu("Edit", "Clear Outputs of All Cells")

    def start(self, number: int) -> None:
        """Run one cell with the keyboard; returns at once."""
        self.cell(number).locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")

    def run(self, number: int) -> None:
        """Run one cell and wait until it has ended."""
        before = self.prompt(number)
        self.start(number)
        self.wait_run(number, before)

    def wait_run(self, number: int, before: str = "") -> None:
        """Until the cell has a number, and another one than `before`."""
        self._wait_prompt(number, "(now, before) => now !== before && /\\[\\d+\\]:/.test(now)", before)

    def wait_busy(self, number: int) -> None:
        """Until the cell runs."""
        self._wait_prompt(number, "now => now.includes('*')")

    def _wait_prompt(self, number: int, condition: str, before: str = "") -> None:
        self.page.wait_for_function(
            f"""([number, before]) => {{
                const prompts = document.querySelectorAll('.jp-CodeCell .jp-InputArea-prompt');
                return ({condition})(prompts[number].textContent, before);
            }}""",
            arg=[number, before],
            timeout=LONG,
        )

    def prompt(self, number: int) -> str:
        """The text of the cell's prompt: "[ ]:", "[*]:" or "[3]:"."""
        return self.cell(number).locator(".jp-InputArea-prompt").text_content()

    def wait_all_run(self, timeout: int = LONG) -> None:
        """Until every code cell has a number."""
        self.page.wait_for_function(
            """() => {
                const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputArea-prompt')];
                return prompts.length && prompts.every(p => /\\[\\d+\\]:/.test(p.textContent));
            }""",
            timeout=timeout,
        )

    def errors(self) -> list[str]:
        """What cells raised, in order."""
        return self.panel.locator(
            '.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.stderr"]'
        ).all_inner_texts()

    def button(self, words: str, within=None):
        """A widget's button by its words (its icon is part of its accessible name)."""
        return (within or self.panel).locator("button.widget-button", has_text=words)

    def say(self, words: str | re.Pattern, within=None):
        """Widget HTML that holds `words`."""
        return (within or self.panel).locator(".widget-html", has_text=words)

    def interrupt(self) -> None:
        self._menu("Kernel", "Interrupt Kernel")

    def save(self) -> None:
        self._menu("File", "Save Notebook")

    def _menu(self, menu: str, item: str) -> None:
        self.page.get_by_role("menuitem", name=menu, exact=True).click()
        self.page.locator(".lm-Menu-itemLabel", has_text=item).first.click()


def open_notebook(page, lab: Lab, path: str) -> Notebook:
    """Open one notebook alone and wait until its kernel is connected and idle."""
    page.goto(f"{lab.url}/lab/tree/{path}?token={lab.token}&reset", timeout=LONG)
    page.locator(".jp-NotebookPanel:visible .jp-Notebook").wait_for(timeout=LONG)
    # The notebook's own indicator says idle before a kernel is there; the status bar does not.
    page.locator("#jp-main-statusbar", has_text=re.compile(r"\| Idle")).wait_for(timeout=LONG)
    return Notebook(page)
