"""`persample scan`, `query`, `report`, `bench` and `demo`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import csv, parquet

from persample.cli import main
from persample.scanning import Scan
from tests.support.command_line import run_command
from tests.support.paths import ROOT
from tests.support.processes import torchrun
from tests.support.scans import read_files

TASKS = """
import time
from pathlib import Path

import torch
from torch import nn

def data(count=24):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator)

def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

def plain():
    print("a line of the user's own")
    return model(), data(), nn.CrossEntropyLoss()

def test():
    return tuple(part[:2] for part in data())

def mixed():
    return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, track_running_stats=False)), data(), nn.CrossEntropyLoss()

def with_nan():
    x, y = data()
    x[5] = x[7] = float("nan")
    return model(), (x, y), nn.CrossEntropyLoss()

def bad_shape():
    return nn.Linear(5, 3), data(), nn.CrossEntropyLoss()

def two():
    return model(), data()

def no_model():
    return "model", data(), nn.CrossEntropyLoss()

def no_loss():
    return model(), data(), None

def slow():
    calls = []
    def loss_fn(model, batch):
        calls.append(1)
        while len(calls) > 3 and not Path("continue").exists():  # until the test lets it continue
            Path("waiting").touch()
            time.sleep(0.01)
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return model(), data(64), loss_fn

def full():
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
    return plain()

def image_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))

class Words(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.words, self.head = nn.Embedding(300, 8), nn.Linear(8, outputs)

    def forward(self, input_ids, attention_mask):
        hidden = self.words(input_ids)
        return self.head((hidden * attention_mask[..., None]).sum(1) if self.head.out_features < 300 else hidden)

def text_classifier():
    torch.manual_seed(0)
    return Words(2)

def language_model():
    torch.manual_seed(0)
    return Words(300)

def tokenizer():
    def tokenize(texts):
        rows = [list(text.encode())[:12] for text in texts]
        longest = max(map(len, rows))
        return {
            "input_ids": [row + [0] * (longest - len(row)) for row in rows],
            "attention_mask": [[1] * len(row) + [0] * (longest - len(row)) for row in rows],
        }
    return tokenize

def pretrained():
    from transformers import PreTrainedTokenizerFast
    return PreTrainedTokenizerFast(tokenizer_file="tokenizer.json")

def of_the_package_tokenizers():
    from tokenizers import Tokenizer
    return Tokenizer.from_file("tokenizer.json")

def no_tokenizer():
    return "tokenizer"
"""

QUICK = ["--batch-size", "8", "--shard-size", "8", "--project", "16", "--quiet"]


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delitem(sys.modules, "tasks", raising=False)
    path = tmp_path / "tasks.py"
    path.write_text(TASKS)
    return path


def run_scan(*arguments: str, out: str = "out") -> int:
    return main(["scan", "tasks:plain", "--out", out, *QUICK, *arguments])


# ---- scan ----


def test_scan_report_and_query(tasks: Path) -> None:
    here = tasks.parent
    done = run_command("scan", "tasks:plain", "--out", "scans/one", *QUICK, "--report", cwd=here)
    assert (done.returncode, done.stderr) == (0, "")
    for line in (
        "24 examples",
        "self_influence",
        "batches of about",
        "first by loss:",
        "probably wrong: ",
        "report: scans/one",
    ):
        assert line in done.stdout
    assert (here / "scans/one/report.html").stat().st_size > 10_000
    done = run_command("query", "scans/one", "neighbours", "3", "-k", "4", cwd=here)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 5
    assert done.stdout.split()[:2] == ["example", "cosine"]


def test_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = str(ROOT / "examples" / "scan_digits.py")
    assert main(["scan", f"{example}:to_scan", "--out", "digits", "--quiet"]) == 0
    function = ["--module", f"{example}:to_scan"]
    assert main(["query", "digits", "influence", f"{example}:test_batch", *function, "-k", "3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.partition("parquet\n")[2])
    assert len(answer) == 18 and {entry["pushes"] for entry in answer} == {"for", "against"}


def test_scan_in_json(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_scan("--json", "--table-format", "csv") == 0
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    assert printed.err == "a line of the user's own\n"
    assert answer["examples"] == 24 and answer["columns"]["loss"]["median"] > 0
    table = csv.read_csv(answer["files"]["table"])
    assert table.num_rows == 24 and "norm/0" in table.column_names


def test_options_reach_the_scan(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = [str(tasks.parent / f"{i}.pt") for i in (0, 1)]
    namespace: dict[str, Any] = {}
    exec(TASKS, namespace)
    for seed, path in enumerate(states):
        torch.save(namespace["model"](seed).state_dict(), path)
    options = ["--checkpoints", *states, "--learning-rates", "0.1", "0.2", "--quantities", "loss,norm,self_influence"]
    assert run_scan("--dtype", "float32", "--device", "cpu", *options) == 0
    found = Scan("out")
    assert found.settings["learning_rates"] == [0.1, 0.2] and found.settings["dtype"] == "float32"
    assert found.columns == ["id", "label", "loss", "norm", "mean_loss", "self_influence"]
    capsys.readouterr()
    assert main(["query", "out", "influence", "tasks:test", "--module", "tasks:plain", "-k", "2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 8


def test_checkpoints_of_a_training_are_sorted_and_described(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {}
    exec(TASKS, namespace)
    model, (x, y) = namespace["model"](), namespace["data"]()
    optimizer, files = torch.optim.SGD(model.parameters(), 0.1), []
    for epoch in range(12):
        files.append(f"epoch{epoch}.pt")
        torch.save(model.state_dict(), tasks.parent / files[-1])
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert run_scan("--checkpoints", *sorted(files[9:])) == 0  # as a shell has them: 10, 11, 9
    printed = capsys.readouterr().out
    assert 'checkpoints: 3 checkpoints of one training; "auto" is a damping of ' in printed and "enough" not in printed
    assert json.loads(Path("out/command.json").read_text())["checkpoints"] == files[9:]
    assert run_scan("--restart", "--checkpoints", *sorted(files)) == 0
    assert "Evenly spaced ones are enough: epoch2.pt epoch5.pt epoch8.pt epoch11.pt" in capsys.readouterr().out
    assert run_scan("--restart", "--checkpoints", files[9], files[0]) == 0  # sorted again, and apart
    assert run_scan("--restart", "--checkpoints", files[9], files[0], "--learning-rates", "1", "1") == 0
    assert "of which 1 are not followed by a later one of the same training" in capsys.readouterr().out
    assert run_scan("--restart") == 0
    assert 'one model; "auto" is a damping of 3. Scores are better with about 4' in capsys.readouterr().out


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_scan_is_resumed(sent: int, code: int, tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "persample", "scan", "tasks:slow", "--out", "out", "--batch-size", "8", "--quiet"]
    # A shell starts what it runs in the background with interrupts ignored, and processes inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, cwd=tasks.parent, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    while not (tasks.parent / "waiting").exists():
        assert process.poll() is None
        time.sleep(0.05)
    assert (tasks.parent / "out" / "scan.json").exists()
    process.send_signal(sent)
    message = process.communicate()[1]
    assert process.returncode == code and message == "persample scan: stopped\n"
    assert main(["report", "out"]) == 2
    message = capsys.readouterr().err
    assert "is not finished" in message and "Run it again to continue" in message
    Path("continue").touch()
    assert main(command[3:]) == 0


def test_two_processes(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = torchrun("persample", "scan", f"{tasks}:plain", "--out", str(tasks.parent / "two"), *QUICK)
    assert output.count("first by loss:") == 1, output  # only one process prints the result
    assert run_scan() == 0
    one, two = Scan("out"), Scan("two")
    assert all(np.allclose(one.column(name), two.column(name), rtol=1e-5, equal_nan=True) for name in one.columns)


def test_process_that_is_lost(tmp_path: Path) -> None:
    """torchrun starts all processes again, or the user does, and the scan continues."""
    (tmp_path / "lost.py").write_text(
        "import os, pathlib, signal, time, torch\n"
        "class Rows(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 40\n"
        "    def __getitem__(self, i):\n"
        "        place = pathlib.Path(__file__).with_name('killed')\n"
        "        if i == 38 and os.environ.get('RANK') == '1' and not place.exists():\n"
        "            stored = place.parent / 'two/0/00000.npz'  # of the other process\n"
        "            for _ in range(50 * (not stored.exists())): time.sleep(0.1)\n"
        "            if stored.exists():\n"
        "                place.touch()\n"
        "                os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return torch.full((4,), i / 40), i % 2\n"
        "def to_scan():\n"
        "    torch.manual_seed(0)\n"
        "    return torch.nn.Linear(4, 2), Rows(), torch.nn.CrossEntropyLoss()\n"
    )
    command = ["scan", f"{tmp_path}/lost.py:to_scan", "--shard-size", "8", "--batch-size", "4", "--quiet", "--out"]
    assert main([*command, f"{tmp_path}/one"]) == 0
    output = torchrun("persample", *command, f"{tmp_path}/two", restarts=1)
    assert (tmp_path / "killed").exists(), output
    if "first by loss:" not in output:  # the new processes may find addresses of the old ones, and torchrun gives up
        output = torchrun("persample", *command, f"{tmp_path}/two")
    assert "first by loss:" in output, output
    one, two = (read_files(tmp_path / name) for name in ("one", "two"))
    one.pop("command.json"), two.pop("command.json")
    assert one == two


# ---- data from files ----


def test_images_from_a_folder(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (tasks.parent / "photos" / name).mkdir(parents=True)
        for i in range(5):
            picture = generator.integers(0, 255, (20, 16, 3), dtype=np.uint8)
            Image.fromarray(picture).save(tasks.parent / "photos" / name / f"{i}.png")
    files = ["--images", "photos", "--image-size", "8", "--channels", "1"]
    assert main(["scan", "tasks:image_net", *files, "--out", "out", *QUICK, "--report"]) == 0
    found = Scan("out")
    assert found.column("label").tolist() == [0] * 5 + [1] * 5 and found.settings["classes"] == ["cats", "dogs"]
    assert "data:image" in Path("out/report.html").read_text()
    Path("out/report.html").unlink()
    assert main(["report", "out"]) == 0
    assert "data:image" in Path("out/report.html").read_text()

    for name in ("cats/0", "dogs/3"):
        Path(f"photos/{name}.png").write_bytes(b"no picture")
    capsys.readouterr()
    assert main(["scan", "tasks:image_net", *files, "--out", "other", *QUICK]) == 1
    message = capsys.readouterr().err
    assert "2 examples cannot be scanned; cannot be read: 0 (cats/0.png, cannot" in message and "--skip-bad" in message
    assert main(["scan", "tasks:image_net", *files, "--out", "other", *QUICK, "--skip-bad", "--report"]) == 1
    assert "2 examples skipped:\n  0  cats/0.png  cannot be read: cannot" in capsys.readouterr().out
    assert Scan("other").skipped.keys() == {0, 8} and "data:image" in Path("other/report.html").read_text()
    assert main(["report", "other"]) == 0


TEXTS = [("good film", "up"), ("bad film", "down"), ("what a story", "up"), ("dull", "down"), ("I slept", "down")]


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize("labelled", [True, False])
def test_text_from_a_table(kind: str, labelled: bool, tasks: Path) -> None:
    rows = [{"words": text, **({"stars": stars} if labelled else {})} for text, stars in TEXTS]
    path = tasks.parent / f"films.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        import pyarrow as pa

        (csv.write_csv if kind == "csv" else parquet.write_table)(pa.Table.from_pylist(rows), path)
    target = "tasks:text_classifier" if labelled else "tasks:language_model"
    files = ["--text", str(path), "--text-column", "words", "--tokenizer", "tasks:tokenizer"]
    files += ["--label", "stars"] if labelled else []
    assert main(["scan", target, *files, "--out", "out", *QUICK, "--report"]) == 0
    found = Scan("out")
    assert len(found) == 5 and "what a story" in Path("out/report.html").read_text()
    if labelled:
        assert found.table()["class"].to_pylist() == [stars for _, stars in TEXTS]
    else:
        namespace: dict[str, Any] = {}
        exec(TASKS, namespace)
        model, tokens = namespace["language_model"](), torch.tensor([list(b"good film")])
        alone = torch.nn.functional.cross_entropy(model(tokens, torch.ones_like(tokens))[0, :-1], tokens[0, 1:])
        assert found.column("loss")[0] == pytest.approx(alone.item(), rel=1e-5)


def test_a_tokenizer_that_a_function_returns_works_as_a_saved_one(tasks: Path) -> None:
    """Texts are padded and truncated, and the report marks their tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted({word for text, _ in TEXTS for word in text.split()})
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["[UNK]", *words])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tasks.parent / "tokenizer.json"))
    (tasks.parent / "films.csv").write_text("text,label\n" + "\n".join(f"{text},{label}" for text, label in TEXTS))
    columns = {}
    for name in ("tokenizer.json", "tasks:pretrained", "tasks:of_the_package_tokenizers"):
        out = name.partition(":")[2] or "saved"
        files = ["--text", "films.csv", "--tokenizer", name, "--max-length", "3", "--report"]
        assert main(["scan", "tasks:text_classifier", *files, "--out", out, *QUICK]) == 0
        columns[name] = Scan(out).column("loss").tolist(), Scan(out).column("norm").tolist()
        assert "token_gradient" in Path(out, "report.html").read_text()
    assert len(columns["tokenizer.json"][0]) == 5
    assert columns["tasks:pretrained"] == columns["tasks:of_the_package_tokenizers"] == columns["tokenizer.json"]


# ---- query ----


def test_queries_in_json(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_scan() == 0
    found = Scan("out")
    capsys.readouterr()

    def query(*question: str) -> list[dict[str, Any]]:
        assert main(["query", "out", *question, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert [e["example"] for e in query("top", "-k", "3")] == found.ranked("loss", 3).ids.tolist()
    assert [e["example"] for e in query("top", "--by", "norm", "-k", "2")] == found.ranked("norm", 2).ids.tolist()
    assert [e["example"] for e in query("neighbours", "4")] == found.neighbours(4).ids.tolist()
    assert [e["example"] for e in query("outliers", "-k", "5")] == found.outliers(5).ids.tolist()
    assert [e["examples"] for e in query("duplicates", "--tolerance", "0.9")] == found.duplicates(0.9)[:10]
    for method in ("tracin", "whitened"):
        answer = query("influence", "tasks:test", "--module", "tasks:plain", "-k", "2", "--method", method)
        assert [(e["sample"], e["pushes"]) for e in answer] == [
            (s, way) for s in (0, 1) for way in ("for", "against") for _ in (0, 1)
        ]
        assert answer[0]["score"] > 0 > answer[2]["score"]


# ---- errors ----

ERRORS: dict[str, tuple[list[str], int, str]] = {
    "no module": (["scan", "nothing:plain", "--out", "o"], 2, "there is no module 'nothing'"),
    "no function": (["scan", "tasks:missing", "--out", "o"], 2, "tasks has no function 'missing'; it has data, model"),
    "no loss": (["scan", "tasks:two", "--out", "o"], 2, "return (model, data, loss_fn), but returned a tuple of 2"),
    "no model": (["scan", "tasks:no_model", "--out", "o"], 2, "return an nn.Module as the model, but returned a str"),
    "loss is none": (["scan", "tasks:no_loss", "--out", "o"], 2, "return a function as the loss, but returned None"),
    "shape": (["scan", "tasks:bad_shape", "--out", "o"], 2, "or the loss failed: RuntimeError: "),
    "mixed": (["scan", "tasks:mixed", "--out", "o"], 3, "tasks:mixed: "),
    "nan": (["scan", "tasks:with_nan", "--out", "o"], 1, "loss of examples 5, 7 is not a finite number"),
    "quantity": (["scan", "tasks:plain", "--out", "o", "--quantities", "loss,hue"], 2, "Unknown quantities ['hue']"),
    "checkpoint": (["scan", "tasks:plain", "--out", "o", "--checkpoints", "no.pt"], 2, "There is no checkpoint no.pt"),
    "not a checkpoint": (["scan", "tasks:plain", "--out", "o", "--checkpoints", "tasks.py"], 2, "cannot be read as a"),
    "a place that is taken": (["scan", "tasks:plain", "--out", "."], 2, "exists and contains no scan"),
    "no images": (["scan", "tasks:image_net", "--out", "o", "--images", "nowhere"], 2, "There is no folder nowhere"),
    "an empty folder": (["scan", "tasks:image_net", "--out", "o", "--images", "."], 2, "has no images"),
    "no table": (["scan", "tasks:model", "--out", "o", "--text", "n.csv", "--tokenizer", "t"], 2, "is no file n.csv"),
    "no tokenizer": (["scan", "tasks:model", "--out", "o", "--text", "t.csv"], 2, "--text requires --tokenizer"),
    "tokenizer": (
        ["scan", "tasks:model", "--out", "o", "--text", "t.csv", "--tokenizer", "nowhere"], 2, "no tokenizer nowhere",
    ),
    "a text for a tokenizer": (
        ["scan", "tasks:model", "--out", "o", "--text", "t.csv", "--tokenizer", "tasks:no_tokenizer"],
        2, "returned a str",
    ),
    "column": (
        ["scan", "tasks:model", "--out", "o", "--text", "t.csv", "--text-column", "words", "--tokenizer", "tasks:test"],
        2, "has no column 'words'. It has text, label",
    ),
    "label": (
        ["scan", "tasks:model", "--out", "o", "--text", "t.csv", "--label", "star", "--tokenizer", "tasks:test"],
        2, "has no column 'star'. It has text, label",
    ),
    "device": (["scan", "tasks:plain", "--out", "o", "--device", "toaster"], 2, "--device toaster: "),
    "no gpu": (["scan", "tasks:plain", "--out", "o", "--device", "cuda:7"], 2, "--device cuda:7: "),
    "no place": (["scan", "tasks:plain", "--out", "t.csv/out"], 2, "t.csv/out"),
    "both": (["scan", "tasks:model", "--out", "o", "--text", "a", "--images", "b"], 2, "cannot be combined"),
    "no scan": (["query", "nowhere", "outliers"], 2, "There is no scan in nowhere"),
    "no scan to report": (["report", "nowhere"], 2, "There is no scan in nowhere"),
    "no subject": (["query", "out", "neighbours"], 2, "neighbours takes the number of an example"),
    "a needless subject": (["query", "out", "outliers", "3"], 2, "outliers takes no subject"),
    "no number": (["query", "out", "neighbours", "²"], 2, "takes the number of an example, got '²'"),
    "no such example": (["query", "out", "neighbours", "99"], 2, "no example 99. The scan has examples 0 to 23"),
    "no column": (["query", "out", "top", "--by", "hue"], 2, "no column 'hue' to rank by. Choose from loss, norm"),
    "no module for influence": (["query", "out", "influence", "tasks:test"], 2, "add --module 'tasks:plain'"),
    "no such ranking": (["report", "out", "--by", "hue"], 2, "cannot be ranked by 'hue'. Choose from loss"),
    "another scan": (["scan", "tasks:plain", "--out", "out", "--batch-size", "4"], 2, "The batch size changed since"),
    "no model to measure": (["bench", "tasks:missing"], 2, "tasks has no function 'missing'"),
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("finished")
    (directory / "tasks.py").write_text(TASKS)
    done = run_command("scan", "tasks:plain", "--out", "out", *QUICK, cwd=directory)
    assert done.returncode == 0
    return directory / "out"


@pytest.mark.parametrize("mistake", ERRORS)
def test_errors_are_one_line(
    mistake: str, tasks: Path, finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tasks.parent / "out").symlink_to(finished)
    (tasks.parent / "t.csv").write_text("text,label\ngood,1\n")
    arguments, code, message = ERRORS[mistake]
    assert main([*arguments, *(["--quiet"] if arguments[0] == "scan" else [])]) == code
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1
    assert printed.err.startswith(f"persample {arguments[0]}: error: ")
    assert not (tasks.parent / "o" / "summary.json").exists(), "the directory looks like a finished scan"


def test_nonfinite_losses_can_be_kept(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scan", "tasks:with_nan", "--out", "out", *QUICK, "--nonfinite", "keep", "--json", "--report"]) == 0
    assert json.loads(capsys.readouterr().out)["not_finite"] == [5, 7]
    assert main(["query", "out", "top", "--by", "norm", "-k", "1", "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert (answer["example"], answer["norm"], answer["predicted"]) == (5, None, None)


def test_full_disk(tasks: Path) -> None:
    """The function `full` limits the files of the process to 6 kB."""
    done = run_command("scan", "tasks:full", "--out", "out", "--project", "1000", "--quiet", cwd=tasks.parent)
    assert done.returncode == 4 and "No space left to write" in done.stderr and done.stderr.count("\n") == 1
    assert not (tasks.parent / "out" / "summary.json").exists()
    assert main(["scan", "tasks:plain", "--out", "out", "--project", "1000", "--quiet"]) == 0


@pytest.mark.parametrize("quantities", ["noise_scale", "alignment", "loss"])
def test_single_quantities(quantities: str, tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_scan("--quantities", quantities, "--report") == 0
    assert "24 examples" in capsys.readouterr().out


def test_restart(tasks: Path) -> None:
    assert run_scan() == 0
    assert run_scan("--dtype", "float32") == 2
    assert run_scan("--dtype", "float32", "--restart") == 0
    assert Scan("out").settings["dtype"] == "float32"


# ---- bench, demo, help ----


def test_bench(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tasks:plain", "--rounds", "3", "--json", "--dense"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["samples"] == 24 and answer["plain_milliseconds"] > 0
    assert set(answer["ratios"]) == {"norms", "clipped sum", "projection to 512", "dense gradients"}
    assert main(["bench", "tasks:mixed"]) == 3
    assert main(["bench", "--rounds", "1"]) == 0
    assert "a plain step of 64 samples" in capsys.readouterr().out


def test_demo_finds_the_flipped_labels(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", "demo", "--json"]) == 0
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    assert answer["flipped"] == 90
    assert answer["scores"]["self_influence"]["recall_in_top_tenth"] >= 0.85
    assert set(answer["scores"]) == {"self_influence", "mean_loss", "norm", "loss"}
    page = Path(answer["report"]).read_text()
    assert "label flipped by the demo: it is a" in page and "The demo flipped 90 labels." in page
    assert "ranked by loss" in printed.err and "report      " in printed.err


@pytest.mark.parametrize("command", ["scan", "query", "report", "bench", "demo", "check", "audit"])
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0 and "--json" in text
    assert f"$ persample {command}" in text and "exit codes:" in text
