"""Measure the size and the structure of `src/persample`: `python tools/measures.py`.

It prints a table with a row for each package. Each total has a limit in `[tool.measures]` of `pyproject.toml`, and a
total above its limit is an error. After a total has become smaller, `--tighten` writes it as the new limit.
With `--list`, every place that is counted is printed.

- functions above 40 lines, from `def` to the last line, without the docstring
- functions above a cyclomatic complexity of 12, as ruff counts it (C901)
- classes above 25 methods or 15 attributes: those of the class itself, without those of its bases; fields of frozen
  dataclasses and keys of TypedDicts do not count
- files above 400 lines
- deep imports: `from persample.x.y import z` outside of `persample.x`; modules of `_internal` are open to all packages
- untyped: a parameter or an attribute that is annotated as `Any` and has the name of a class of persample
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "persample"
SETTINGS = ROOT / "pyproject.toml"

MAX_FUNCTION_LINES = 40
MAX_COMPLEXITY = 12
MAX_METHODS = 25
MAX_ATTRIBUTES = 15
MAX_FILE_LINES = 400

# What is built on the core, and the parts of the core that no recording is made of. The rest is the engine.
APPLICATIONS = set(
    "cli steering monitoring scanning private isolation checking compiled expanded_weights testing".split()
)
BRICKS = {
    "terms",
    "rules",
    "gradients",
    "distributed",
    "ragged",
    "penalties",
    "errors",
    "__init__",
    "__main__",
    "_version",
}

# How far a total may grow after its limit was written: a fix may add lines to the engine.
SLACK = {"engine lines": 300}

FAULTS = ("long functions", "complex functions", "large classes", "long files", "deep imports", "untyped")

# Names of our classes that variables with objects of other libraries have, too.
_NAMES_OF_OTHERS = set(
    "arguments batch call cell context example function functions loss_reduction mode names node options output "
    "outputs part path scan_options state values".split()
)


@dataclass
class Measures:
    """What was counted in a package; `places` has the place of each fault."""

    lines: int = 0
    files: int = 0
    functions: int = 0
    places: dict[str, list[str]] = field(default_factory=lambda: {fault: [] for fault in FAULTS})

    def __add__(self, other: Measures) -> Measures:
        places = {fault: self.places[fault] + other.places[fault] for fault in FAULTS}
        return Measures(self.lines + other.lines, self.files + other.files, self.functions + other.functions, places)

    def list_numbers(self) -> list[int]:
        """The numbers of a row of the table."""
        return [self.files, self.lines, self.functions, *(len(self.places[fault]) for fault in FAULTS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tighten", action="store_true", help="write totals that became smaller as the new limits")
    parser.add_argument("--totals", action="store_true", help="print the totals only")
    parser.add_argument("--list", action="store_true", help="print each place that is counted")
    arguments = parser.parse_args()
    measured = measure_packages(SOURCE)
    totals = count_totals(measured)
    if arguments.list:
        print_places(measured)
    elif not arguments.totals:
        print_table(measured)
    if arguments.tighten:
        tighten(totals)
    limits = read_limits()
    print(", ".join(f"{name} {total} (limit {limits[name]})" for name, total in totals.items()))
    grown = [name for name, total in totals.items() if total > limits[name]]
    if grown:
        sys.exit(f"Above the limit in pyproject.toml: {', '.join(grown)}. `--list` shows the places.")


def count_totals(measured: dict[str, Measures]) -> dict[str, int]:
    """The totals that have a limit."""
    engine = add_up(measured, set(measured) - APPLICATIONS - BRICKS)
    whole = add_up(measured, set(measured))
    return {"engine lines": engine.lines, **{fault: len(whole.places[fault]) for fault in FAULTS}}


def read_limits() -> dict[str, int]:
    """The limit of each total."""
    found = tomllib.loads(SETTINGS.read_text())["tool"]["measures"]
    return {name.replace("-", " "): limit for name, limit in found.items()}


def tighten(totals: dict[str, int]) -> None:
    """Write the totals that are below their limits to `pyproject.toml`."""
    text = SETTINGS.read_text()
    for name, limit in read_limits().items():
        limit = min(limit, totals[name] + SLACK.get(name, 0))
        text = re.sub(rf"^({name.replace(' ', '-')} = )\d+", rf"\g<1>{limit}", text, flags=re.MULTILINE)
    SETTINGS.write_text(text)


# ---- what is counted ----


def measure_packages(source: Path) -> dict[str, Measures]:
    """The measures of each package and of each module that belongs to no package, by name."""
    names = find_class_names(source)
    found: dict[str, Measures] = {}
    for file in sorted(source.rglob("*.py")):
        package = find_package(file, source)
        found[package] = found.get(package, Measures()) + measure_file(file, source, names)
    for place, package in find_complex_functions(source):
        found[package].places["complex functions"].append(place)
    return found


def measure_file(file: Path, source: Path, class_names: set[str]) -> Measures:
    """The measures of a file, without complexity."""
    text = file.read_text()
    tree = ast.parse(text)
    found = Measures(lines=len(text.splitlines()), files=1)
    where = file.relative_to(source)
    for node in ast.walk(tree):
        place = f"{where}:{getattr(node, 'lineno', 1)}"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.functions += 1
            if (lines := count_lines(node)) > MAX_FUNCTION_LINES:
                found.places["long functions"].append(f"{place} {node.name}: {lines} lines")
        elif isinstance(node, ast.ClassDef):
            methods, attributes = count_members(node)
            if methods > MAX_METHODS or attributes > MAX_ATTRIBUTES:
                counted = f"{methods} methods, {attributes} attributes"
                found.places["large classes"].append(f"{place} {node.name}: {counted}")
        elif isinstance(node, (ast.ImportFrom, ast.Import)):
            found.places["deep imports"] += [
                f"{place} {module}" for module in find_deep_imports(node, find_package(file, source))
            ]
        elif (name := find_untyped(node)) in class_names:
            found.places["untyped"].append(f"{place} {name}: Any")
    if found.lines > MAX_FILE_LINES:
        found.places["long files"].append(f"{where}: {found.lines} lines")
    return found


def find_package(file: Path, source: Path) -> str:
    """The name of the package below `persample`, or of the module."""
    return file.relative_to(source).parts[0].removesuffix(".py")


def count_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its decorators and its docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def count_members(node: ast.ClassDef) -> tuple[int, int]:
    """The numbers of methods and attributes that a class itself has."""
    methods = {part.name for part in node.body if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))}
    attributes = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }
    described = [*map(ast.unparse, node.decorator_list), *map(ast.unparse, node.bases)]
    if any("frozen=True" in text or text == "TypedDict" for text in described):
        return len(methods), 0
    for part in node.body:
        targets = (
            [part.target] if isinstance(part, ast.AnnAssign) else part.targets if isinstance(part, ast.Assign) else []
        )
        attributes |= {target.id for target in targets if isinstance(target, ast.Name)}
    return len(methods), len(attributes - methods - {"__slots__"})


def find_deep_imports(node: ast.ImportFrom | ast.Import, package: str) -> Iterator[str]:
    """The modules inside of other packages that a statement imports from."""
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    for module in modules:
        parts = module.split(".")
        if parts[0] == "persample" and len(parts) > 2 and parts[1] not in (package, "_internal"):
            yield module


def find_untyped(node: ast.AST) -> str | None:
    """The name of a parameter or an attribute that is annotated as `Any`."""
    if not isinstance(node, (ast.arg, ast.AnnAssign)):
        return None
    annotation = node.annotation
    texts = {"Any", "Any | None", "ref[Any]", "ref[Any] | None"}
    if annotation is None or ast.unparse(annotation).strip("'\"") not in texts:
        return None
    if isinstance(node, ast.arg):
        return node.arg
    target = node.target
    name = target.attr if isinstance(target, ast.Attribute) else target.id if isinstance(target, ast.Name) else ""
    return name.lstrip("_")


def find_class_names(source: Path) -> set[str]:
    """The names of all classes in the form of variables: `PrivateOptimizer` as `private_optimizer`."""
    found = set()
    for file in source.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                found.add("_".join(word.lower() for word in re.findall(r"[A-Z]+[a-z]*", node.name)))
    return found - _NAMES_OF_OTHERS


def find_complex_functions(source: Path) -> Iterator[tuple[str, str]]:
    """The functions that ruff finds too complex, each with its package."""
    command = [sys.executable, "-m", "ruff", "check", "--select", "C901", "--ignore-noqa", "--output-format", "json"]
    limit = ["--config", f"lint.mccabe.max-complexity={MAX_COMPLEXITY}", "--exit-zero", "--no-cache", str(source)]
    found = subprocess.run([*command, *limit], capture_output=True, text=True, check=True)
    for message in json.loads(found.stdout):
        file = Path(message["filename"])
        yield (
            f"{file.relative_to(source)}:{message['location']['row']} {message['message']}",
            find_package(file, source),
        )


# ---- what is printed ----


def add_up(measured: dict[str, Measures], packages: set[str]) -> Measures:
    """The sum of the measures of some packages."""
    return sum((measured[package] for package in sorted(packages & set(measured))), Measures())


def print_table(measured: dict[str, Measures]) -> None:
    """A row for each package, largest first, and rows for sums."""
    heads = ["", "files", "lines", "functions", *FAULTS]
    packages = sorted(measured, key=lambda package: -measured[package].lines)
    rows = [[package, *map(str, measured[package].list_numbers())] for package in packages]
    sums = {
        "engine": set(measured) - APPLICATIONS - BRICKS,
        "terms, rules, ...": BRICKS,
        "applications": APPLICATIONS,
        "all": set(measured),
    }
    rows += [[name, *map(str, add_up(measured, of).list_numbers())] for name, of in sums.items()]
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    for i, row in enumerate([heads, *rows]):
        if i in (1, 1 + len(packages)):
            print("  ".join("-" * width for width in widths))
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells[1:]]))


def print_places(measured: dict[str, Measures]) -> None:
    """Each place that is counted, by kind."""
    whole = add_up(measured, set(measured))
    for fault in FAULTS:
        print(f"{fault}: {len(whole.places[fault])}")
        for place in whole.places[fault]:
            print(f"  {place}")


if __name__ == "__main__":
    main()
