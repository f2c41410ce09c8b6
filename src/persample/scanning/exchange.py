"""Suspects in the formats of annotation tools, with suggestions and scores, and the corrections that come back.

Each format says how a suspect becomes a record and how a record that a person has looked at becomes a new label. All
keep the id, the name and the given label, so that corrections can be applied.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from persample.scanning.errors import ScanError, explain_write_errors
from persample.scanning.fixes import REMOVE, Fix
from persample.scanning.results import Scan

_AGENT = "persample"
_FIELDS = ("id", "name", "given")


@dataclass(frozen=True)
class Suspect:
    """An example to look at. `content` is its text, or the address of its image."""

    id: int
    name: str
    given: str
    suggested: str
    score: float
    content: str
    kind: str  # "image" or "text"

    @property
    def facts(self) -> dict[str, Any]:
        """What identifies the example when it comes back."""
        return {name: getattr(self, name) for name in _FIELDS}


@dataclass(frozen=True)
class Format:
    """How suspects are written to a file or folder, and how fixes are read from it."""

    write: Callable[[Sequence[Suspect], Path], None]
    read: Callable[[Path], Iterator[Fix]]


def export_suspects(
    scan: Scan,
    path: str | Path,
    to: str,
    by: str | None = None,
    k: int | None = None,
    texts: Mapping[int, str] | None = None,
    prefix: str = "",
) -> int:
    """Write suspects in one of `EXCHANGE_FORMATS`, and return their number.

    Images are named by `prefix` and their names, texts are given by id.
    """
    ids = (scan.suspects(by) if k is None else scan.ranked(by, k)).ids.tolist()
    suspects = [
        Suspect(
            id=i,
            name=example.get("name") or "",
            given=example.get("label") or "",
            suggested=example.get("suggested") or "",
            score=example.get("suggested_probability") or 0.0,
            content=texts[i] if texts is not None else prefix + (example.get("name") or str(i)),
            kind="image" if texts is None else "text",
        )
        for i, example in zip(ids, scan.describe(ids), strict=True)
    ]
    with explain_write_errors(Path(path)):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        EXCHANGE_FORMATS[to].write(suspects, Path(path))
    return len(suspects)


def import_fixes(path: str | Path, source: str) -> list[Fix]:
    """The corrections in a file of one of `EXCHANGE_FORMATS`: examples with another label now, or that are removed."""
    if not Path(path).exists():
        raise ScanError(f"There is no file {path}.")
    try:
        fixes = list(EXCHANGE_FORMATS[source].read(Path(path)))
    except (ValueError, KeyError, TypeError, AttributeError, ET.ParseError) as error:
        raise ScanError(f"{path} is no export of {source}: {type(error).__name__}: {error}") from error
    return [fix for fix in fixes if fix.new and fix.new != fix.given]


# ---- files of JSON ----


def _make_json_format(
    make: Callable[[Suspect], dict[str, Any]],
    find_facts: Callable[[Any], Mapping[str, Any]],
    find_label: Callable[[Any], str | None],
    key: str | None = None,
) -> Format:
    """A format with a list of records, which may be the entry `key` of a dict."""

    def write(suspects: Sequence[Suspect], path: Path) -> None:
        records = list(map(make, suspects))
        path.write_text(json.dumps({key: records} if key else records, ensure_ascii=False, indent=1), "utf-8")

    def read(path: Path) -> Iterator[Fix]:
        found = json.loads(path.read_text("utf-8"))
        for record in found[key] if key else found:
            facts = find_facts(record)
            yield Fix(int(facts["id"]), str(facts["name"]), str(facts["given"]), find_label(record) or "")

    return Format(write, read)


def _make_label_studio_task(suspect: Suspect) -> dict[str, Any]:
    choice = {
        "from_name": "label",
        "to_name": suspect.kind,
        "type": "choices",
        "value": {"choices": [suspect.suggested]},
    }
    prediction = {"model_version": _AGENT, "score": suspect.score, "result": [choice]}
    task = {"data": {**suspect.facts, suspect.kind: suspect.content}}
    return {**task, "predictions": [prediction]} if suspect.suggested else task


def _find_label_studio_choice(annotated: Any) -> str | None:
    done = [one for one in annotated.get("annotations", ()) if not one.get("was_cancelled")]
    choices = [part["value"].get("choices") for one in done[-1:] for part in one["result"]]
    return next((found[0] for found in choices if found), None)


def _make_argilla_record(suspect: Suspect) -> dict[str, Any]:
    suggestion = {"label": {"value": suspect.suggested, "score": suspect.score, "agent": _AGENT}}
    return {
        "id": str(suspect.id),
        "fields": {suspect.kind: suspect.content},
        "metadata": suspect.facts,
        "suggestions": suggestion if suspect.suggested else {},
        "responses": {},
    }


def _find_argilla_response(record: Any) -> str | None:
    if record.get("status") == "discarded":
        return None
    return next((one["value"] for one in (record.get("responses") or {}).get("label", ())), None)


def _make_fiftyone_sample(suspect: Suspect) -> dict[str, Any]:
    sample: dict[str, Any] = {"filepath": suspect.content, "tags": [], "persample": suspect.facts}
    sample["ground_truth"] = {"_cls": "Classification", "label": suspect.given}
    if suspect.suggested:
        sample["suggestion"] = {"_cls": "Classification", "label": suspect.suggested, "confidence": suspect.score}
    return sample


def _find_fiftyone_label(sample: Any) -> str | None:
    return REMOVE if REMOVE in sample.get("tags", ()) else sample["ground_truth"]["label"]


# ---- others ----


def _write_cvat(suspects: Sequence[Suspect], path: Path) -> None:
    """CVAT for images 1.1. Its `score` is an attribute of the label, as CVAT knows no scores of its own."""
    root = ET.Element("annotations")
    ET.SubElement(root, "version").text = "1.1"
    for suspect in suspects:
        image = ET.SubElement(root, "image", id=str(suspect.id), name=suspect.content, width="0", height="0")
        if suspect.suggested:
            tag = ET.SubElement(image, "tag", label=suspect.suggested, source="auto")
            ET.SubElement(tag, "attribute", name="score").text = f"{suspect.score:.4f}"
    ET.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _read_cvat(path: Path) -> Iterator[Fix]:
    """The given label is the folder of the image. An image without a tag stays as it is."""
    if b"<!DOCTYPE" in (text := path.read_bytes()) or b"<!ENTITY" in text:
        raise ScanError(f"{path} declares entities, which no export of CVAT does.")
    for image in ET.fromstring(text).iter("image"):
        name = image.attrib["name"]
        tags = [tag.attrib["label"] for tag in image.iter("tag")]
        yield Fix(int(image.attrib["id"]), name, Path(name).parts[0], tags[-1] if tags else "")


def _write_dataset(suspects: Sequence[Suspect], path: Path) -> None:
    """A dataset of Hugging Face in the form of `save_to_disk`, with a column `new_label` to fill in."""
    columns = {name: [getattr(one, name) for one in suspects] for name in (*_FIELDS, "suggested", "score", "content")}
    _import_datasets().Dataset.from_dict({**columns, "new_label": [""] * len(suspects)}).save_to_disk(str(path))


def _read_dataset(path: Path) -> Iterator[Fix]:
    for row in _import_datasets().load_from_disk(str(path)):
        yield Fix(int(row["id"]), row["name"], row["given"], row["new_label"] or "")


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ScanError("A dataset of Hugging Face needs datasets: pip install datasets") from error
    return datasets


EXCHANGE_FORMATS: Mapping[str, Format] = {
    "label-studio": _make_json_format(_make_label_studio_task, lambda task: task["data"], _find_label_studio_choice),
    "argilla": _make_json_format(_make_argilla_record, lambda record: record["metadata"], _find_argilla_response),
    "fiftyone": _make_json_format(
        _make_fiftyone_sample, lambda sample: sample["persample"], _find_fiftyone_label, "samples"
    ),
    "cvat": Format(_write_cvat, _read_cvat),
    "dataset": Format(_write_dataset, _read_dataset),
}
