"""A JupyterLab over a copy of the checkout for each file of browser tests; without a browser a skip that says why."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import labdriver
import nbformat

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    reason = labdriver.missing()
    if reason:
        pytest.skip(reason)
    root = labdriver.copy_of(CHECKOUT, tmp_path_factory.mktemp("lab") / "course")
    with labdriver.server(root) as running:
        yield running


@pytest.fixture(scope="module")  # Playwright keeps an event loop running while it lives
def page(lab):
    with labdriver.browser() as page:
        yield page


@pytest.fixture(scope="module")
def lesson(request, lab, page):
    """The module's NOTEBOOK, open in Lab."""
    return labdriver.open_notebook(page, lab, request.module.NOTEBOOK)


@pytest.fixture(scope="module")
def cell(request, lab):
    """The number of the code cell of the module's NOTEBOOK that has these words."""
    cells = [c.source for c in nbformat.read(lab.root / request.module.NOTEBOOK, 4).cells if c.cell_type == "code"]
    return lambda words: next(number for number, source in enumerate(cells) if words in source)


@pytest.fixture
def shot(request, page, tmp_path):
    """What the page showed, kept when the test failed: its path is printed."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        path = Path(os.environ.get("PCOURSE_SHOTS", tmp_path)) / f"{request.node.name}.png"
        page.screenshot(path=path)
        print(f"screenshot: {path}")
