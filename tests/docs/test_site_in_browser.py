"""The documentation in a browser, opened from files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import browser, open_page  # noqa: F401


@pytest.mark.parametrize("page", ["index.html", "guides/rows.html"])
def test_search_without_a_server(site: Path, open_page: Callable[..., Any], page: str) -> None:  # noqa: F811
    opened = open_page(site / page)
    opened.locator("[data-md-component=search-query]").click()
    opened.keyboard.type("damping")
    opened.wait_for_selector(".md-search-result__link", state="attached")
    links = opened.eval_on_selector_all(".md-search-result__link", "links => links.map(link => link.href)")
    assert (site / "scan.html").as_uri() + "#damping" in links
