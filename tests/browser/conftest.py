"""A JupyterLab over a copy of the checkout for each file of browser tests; without a browser a skip that says why."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import labdriver

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


@pytest.fixture
def shot(request, page, tmp_path):
    """What the page showed, kept when the test failed: its path is printed."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        path = Path(os.environ.get("PCOURSE_SHOTS", tmp_path)) / f"{request.node.name}.png"
        page.screenshot(path=path)
        print(f"screenshot: {path}")
