"""Run the tests with other versions of torch: `python tools/test_versions.py 2.10.0 2.15.0`.

Each version gets an environment in a temporary folder, which is removed afterwards: torch by its exact version, then
the package with all that its tests need, in the versions of `constraints.txt`. Results are added to
`docs/reference/versions.json`, from which `docs/reference/versions.md` is written; without versions, only the page is.

Builds other than that of `constraints.txt` may take 5 GB and need no GPU. To try single tests, which are not recorded:

    python tools/test_versions.py 2.15.0 --tests tests/rules tests/terms --workers 1
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "docs/reference/versions.json", ROOT / "docs/reference/versions.md"
PEERS = ("opacus", "transformers", "accelerate", "lightning", "peft")
# What the commits that only write these results may change.
_WRITTEN = {str(path.relative_to(ROOT)) for path in (RESULTS, PAGE)}

Result = dict[str, Any]


def main() -> int:
    arguments = _parse_arguments()
    results: dict[str, Result] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = False
    for version in arguments.versions:
        with tempfile.TemporaryDirectory(prefix="persample-versions-", dir=arguments.folder) as folder:
            result = test_version(version, Path(folder), arguments.tests, arguments.workers)
        print(f"torch {version}: {format_counts(result)}")
        failed |= bool(result["failed"])
        if not arguments.tests:
            results[version] = result
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(write_page(results))
    return int(failed)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="versions of torch, such as 2.15.0")
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATH", help="tests to run (default: all)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes that run tests (default: 2)")
    parser.add_argument("--folder", metavar="PATH", help="where environments are made (default: the system's)")
    return parser.parse_args()


def test_version(version: str, folder: Path, tests: Sequence[str] = (), workers: int = 2) -> Result:
    """Run tests of a copy of this checkout in a new environment with a version of torch."""
    copy = folder / "persample"
    names = _run_git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), names):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    python = make_environment(folder, copy, version)
    report = folder / "report.xml"
    command = ["-m", "pytest", "-q", "--tb=short", "-rs", "-n", str(workers), "--dist", "loadgroup"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    subprocess.run([python, *command, f"--junitxml={report}", *tests], cwd=copy, env=environment)
    names = subprocess.run(
        [python, "tools/private_names.py", "--json"], cwd=copy, env=environment, stdout=subprocess.PIPE, check=True
    ).stdout
    return {**read_report(report), **describe_run(python), **json.loads(names)}


def make_environment(folder: Path, project: Path, version: str) -> Path:
    """A new environment with a version of torch, and the package with what its tests need; returns its Python."""
    venv.create(folder / "environment", with_pip=True)
    python = folder / "environment" / "bin" / "python"
    constraints = folder / "constraints.txt"
    lines = (project / "constraints.txt").read_text().splitlines()
    constraints.write_text(
        "\n".join([f"torch=={version}", *(line for line in lines if not line.startswith("torch=="))])
    )
    # torch by itself, so that the same build is found as by `pip install torch==VERSION`. Files are not kept: 3 GB.
    install = [python, "-m", "pip", "install", "-q", "--no-cache-dir", "-c", constraints]
    subprocess.run([*install, f"torch=={version}"], check=True)
    subprocess.run([*install, "-e", f"{project}[test,demo]"], check=True)
    return python


def read_report(path: Path) -> Result:
    """The numbers of tests in a report of pytest, the names of those that failed, and the reasons of those skipped."""
    counts: Result = {"passed": 0, "failed": [], "skipped": {}}
    for case in ElementTree.parse(path).iter("testcase"):
        name, skipped = f"{case.get('classname')}::{case.get('name')}", case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"].append(name)
        elif skipped is not None:
            reason = str(skipped.get("message"))
            counts["skipped"][reason] = counts["skipped"].get(reason, 0) + 1
        else:
            counts["passed"] += 1
    return counts


def describe_run(python: Path) -> Result:
    """Where, when and with what a run was made."""
    code = f"from importlib.metadata import version; print(*map(version, {PEERS}))"
    found = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    changed = {line[3:] for line in _run_git("status", "--porcelain").splitlines()} - _WRITTEN
    return {
        "commit": _run_git("rev-parse", "--short", "HEAD").strip() + (" with changes" if changed else ""),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "peers": dict(zip(PEERS, found, strict=True)),
    }


def _run_git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


# ---- the page ----

_INTRODUCTION = """\
# Versions of torch

persample needs torch 2.10 or newer, without an upper bound. A version that was not tested gives one warning;
`warnings.filterwarnings("ignore", "persample was not tested with torch")` before the first import turns it off. If a
private name of torch is missing, the feature that needs it raises a `PerSampleError` that names it.

This page is written by `python tools/test_versions.py VERSION ...`, which runs the tests in a new environment for each
version. A version without a row has not been run.

"""


def write_page(results: Mapping[str, Result]) -> str:
    """`docs/reference/versions.md`."""
    versions = sorted(results, key=lambda version: [int(part) for part in re.findall(r"\d+", version)])
    rows = [_format_run(version, results[version]) for version in versions]
    header = ["torch", "passed", "failed", "skipped", "date", "Python", "commit", "system"]
    parts = [_INTRODUCTION, _format_table(header, rows)]
    parts += ["\n## What degrades\n\n", *(_format_details(version, results[version]) for version in versions)]
    parts += ["\n## Other packages\n\nThe versions that these tests ran with.\n\n"]
    peers = [[version, *(results[version]["peers"][peer] for peer in PEERS)] for version in versions]
    parts += [
        _format_table(["torch", *PEERS], peers),
        "\n## Private names of torch\n\n",
        _format_names(results, versions),
    ]
    return "".join([*parts, "\n## Operators\n\n", _format_operators(results, versions)])


def format_counts(result: Result) -> str:
    """The numbers of tests of a run, in a line."""
    return f"{result['passed']} passed, {len(result['failed'])} failed, {sum(result['skipped'].values())} skipped"


def _format_run(version: str, result: Result) -> list[str]:
    counts = [str(n) for n in (result["passed"], len(result["failed"]), sum(result["skipped"].values()))]
    return [version, *counts, *(result[key] for key in ("date", "python", "commit", "system"))]


def _format_details(version: str, result: Result) -> str:
    missing = [name for name, exists in result["names"].items() if not exists]
    lines = [f"- **{version}**: {'missing: ' + ', '.join(f'`{name}`' for name in missing) if missing else 'nothing'}."]
    lines += [f"    - failed: `{name}`" for name in result["failed"]]
    lines += [f"    - skipped {count}: {' '.join(why.split())}" for why, count in sorted(result["skipped"].items())]
    return "\n".join(lines) + "\n"


def _format_names(results: Mapping[str, Result], versions: Sequence[str]) -> str:
    """Which private names exist, with those that differ between versions first."""
    names = {name for version in versions for name in results[version]["names"]}
    states = {name: [results[version]["names"].get(name) for version in versions] for name in names}
    order = sorted(names, key=lambda name: (all(states[name]), name))
    words = {True: "yes", False: "**no**", None: ""}
    return _format_table(["name", *versions], [[f"`{name}`", *(words[s] for s in states[name])] for name in order])


def _format_operators(results: Mapping[str, Result], versions: Sequence[str]) -> str:
    """The functions with a rule or a declared layout that are not the same in all versions."""
    found = [results[version]["operators"] for version in versions]
    names = sorted({name for operators in found for name in operators})
    changed = [name for name in names if len({operators.get(name) for operators in found}) > 1]
    text = f"{len(names)} functions have a rule or a declared layout. "
    if not changed:
        return text + "All exist in all of these versions, with the same arguments.\n"
    rows = []
    for name in changed:
        signatures = list(dict.fromkeys(operators.get(name) for operators in found if name in operators))
        rows.append([f"`{name}`", *(chr(97 + signatures.index(o[name])) if name in o else "**no**" for o in found)])
    text += f"{len(changed)} of them differ. Equal letters are equal arguments.\n\n"
    return text + _format_table(["function", *versions], rows)


def _format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
