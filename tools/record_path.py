"""The modules that a warm step of `record` and `clip` runs through: `python tools/record_path.py --write`.

A profiler notes each module of persample whose functions are called, in the order of the first call. The list is
written to `docs/design.md`, each module with the first line of its docstring; a test compares the page with a new run.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "persample"
PAGE = ROOT / "docs" / "design.md"
START, END = "<!-- path: python tools/record_path.py --write -->", "<!-- end of path -->"

WARM_UP = 3  # steps: the first is audited and verified, the second keeps effects, the third has the ordinary path


def make_step() -> dict[str, Callable[[], Any]]:
    """The parts of a step of two linear layers: what runs in the block, and the answer."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    import persample

    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 5))
    x, y = torch.randn(32, 20), torch.randint(5, (32,))
    block: Any = None
    grads: Any = None
    loss: Any = None

    def enter() -> None:
        nonlocal block, grads
        block = persample.record(model)
        grads = block.__enter__()

    def call() -> None:
        nonlocal loss
        loss = F.cross_entropy(model(x), y)

    return {
        "with persample.record(model) as grads:": enter,
        "    loss = F.cross_entropy(model(x), y)": call,
        "    loss.backward()": lambda: loss.backward(),
        "# the end of the block": lambda: block.__exit__(None, None, None),
        "grads.clip(1.0)": lambda: grads.clip(1.0),
    }


def find_path() -> dict[str, list[str]]:
    """For each part of a step: the modules that run first in it, in order."""
    step = make_step()
    for _ in range(WARM_UP):
        for run in step.values():
            run()
    seen: set[str] = set()
    found: dict[str, list[str]] = {line: [] for line in step}

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and SOURCE in path.parents and (name := find_name(path)) not in seen:
            seen.add(name)
            running.append(name)

    for line, run in step.items():
        running = found[line]
        sys.setprofile(note)
        try:
            run()
        finally:
            sys.setprofile(None)
    return found


def find_name(path: Path) -> str:
    """The place of a module in the source. The boundary to torch is one place."""
    name = str(path.relative_to(SOURCE))
    return "_torch/__init__.py" if name.startswith("_torch/") else name


def summarise(module: str) -> str:
    """The first line of a module's docstring, without its period."""
    docstring = ast.get_docstring(ast.parse((SOURCE / module).read_text())) or ""
    return docstring.split("\n")[0].split(": ")[0].rstrip(".")


def format_path(found: dict[str, list[str]]) -> str:
    """The path as a block of the page."""
    count = sum(map(len, found.values()))
    width = max(len(name) for names in found.values() for name in names) + 2
    lines = [START, f"A warm step runs through {count} modules. Each is listed where it runs first.", "", "```text"]
    for line, names in found.items():
        lines += [line, *(f"        {name:{width}}{summarise(name)}" for name in names)]
    return "\n".join([*lines, "```", END])


def write_page(page: str, path: str) -> str:
    """The page with the path between its marks."""
    before, rest = page.split(START)
    return before + path + rest.split(END)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the path to docs/design.md")
    path = format_path(find_path())
    if parser.parse_args().write:
        PAGE.write_text(write_page(PAGE.read_text(), path))
    else:
        print(path)


if __name__ == "__main__":
    main()
