"""`make docs` builds the documentation, and its pages need no network."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import persample
from persample.private import PrivacyEngine
from tests.support.paths import ROOT


def test_every_page_is_built(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    assert pages <= {page.relative_to(site) for page in site.rglob("*.html")}


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loads = re.compile(r'<(?:script|img|iframe)[^>]+src="https?:|<link[^>]+rel="stylesheet"[^>]+href="https?:')
    assert not [page for page in site.rglob("*.html") if loads.search(page.read_text())]


@pytest.mark.parametrize("name", ["record", "PerSampleGradients.clip", "scan", "private.PrivacyEngine.make_private"])
def test_reference_describes_public_names(site: Path, name: str) -> None:
    reference = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    assert f'id="persample.{name}"' in reference


@pytest.mark.parametrize(
    ("page", "name", "function"),
    [
        ("recording", "record", persample.record),
        ("recording", "watch", persample.watch),
        ("private", "private.PrivacyEngine.make_private", PrivacyEngine.make_private),
    ],
)
def test_reference_shows_each_option(site: Path, page: str, name: str, function: Any) -> None:
    text = (site / "reference" / f"{page}.html").read_text()
    start = text.index(f'id="persample.{name}"')
    section = text[start : re.compile('<h[23] id="').search(text, start).start()]  # type: ignore[union-attr]
    for name in inspect.signature(function).parameters.keys() - {"self"}:
        assert len(re.findall(rf"<td>\s*<code>{name}</code>\s*</td>", section)) == 1, name
    assert "**" not in section
