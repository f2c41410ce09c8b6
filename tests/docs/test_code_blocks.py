"""All code blocks of README.md and docs/*.md run.

Python blocks run in order and share the names of their page, which starts with the names of `SETUPS[page]`. A page of
the docs is named by its path in docs/. Each `console` block runs in a new directory. Its lines that start with "$ " are
commands; `run_command` says how they are checked. The other lines are the start of the output. `text` blocks are not
code. A comment in front of a block changes this:

    <!-- test: setup NAME -->         add the names of SETUPS["NAME"] first
    <!-- test: skip, REASON -->       do not run the block
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import persample
from persample.cli import main
from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = {page: page.name if page.parent == ROOT else page.relative_to(ROOT / "docs").as_posix() for page in PAGES}
LANGUAGES = ("python", "console", "text")
FENCE = re.compile(r"^(?:<!-- test: (?P<marker>[^\n]*) -->\n)?```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.M | re.S)
MARKER = re.compile(r"setup (?P<setup>.+)|skip, (?P<reason>.{10,})")
Names = dict[str, Any]

pytestmark = pytest.mark.filterwarnings("ignore")  # of Opacus, transformers and Lightning


@dataclass(frozen=True)
class Block:
    """A code block; `line` is the line of its first line in the page."""

    page: Path
    line: int
    language: str
    code: str
    setup: str | None = None
    skip: str | None = None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def read_blocks(page: Path, text: str) -> Iterator[Block]:
    """All fenced blocks of a page."""
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        marker = MARKER.fullmatch(match["marker"] or "setup ?")
        assert marker, f"{page}:{line}: '{match['marker']}' is neither 'setup NAME' nor 'skip, REASON'"
        setup = marker["setup"] if match["marker"] else None
        yield Block(page, line, match["language"], match["code"], setup, marker["reason"])


def find_indented_code(text: str) -> list[str]:
    """Paragraphs that Markdown shows as code because they are indented; no test would see them."""
    paragraphs = FENCE.sub("", text).split("\n\n")
    return [p for before, p in itertools.pairwise(paragraphs) if is_indented(p) and not is_list(before)]


def is_indented(paragraph: str) -> bool:
    return paragraph.lstrip("\n").startswith("    ")


def is_list(paragraph: str) -> bool:
    """An indented paragraph after a list belongs to its last item."""
    return bool(re.match(r"\s*([-*]|\d+\.) ", paragraph)) or is_indented(paragraph)


# ---- names that the pages use without defining them ----


def make_training() -> Names:
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5))
    x, y = torch.randn(3, 4), torch.tensor([0, 4, 2])
    dataset = TensorDataset(torch.randn(40, 4), torch.arange(40) % 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"torch": torch, "model": model, "x": x, "y": y, "dataset": dataset, "optimizer": optimizer}


def make_expanded_weights() -> Names:
    return {**make_training(), "w": torch.randn(6, 4, requires_grad=True), "F": F, "persample": persample}


def make_process_group() -> Names:
    """A new model, in a process group of one process."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return {**make_training(), "fully_shard": fully_shard, "F": F, "persample": persample}


def make_scan() -> Names:
    names = make_training()
    for epoch in (1, 2):
        torch.save(names["model"].state_dict(), f"epoch{epoch}.pt")
    return {**names, "loss_fn": nn.CrossEntropyLoss(), "test_batch": names["dataset"][:3]}


def make_compiled() -> Names:
    """A model for torch.compile; without a C++ compiler, the graphs are not compiled."""
    names = make_training()
    if shutil.which("g++") or shutil.which("clang++"):
        compile_ = persample.compile
    else:
        compile_ = lambda *args, mode=None, **options: persample.compile(*args, **options, backend="eager")  # noqa: E731
    proxy = SimpleNamespace(record=persample.record, compile=compile_)
    return {**names, "F": F, "persample": proxy, "loader": [(names["x"], names["y"])]}


def make_private() -> Names:
    import opacus

    names = make_training()
    loader = DataLoader(names["dataset"], batch_size=8)
    return {**names, "loader": loader, "loss_fn": F.cross_entropy, "opacus": opacus, "persample": persample}


def make_audit() -> Names:
    dataset = TensorDataset(torch.randn(128, 20), torch.randint(5, (128,)))
    make_model = lambda: nn.Sequential(nn.Linear(20, 100), nn.ReLU(), nn.Linear(100, 5))  # noqa: E731
    return {"F": F, "DataLoader": DataLoader, "dataset": dataset, "make_model": make_model}


def make_language_model() -> Names:
    labels = torch.tensor([[1, 2, -100], [0, -100, -100]])
    return {"F": F, "logits": torch.randn(2, 3, 5, requires_grad=True), "labels": labels}


def make_huggingface() -> Names:
    from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(vocab_size=20, max_position_embeddings=8, **sizes))
    data = [{"input_ids": torch.arange(6) + i % 9, "labels": i % 2} for i in range(24)]
    arguments = TrainingArguments(
        "trainer", per_device_train_batch_size=4, num_train_epochs=1, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    return {"model": model, "data": data, "arguments": arguments}


def make_lightning() -> Names:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 5)

        def forward(self, x: Any) -> Any:
            return self.layer(x)

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            return F.cross_entropy(self(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    loader = DataLoader(make_training()["dataset"], batch_size=8)
    return {
        "pl": SimpleNamespace(Trainer=partial(pl.Trainer, max_epochs=1, **quiet)),
        "module": Module(),
        "loader": loader,
    }


SETUPS: dict[str, Callable[[], Names]] = {
    "guides/recording.md": make_training,
    "guides/expanded_weights.md": make_expanded_weights,
    "a process group": make_process_group,
    "scan.md": make_scan,
    "compile.md": make_compiled,
    "private.md": make_private,
    "a language model": make_language_model,
    "an audit": make_audit,
    "Hugging Face": make_huggingface,
    "Lightning": make_lightning,
}


# ---- what the blocks of a page must have done ----


def check_readme(names: Names) -> None:
    assert Path("scan/report.html").exists()
    assert names["grads"].norms().shape == (32,) and names["engine"].get_epsilon(delta=1e-5) > 0


def check_scan(names: Names) -> None:
    assert Path("scans/mine/report.html").exists()


def check_compiled(names: Names) -> None:
    assert names["norms"].shape == (3,) and names["clipped"].keys() == dict(names["model"].named_parameters()).keys()


def check_private(names: Names) -> None:
    assert names["loss"].shape == () and names["trainer"] is not None
    assert all(p.grad is not None for p in names["model"].parameters())


CHECKS: dict[str, Callable[[Names], None]] = {
    "README.md": check_readme,
    "scan.md": check_scan,
    "compile.md": check_compiled,
    "private.md": check_private,
}


# ---- running ----


@pytest.fixture(autouse=True)
def new_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run each test in a new directory, and end the process group afterwards."""
    monkeypatch.chdir(tmp_path)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def run_blocks(blocks: list[Block], names: Names, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = {name: names[name] for name in ("x", "y") if name in names}
    for block in blocks:
        assert block.language in LANGUAGES, f"{block}: the language is '{block.language}', not one of {LANGUAGES}"
        if block.skip:
            continue
        names.update(SETUPS[block.setup]() if block.setup else {})
        if block.language == "python":
            # The traceback names the page and the line.
            exec(compile("\n" * (block.line - 1) + block.code, str(block.page), "exec"), names)
            names.update(fixed)  # a loop over a loader has changed them
        elif block.language == "console":
            run_console(block, capsys)


MY_MODEL = """
import torch

def to_scan():
    data = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.arange(40) % 5)
    return torch.nn.Linear(4, 5), data, torch.nn.CrossEntropyLoss()

def to_evaluate():
    x, y = torch.randn(60, 4), torch.arange(60) % 5
    train = lambda data, seed: torch.nn.Linear(4, 5)
    return train, (x[:40], y[:40]), (x[40:], y[40:]), torch.nn.CrossEntropyLoss()


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64 * 64, 2))
"""


def run_console(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the commands of a block, and compare the output that the block shows."""
    directory = Path(f"console{block.line}")
    directory.mkdir()
    (directory / "examples").symlink_to(ROOT / "examples")
    (directory / "my_model.py").write_text(MY_MODEL)
    write_photos(directory / "photos")
    with contextlib.chdir(directory), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path.cwd()))
        patch.setattr("persample.scanning.report.review.ReviewServer.serve_forever", interrupt)
        run_commands(block, capsys)


def interrupt(server: Any) -> None:
    """What Ctrl-C does to a server."""
    raise KeyboardInterrupt


def write_photos(folder: Path) -> None:
    """A folder with images of two classes."""
    from PIL import Image

    for i in range(8):
        path = folder / ("cats", "dogs")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (30 * i, 0, 200)).save(path)


def run_commands(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    for part in re.split(r"^\$ ", block.code, flags=re.M)[1:]:
        command, _, expected = part.partition("\n")
        capsys.readouterr()
        run_command(shlex.split(command, comments=True), str(block))
        if expected.strip():
            shown, output = normalise(expected), normalise(capsys.readouterr().out)
            assert output[: len(shown)] == shown, f"{block}: the output has changed"


def normalise(output: str) -> list[str]:
    """The words of an output without rounding errors, which depend on the machine."""
    return re.sub(r"\b\d(\.\d+)?e-\d\d\b", "<error>", output).split()


def run_command(words: list[str], where: str) -> None:
    """Run a command of persample in this process; check that other commands could run."""
    if words[:3] == ["python", "-m", "persample"]:
        words = words[2:]
    if words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        parsed = get_args_parser().parse_args(words[1:])
        assert parsed.module, where
        words = [parsed.training_script, *parsed.training_script_args]
    if words[0] == "persample":
        assert main(words[1:]) == 0, where
    elif words[0] == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(words[1:]) <= set(targets), f"{where}: the targets of the Makefile are {targets}"
    elif words[:2] == ["pip", "install"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for word in set(words[2:]) - {"torch"}:
            match = re.fullmatch(r"(?:persample|\.)(?:\[([\w,]+)\])?", word)
            assert match and set((match[1] or "all").split(",")) <= set(project["optional-dependencies"]), where
    else:
        raise AssertionError(f"{where}: no test for the command {words[0]}")


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_blocks_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = list(read_blocks(page, page.read_text()))
    names = SETUPS[NAMES[page]]() if NAMES[page] in SETUPS else {}
    run_blocks(blocks, names, capsys)
    CHECKS.get(NAMES[page], lambda names: None)(names)


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_every_block_is_fenced(page: Path) -> None:
    text = page.read_text()
    assert not find_indented_code(text), "indent no code: write ```python, ```console or ```text"
    assert len(list(FENCE.finditer(text))) * 2 == len(re.findall(r"^\s*```", text, re.M)), "a fence is indented or open"


# ---- the test itself ----


def run_text(text: str, capsys: pytest.CaptureFixture[str]) -> Names:
    names: Names = {}
    run_blocks(list(read_blocks(ROOT / "page.md", text)), names, capsys)
    return names


def test_blocks_share_names_and_may_be_skipped_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [
        "```python\na = 1\n```",
        "<!-- test: skip, it needs a GPU -->\n```python\na = 2\n```",
        "```python\nb = a + 1\n```",
    ]
    assert run_text("\n\n".join(blocks), capsys)["b"] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nraise KeyError('x')\n```\n", "x"),
        ("```\na = 1\n```\n", "the language is ''"),
        ("<!-- test: skip -->\n```python\na = 1\n```\n", "neither"),
        ("```console\n$ rm -rf /\n```\n", "no test for the command rm"),
        ("```console\n$ make tea\n```\n", "targets of the Makefile"),
        ("```console\n$ pip install 'persample[tea]'\n```\n", "page.md:2"),
        ("```console\n$ persample query nowhere neighbours 17\n```\n", "page.md:2"),
        ("```console\n$ python -m persample check examples/check_model.py:classifier\nWRONG\n```\n", "has changed"),
    ],
)
def test_wrong_blocks_fail(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((AssertionError, KeyError), match=message):
        run_text(text, capsys)


def test_indented_code_is_found() -> None:
    assert find_indented_code("Text:\n\n    a = 1\n\nMore.\n") == ["    a = 1"]
    assert not find_indented_code("- An item.\n\n    Its second paragraph.\n\n```python\n\n    a = 1\n```\n")
