"""The page of a monitored run in a browser, on desktop and mobile screens, in light and dark mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import persample
from persample.monitoring.page import write_page
from tests.support.browser import browser, open_page  # noqa: F401


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with persample.monitor(model, every=1, out=path, bounds=[1.0]) as watching:
        for i in range(30):
            watching.ids = [f"example-{i}-{n}-" + "long" * 20 for n in range(6)]
            model(torch.randn(6, 4)).square().mean().backward()
    return write_page(path)


@pytest.mark.parametrize("width", [320, 768, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_the_screen(open_page: Any, run: Path, width: int, scheme: str) -> None:  # noqa: F811
    page = open_page(run, width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("svg[role=img]").count() == 5
    for chart in page.locator("svg[role=img]").all():
        box = chart.bounding_box()
        assert box["width"] > 150 and box["height"] > 100
        assert "At the last step:" in chart.get_attribute("aria-label")


def test_lines_lie_inside_their_charts(open_page: Any, run: Path) -> None:  # noqa: F811
    page = open_page(run)
    for points in page.eval_on_selector_all("polyline", "lines => lines.map(line => line.getAttribute('points'))"):
        numbers = [tuple(map(float, pair.split(","))) for pair in points.split()]
        assert len(numbers) >= 2 and all(0 <= x <= 100 and 0 <= y <= 100 for x, y in numbers)
        assert [x for x, _ in numbers] == sorted(x for x, _ in numbers)
    page.get_by_role("link", name="Hardest examples").click()
    assert page.locator("table.hardest tbody tr").count() == 20
