"""The report of a scan as a file: texts, previews, charts, and safety against texts from the data."""

import base64
import io
import json
import math
import re
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import persample
from persample.scanning import ScanError
from persample.scanning.report import write_report
from persample.scanning.report.charts import choose_axis, choose_colours, compute_histogram
from persample.scanning.report.plots import write_plots
from persample.scanning.report.previews import find_content, make_preview
from persample.scanning.report.reasons import Reasons

EVIL = '<img src=x onerror="alert(1)"></script><script>alert(2)</script>'


class Page(HTMLParser):
    """The elements of a page with their attributes, its text, and the JSON of its points."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.text, self.scripts = [], [], {}
        self._open = []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "img", "input"):
            self._open.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        where = [tag for tag, _ in self._open]
        if "script" in where and dict(self._open[-1][1]).get("id") in ("points", "items"):
            self.scripts[self._open[-1][1]["id"]] = self.scripts.get(self._open[-1][1]["id"], "") + data
        elif not {"script", "style"} & set(where):
            self.text.append(data)

    def all(self, tag, **attributes):
        return [a for t, a in self.elements if t == tag and all(a.get(k) == v for k, v in attributes.items())]

    @property
    def script(self):
        """The JSON of the points."""
        return self.scripts.get("points", "")

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def small_model(features=16, classes=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(features, 6), nn.ReLU(), nn.Linear(6, classes))


def images_and_labels(count=40):
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, 1, 4, 4, generator=generator), torch.arange(count) % 3


def run_scan(data, loss=None, model=None, **options):
    return persample.scan(model or small_model(), loss or nn.CrossEntropyLoss(), data, **{"project": None, **options})


def write_page(scan, tmp_path, **options):
    path = write_report(scan, tmp_path / "report.html", **{"plots": False, **options})
    return Page(path.read_text("utf-8"))


@pytest.fixture(scope="module")
def scan():
    torch.manual_seed(0)
    return run_scan(images_and_labels(), classes=["cat", "dog", "owl"])


# ---- texts ----


def test_page_shows_settings_and_suspects(scan, tmp_path):
    page = write_page(scan, tmp_path, data=images_and_labels(), title="Pets", remarks=["Nothing was changed."], k=7)
    parameters = 16 * 6 + 6 + 6 * 3 + 3
    for words in ("Pets", "Examples 40", f"Parameters {parameters}", "CrossEntropyLoss", "Nothing was changed."):
        assert words in page.words
    headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1 and headings.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(headings))
    rows = [a["id"] for a in page.all("tr", role="row") if "id" in a]
    assert rows == [f"example-{i}" for i in scan.ranked(k=7).ids.tolist()]
    assert len(page.all("circle", **{"class": "suspect"})) == 7
    known = json.loads(page.script)
    assert len(known) == 40 and sorted(one["id"] for one in known) == list(range(40))
    assert {one["label"] for one in known} == {"cat", "dog", "owl"}


@pytest.mark.parametrize("by", ["loss", "norm", "alignment", "norm/1"])
def test_suspects_are_ranked_by_the_given_column(scan, tmp_path, by):
    page = write_page(scan, tmp_path, by=by, k=5)
    values = scan.column(by)
    order = np.argsort(values if by == "alignment" else -values, kind="stable")[:5]
    assert [a["id"] for a in page.all("tr", role="row") if "id" in a] == [f"example-{i}" for i in order]


def test_tables_are_sorted_by_the_most_suspicious_value_first(tmp_path):
    model, (x, y) = torch.nn.Linear(3, 2), (torch.randn(9, 3), torch.arange(9) % 2)
    found = persample.scan(model, torch.nn.CrossEntropyLoss(), (x, y), progress=False)
    found.report(tmp_path / "report.html")
    heads = re.findall(
        r'<th [^>]*data-kind="number"([^>]*)><button[^>]*>([^<]+)', (tmp_path / "report.html").read_text()
    )
    first = {title: "descending" in options for options, title in heads}
    assert first["Loss"] and first["Gradient norm"] and not first["Alignment (estimate)"]


def test_notes_are_shown_and_counted(scan, tmp_path):
    first, last = scan.ranked().ids[[0, -1]].tolist()
    page = write_page(scan, tmp_path, notes={first: "label flipped from 3", last: "fine"}, k=5)
    assert "label flipped from 3" in page.words and "Examples with a note among them: 1 of 2." in page.words
    assert {one["id"]: one.get("note") for one in json.loads(page.script)}[last] == "fine"


@pytest.mark.parametrize(
    "share, words", [(0.9, "Rankings agree: at least 90%"), (0.6, None), (0.1, "Rankings disagree: of the first")]
)
def test_page_says_whether_rankings_agree(scan, tmp_path, monkeypatch, share, words):
    monkeypatch.setattr(type(scan), "compare_rankings", lambda self, k: {"el2n": 1.0, "confident": share, "norm": 0.0})
    found = write_page(scan, tmp_path).words
    assert words in found if words else "Rankings" not in found


def test_path_of_the_report(scan, tmp_path):
    assert write_report(scan, plots=False) == scan.directory / "report.html"
    deep = tmp_path / "new" / "folder" / "page.html"
    assert write_report(scan, str(deep), plots=False) == deep
    assert [p.name for p in deep.parent.iterdir()] == ["page.html"]  # no unfinished file is left


def test_failed_report_keeps_the_earlier_one(scan, tmp_path):
    path = write_report(scan, tmp_path / "report.html", plots=False)
    before = path.read_bytes()

    def fails(example):
        raise RuntimeError("no such picture")

    with pytest.raises(RuntimeError, match="no such picture"):
        write_report(scan, path, data=images_and_labels(), show=fails, plots=False)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"by": "label"}, "cannot be ranked by 'label'"),
        ({"by": "beauty"}, "cannot be ranked by 'beauty'"),
        ({"k": -1}, "k must be a number"),
        ({"notes": {40: "?"}}, "notes contains example 40, but the scan has examples 0 to 39"),
        ({"data": images_and_labels(39)}, "The scan has 40 examples, but `data` has 39"),
    ],
)
def test_wrong_arguments(scan, tmp_path, options, message):
    with pytest.raises(ScanError, match=message):
        write_report(scan, tmp_path / "report.html", plots=False, **options)
    assert not list(tmp_path.iterdir())


# ---- kinds of scans ----


class Streamed(IterableDataset):
    def __iter__(self):
        yield from zip(*images_and_labels(), strict=True)


def write_regression_page(tmp_path, **options):
    x = images_and_labels()[0]
    y = torch.randn(len(x), 1)
    return write_page(run_scan((x, y), nn.MSELoss(), small_model(classes=1), **options), tmp_path, data=(x, y))


def test_scan_without_labels_has_no_classes(tmp_path):
    page = write_regression_page(tmp_path)
    assert [a["id"] for a in page.all("select")] == ["pair"] and "Class" not in page.words
    assert len(page.all("circle")) > 40
    assert page.all("img")  # there are previews


@pytest.mark.parametrize(
    "quantities, rows, sections",
    [
        (["norm"], 10, {"distributions"}),
        (["loss"], 10, {"distributions"}),
        (["loss", "norm"], 10, {"distributions"}),
        (["alignment"], 10, set()),
        (["group_norms"], 10, {"layers"}),
        (["noise_scale"], 0, {"noise"}),
    ],
)
def test_missing_quantities_have_no_sections(tmp_path, quantities, rows, sections):
    found = run_scan(images_and_labels(), quantities=quantities)
    page = write_page(found, tmp_path, data=images_and_labels(), plots=True)
    ids = {a.get("id") for a in page.all("section")}
    triage = {"triage"} if rows else set()
    assert ids - {"issues"} == {"summary", "suspects", "details", "scatter", "reading"} | triage | sections
    assert len([a for a in page.all("tr", role="row") if "id" in a]) == rows
    assert bool(page.script) == (quantities == ["loss", "norm"])  # the scatter plot needs both
    assert "None" not in page.words and "nan" not in page.words.lower().split()


def test_page_of_several_checkpoints(tmp_path):
    model = small_model()
    states = [{name: scale * value for name, value in model.state_dict().items()} for scale in (1, 2)]
    page = write_page(run_scan(images_and_labels(), model=model, checkpoints=states), tmp_path)
    assert "Checkpoints 2" in page.words and "Mean loss" in page.words and "from all 2 checkpoints" in page.words


def test_page_names_examples_that_are_not_finite(tmp_path):
    x, y = images_and_labels()
    x[5] = math.nan
    page = write_page(run_scan((x, y), nonfinite="keep"), tmp_path, data=(x, y), plots=True)
    assert "not finite" in page.words and "A measured value is not finite for example 5." in page.words
    assert "1 example with a loss or gradient that is not finite is not shown" in page.words
    assert not re.search(r"\b(nan|inf|infinity|none)\b", page.words, re.IGNORECASE)
    assert next(a["id"] for a in page.all("tr", role="row") if "id" in a) == "example-5"
    assert 5 not in {one["id"] for one in json.loads(page.script)}


def test_page_if_no_value_is_finite(tmp_path):
    x, y = images_and_labels()
    page = write_page(run_scan((x * math.nan, y), nonfinite="keep"), tmp_path, plots=True)
    assert not re.search(r"\b(nan|inf|none)\b", page.words, re.IGNORECASE)


@pytest.mark.parametrize("count", [1, 2])
def test_page_of_few_examples(tmp_path, count):
    page = write_page(run_scan(images_and_labels(count)), tmp_path, data=images_and_labels(count), plots=True)
    assert len([a for a in page.all("tr", role="row") if "id" in a]) == count


def test_page_without_suspects(scan, tmp_path):
    page = write_page(scan, tmp_path, k=0)
    assert "This report was written without suspects" in page.words and not page.all("table", id="table")


def test_scatter_plot_selects_suspects_and_others(tmp_path):
    found = run_scan((torch.rand(1700, 2), torch.arange(1700) % 3), model=small_model(2), quantities=["loss", "norm"])
    page = write_page(found, tmp_path, k=50)
    known = json.loads(page.script)
    assert len(known) == 1500 and sum("rank" in one for one in known) == 50
    assert "1,500 of 1,700 examples: the suspects and a random selection" in page.words


def test_many_classes_have_distinct_colours_and_a_short_legend(tmp_path):
    x, y = torch.rand(180, 2), torch.arange(180) % 60
    page = write_page(run_scan((x, y), model=small_model(2, 60)), tmp_path)
    assert len([a for a in page.all("li") if "data-class" in a]) == 40 and "and 20 smaller classes" in page.words
    assert len(set(choose_colours(60))) == 60 and len(set(choose_colours(10))) == 10


# ---- safety ----


class Texts(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return {"text": EVIL + f" number {i}", "x": torch.full((4,), i / 12), "label": torch.tensor(i % 2)}


def test_texts_from_users_are_escaped(tmp_path):
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")

    found = run_scan(
        Texts(),
        loss,
        small_model(4, 2),
        classes=[EVIL, "b"],
        collate=lambda examples: {key: torch.stack([e[key] for e in examples]) for key in ("x", "label")},
        groups={EVIL: ["1.weight"], "rest": ["1.bias", "3.weight", "3.bias"]},
    )
    notes = dict.fromkeys(range(12), EVIL)
    page = write_page(found, tmp_path, data=Texts(), title=EVIL, remarks=[EVIL], notes=notes, k=6, plots=True)
    assert {tag for tag, _ in page.elements if tag in ("img", "iframe", "object")} == set()
    assert len(page.all("script")) == 3
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert page.words.count(EVIL) > 2 + 1 + 6 * 2  # title, remark, preview and note of each suspect, and labels
    known = json.loads(page.script)
    assert {one["note"] for one in known} == {EVIL} and EVIL in {one["label"] for one in known}


def test_page_has_no_external_resources(scan, tmp_path):
    page = write_page(scan, tmp_path, data=images_and_labels())
    for tag, attributes in page.elements:
        for name in {"src", "href", "srcset", "action", "data", "poster", "xlink:href"} & set(attributes):
            assert attributes[name].startswith(("data:", "#")), (tag, attributes)
    html = (tmp_path / "report.html").read_text()
    assert not re.search(r"https?://|@import|url\(", html)
    (policy,) = [a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_of_texts(scheme):
    style = (files("persample.scanning.report") / "report.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    colour = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", blocks[["light", "dark"].index(scheme)]))

    def brightness(name):
        parts = [int(colour[name][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one, other):
        low, high = sorted([brightness(one), brightness(other)])
        return (high + 0.05) / (low + 0.05)

    for ink in ("ink", "muted", "accent", "suspect"):
        assert min(contrast(ink, "page"), contrast(ink, "surface")) >= 4.5, ink
    assert contrast("note-ink", "note") >= 4.5 and contrast("line-strong", "surface") >= 3


# ---- previews ----


def decode(preview):
    assert preview.kind == "image"
    return Image.open(io.BytesIO(base64.b64decode(preview.content.partition(",")[2])))


GREY = torch.linspace(0, 1, 64).reshape(8, 8)


@pytest.mark.parametrize(
    "value, size, mode",
    [
        (GREY, (8, 8), "L"),
        (GREY[None], (8, 8), "L"),
        (GREY.expand(3, 8, 8), (8, 8), "RGB"),
        (GREY.expand(4, 8, 8), (8, 8), "RGB"),
        (GREY.bfloat16(), (8, 8), "L"),
        (GREY.requires_grad_(), (8, 8), "L"),
        (GREY > 0.5, (8, 8), "L"),
        ((16 * GREY).long(), (8, 8), "L"),
        ((255 * GREY).byte(), (8, 8), "L"),
        (GREY.detach().numpy()[..., None].repeat(3, 2), (8, 8), "RGB"),
        (np.zeros((300, 200, 3), dtype=np.uint8), (64, 96), "RGB"),
        (torch.rand(3, 100, 200), (96, 48), "RGB"),
        (Image.new("P", (10, 10)), (10, 10), "RGB"),
        (Image.new("I;16", (10, 10)), (10, 10), "L"),
        (Image.new("CMYK", (10, 10)), (10, 10), "RGB"),
    ],
)
def test_thumbnails_of_images(value, size, mode):
    image = decode(make_preview(value))
    assert image.size == size and image.mode == mode


@pytest.mark.parametrize(
    "values, corners",
    [
        (GREY, (0, 255)),  # unchanged
        (GREY / 2, (0, 128)),  # dark images stay dark
        (2 * GREY - 1, (0, 255)),
        (16 * GREY, (0, 255)),
        (5 * GREY - 2, (0, 255)),  # normalised by mean and standard deviation
        ((255 * GREY).byte(), (0, 255)),
        (torch.full((8, 8), math.nan), (0, 0)),
    ],
)
def test_brightness_of_thumbnails(values, corners):
    image = decode(make_preview(values))
    assert (image.getpixel((0, 0)), image.getpixel((7, 7))) == pytest.approx(corners, abs=1)


def test_large_images_become_jpeg_and_tiny_images_png():
    large, tiny = make_preview(torch.rand(3, 500, 500)), make_preview(GREY)
    assert large.content.startswith("data:image/jpeg") and len(large.content) < 12_000 and not large.tiny
    assert tiny.content.startswith("data:image/png") and tiny.tiny


@pytest.mark.parametrize(
    "example, kind, content",
    [
        (("a film", 1), "text", "a film"),
        ({"label": 1, "text": "a film"}, "text", "a film"),
        ({"label": "bad", "review_id": "r7", "title": "a film"}, "text", "a film"),
        ({"input_ids": torch.tensor([101, 7, 102]), "labels": 1}, "numbers", "101, 7, 102"),
        ((torch.tensor([0.125, 3.4567]), 0), "numbers", "0.125, 3.46"),
        (torch.arange(64), "numbers", "0, 1, 2, 3, 4, 5, … (64 numbers)"),
        (torch.rand(2, 3, 4, 5), "numbers", None),
        (torch.rand(2, 500), "numbers", None),
        ([1.5, 2], "numbers", "1.5, 2"),
        (7, "numbers", "7"),
        (torch.ones(4, 4, dtype=torch.complex64), "text", None),
        (([1.0], [1.0, 2.0]), "numbers", "1"),
        ("x" * 400, "text", "x" * 300 + "…"),
        ({"image": GREY, "label": 3}, "image", None),
        ((GREY, {"boxes": 3}), "image", None),
        (({"pixel_values": GREY}, 3), "image", None),
    ],
)
def test_preview_of_examples(example, kind, content):
    preview = make_preview(find_content(example))
    assert preview.kind == kind and content in (None, preview.content)


@pytest.mark.parametrize("value", [[[1.0], [1.0, 2.0]], nn.Identity(), {"a": 1}, np.array(["a", "b"])])
def test_other_values_are_shown_as_text(value):
    assert (preview := make_preview(value)).kind == "text" and preview.content == str(value)


@pytest.mark.parametrize("example", [{"label": 3}, {}, None])
def test_examples_without_content_have_no_preview(example):
    assert make_preview(find_content(example)) is None


def test_show_chooses_the_preview(scan, tmp_path):
    page = write_page(
        scan, tmp_path, data=images_and_labels(), show=lambda example: f"shown as {example[1].item()}!", k=4
    )
    assert page.words.count("shown as") == 4 and not page.all("img")
    assert all(one["preview"][:1] == ["text"] for one in json.loads(page.script) if "rank" not in one)


def test_page_without_data_has_no_previews(scan, tmp_path):
    page = write_page(scan, tmp_path)
    assert not page.all("img") and not page.all("td", **{"class": "example"})
    assert not any("preview" in one for one in json.loads(page.script))


def test_only_suspects_of_a_stream_have_previews(tmp_path):
    page = write_page(run_scan(Streamed()), tmp_path, data=Streamed(), k=4)
    assert len(page.all("img")) == 4 and "36 circles have no preview in this file" in page.words


def test_total_size_of_previews_is_limited(scan, tmp_path, monkeypatch):
    monkeypatch.setattr("persample.scanning.report.page._POINT_PREVIEW_BYTES", 1000)
    page = write_page(scan, tmp_path, data=images_and_labels(), k=4)
    known = [one for one in json.loads(page.script) if "rank" not in one]
    assert 0 < sum("preview" in one for one in known) < len(known)
    assert len(page.all("img")) == 4


# ---- reasons ----


def make_columns(count=200):
    """Columns in which no example stands out."""
    spread = np.linspace(0.9, 1.1, count)
    found = {"loss": spread.copy(), "norm": spread.copy(), "alignment": 0.3 * spread}
    return found | {"norm/0": 0.6 * spread, "norm/2": 0.8 * spread}


@pytest.mark.parametrize(
    "changed, expected",
    [
        ({"loss": 5.0}, ["highest loss of all"]),
        ({"norm": 12.0}, ["largest gradient of all, 12 times the median"]),
        ({"norm": 12345.0}, ["largest gradient of all, 12,333 times the median"]),
        ({"alignment": -0.414}, ["gradient points against the others: cosine −0.41, lowest 0.5 %"]),
        ({"alignment": 0.02}, ["gradient has little in common with the others: cosine 0.02, lowest 0.5 %"]),
        ({"norm/0": 3.0, "norm/2": 0.3}, ["99 % of the gradient in layer 0 (median 36 %)"]),
        ({"loss": math.nan, "norm": math.inf}, ["loss is not finite", "gradient is not finite"]),
        ({}, ["gradient norm: rank 101 of 200"]),
    ],
)
def test_reasons_name_unusual_values(changed, expected):
    found = make_columns()
    for name, value in changed.items():
        found[name][99] = value
    assert Reasons(found, "norm", found["norm"]).find(99) == expected


@pytest.mark.parametrize("shift, scale", [(0.0, 1.0), (-3.0, 1.0), (0.0, 100.0), (50.0, 0.01)])
def test_reasons_depend_on_ranks_and_not_on_the_size_of_values(shift, scale):
    """Of 200 examples with any values, at most a twentieth has each reason."""
    generator = np.random.default_rng(0)
    names = ("loss", "norm", "alignment", "norm/0", "norm/2")
    found = {name: np.abs(generator.normal(size=200) * scale + shift) for name in names}
    found["alignment"] = generator.normal(-0.5, 0.1, 200)  # most gradients point against the mean
    reasons = Reasons(found, "norm", found["norm"])
    texts = [reason for i in range(200) for reason in reasons.find(i)]
    for words in ("loss", "gradient in the top", "points against", "in layer"):
        assert sum(words in text for text in texts) <= 11, words
    assert sum("rank" in text for text in texts) >= 150


def test_an_estimated_cosine_is_called_so():
    found = make_columns()
    found["estimated_alignment"] = found.pop("alignment")
    found["estimated_alignment"][99] = -0.2
    expected = "gradient points against the others: estimated cosine −0.20, lowest 0.5 %"
    assert Reasons(found, "norm", found["norm"]).find(99) == [expected]


def test_the_opinion_of_the_model_comes_first():
    found = make_columns()
    found["loss"][99] = 5.0
    opinion = "labelled circle, model says triangle (0.97)"
    assert Reasons(found, "loss", found["loss"], {99: opinion}).find(99) == [opinion, "highest loss of all"]


def test_number_of_reasons_is_limited_and_shares_are_rounded_up():
    found = make_columns()
    for name, value in {"norm": 9.0, "alignment": -0.5, "norm/0": 3.0, "norm/2": 0.1}.items():
        found[name][197] = value
    assert len(reasons := Reasons(found, "norm", found["norm"]).find(197)) == 3 and reasons[0] == "loss in the top 2 %"
    found["loss"][:] = 1.0  # all equal: none is in the top
    assert not any("loss" in reason for reason in Reasons(found, "norm", found["norm"]).find(197))


# ---- charts and plots ----


@pytest.mark.parametrize(
    "values, log",
    [
        ([0.001, 0.1, 10.0], True),
        ([0.0, 0.001, 0.1, 10.0], True),
        ([-1.0, 0.001, 10.0], False),
        ([1.0, 1.2, 3.0], False),
        ([2.0], False),
        ([0.0, 0.0], False),
        ([], False),
        ([math.nan, 3.0, math.inf], False),
    ],
)
def test_axes_contain_all_finite_values(values, log):
    values = np.array(values)
    axis = choose_axis(values, padding=0.03)
    positions = axis.locate(values[np.isfinite(values)])
    assert axis.log == log and axis.low < axis.high and ((positions >= 0) & (positions <= 100)).all()
    assert 1 <= len(axis.ticks) <= 9 and all(0 <= at <= 100 for at, _ in axis.ticks)
    positive = values[np.isfinite(values) & (values > 0)]
    assert (np.diff(axis.locate(np.sort(positive))) > 0).all()  # different values have different positions


@pytest.mark.parametrize("spread", [False, True])
def test_bars_of_a_histogram_are_proportional_to_counts(spread):
    values = np.exp(np.random.default_rng(0).normal(size=500) * (3 if spread else 0.1))
    figure = compute_histogram(values)
    heights = np.array([height for _, _, height in figure.bars])
    assert figure.axis.log == spread
    assert heights.sum() / heights.max() == pytest.approx(500 / round(500 * heights.max() / heights.sum()), rel=1e-3)
    assert all(left + width <= 100.001 for left, width, _ in figure.bars)


@pytest.mark.parametrize(
    "asked, names", [({}, {"loss", "norm", "scatter", "layers"}), ({"quantities": ["norm"]}, {"norm"})]
)
def test_plots_are_png_files(tmp_path, asked, names):
    import matplotlib

    settings = dict(matplotlib.rcParams)
    found = run_scan(images_and_labels(), classes=["a$b", "_c", "d"], **asked)
    write_report(found, tmp_path / "report.html")
    files_found = sorted((tmp_path / "plots").iterdir())
    assert {path.name for path in files_found} == {f"{name}.png" for name in names}
    for path in files_found:
        with Image.open(path) as image:
            assert image.format == "PNG" and min(image.size) > 150
            assert len(image.convert("RGB").getcolors(1 << 20)) > 10  # something is drawn
    assert dict(matplotlib.rcParams) == settings


def test_plots_without_matplotlib_raise(scan, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ScanError, match="plots=False"):
        write_plots(tmp_path, {"loss": np.ones(3)}, None, [], str)
