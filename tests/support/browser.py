"""Opens pages in the system's browser. A module that imports this is skipped without a browser, but not in CI."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if os.environ.get("PERSAMPLE_NEEDS_BROWSER") == "1":  # set by .ci/run
    from playwright import sync_api as playwright
else:
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
if BROWSER is None and os.environ.get("PERSAMPLE_NEEDS_BROWSER") != "1":
    pytest.skip("No browser to show the report in: apt install chromium", allow_module_level=True)

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as runner:
        found = runner.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a page. After the test, check that the page made no request and wrote nothing to the console."""
    messages: list[str] = []
    contexts: list[Any] = []

    def open_file(path: Path, width: int = 1280, height: int = 900, **options: Any) -> Any:
        options = {"viewport": {"width": width, "height": height}, "reduced_motion": "reduce"} | options
        contexts.append(browser.new_context(**options))
        contexts[-1].set_default_timeout(120_000)  # only a page that does not respond takes as long
        page = contexts[-1].new_page()
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("dialog", lambda dialog: messages.append(dialog.message))
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else messages.append(r.url))
        page.goto(path.as_uri())
        return page

    yield open_file
    for context in contexts:
        context.close()
    assert messages == []
