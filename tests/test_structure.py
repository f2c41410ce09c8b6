"""The structure of the package: where private names may stand, how large packages are, what an import needs."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import persample
from persample import PerSampleError, _torch
from persample._torch.lookup import find
from persample._version import TESTED_TORCH

SOURCE = Path(persample.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# Names with an underscore that are not private, or not torch's.
ALLOWED = {
    "_fields": "part of the interface of named tuples",
    "_getframe": "sys._getframe, documented by Python",
    "_base": "Tensor._base, documented by torch",
    "_version": "Tensor._version, documented by torch",
    "_generate_noise": "Opacus: the noise of its optimizer",
    "_check_skip_next_step": "Opacus: BatchMemoryManager's signal to its optimizer",
    "_step_skip_queue": "Opacus: signals of BatchMemoryManager that its optimizer has not used yet",
    "_prepare_inputs": "transformers: moves the batch of the Trainer to its device",
    "_set_signature_columns_if_needed": "transformers: fills the list of the columns that the Trainer keeps",
    "_signature_columns": "transformers: the columns that the Trainer keeps",
    "_get_output_dir": "transformers: the folder of the Trainer's checkpoints",
}


@cache
def find_own_names() -> frozenset[str]:
    """Every name that persample itself defines: functions, classes, variables and attributes of self."""
    names: set[str] = set()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return frozenset(names)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def find_foreign_private_names(source: str, own: frozenset[str]) -> Iterator[str]:
    """Private names of other libraries in a module: attributes, imports, and names given as strings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("persample"):
            yield from (part for part in node.module.split(".") if is_private(part))
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split(".") if is_private(part))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = node.value.split(".")
            if parts[0] == "torch" and all(part.isidentifier() for part in parts):
                yield from filter(is_private, parts)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)) and name.value not in own:
                yield str(name.value)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_private_names_are_used_in_one_package_only(file: Path) -> None:
    if file.parent != SOURCE / "_torch":
        found = set(find_foreign_private_names(file.read_text(), find_own_names())) - ALLOWED.keys()
        assert not found, f"use these through persample._torch: {sorted(found)}"


@pytest.mark.parametrize(
    "source",
    [
        "torch._C._current_graph_task_id()",
        "from torch.overrides import _push_mode",
        "from torch._ops import OpOverload",
        "import torch._dynamo",
        "sys.modules.get('torch._dynamo')",
        "node._saved_dim",
        "getattr(tensor, '_cdata')",
    ],
)
def test_the_search_finds_private_names(source: str) -> None:
    assert list(find_foreign_private_names(source, find_own_names()))


def test_a_missing_private_name_is_an_error_at_use_that_names_the_feature() -> None:
    missing = find("torch._C._no_such_name", "Recording a checkpointed model")
    assert not isinstance(3, missing)
    for use in (lambda: missing(), lambda: missing.attribute):
        with pytest.raises(PerSampleError, match=r"Recording a checkpointed model needs torch\._C\._no_such_name"):
            use()
    with pytest.raises(PerSampleError, match="lists the names"):
        exec("class Subclass(missing): pass", {"missing": missing})


@pytest.mark.parametrize("version", ["2.16.0", "2.1.0", "2.16.0a0+git1234567", "3.13.0+cu132"])
def test_an_untested_torch_gives_one_warning(version: str) -> None:
    with pytest.warns(
        UserWarning, match=re.escape(f"persample was not tested with torch {version}, but with ")
    ) as found:
        _torch.warn_if_untested(version)
    assert len(found) == 1


@pytest.mark.parametrize("version", [torch.__version__, *(f"{tested}.1+cu132" for tested in TESTED_TORCH)])
def test_a_tested_torch_gives_none(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _torch.warn_if_untested(version)


def test_the_warning_comes_once_and_can_be_filtered() -> None:
    code = """
import sys, warnings, torch
torch.__version__ = "99.0"
if sys.argv[1:]:
    warnings.filterwarnings("ignore", "persample was not tested with torch")
import persample
persample.record, persample.watch, persample.compile
"""
    for argument, expected in ([], 1), (["ignore"], 0):
        found = subprocess.run([sys.executable, "-c", code, *argument], capture_output=True, text=True, check=True)
        assert found.stderr.count("persample was not tested with torch 99.0") == expected, found.stderr


def test_import_works_without_the_private_names() -> None:
    """As with another version of torch that lacks them all."""
    code = """
import torch, torch.nn.parallel, torch.utils.checkpoint
for name in ("_current_graph_task_id", "_will_engine_execute_node", "_len_torch_function_stack"):
    delattr(torch._C, name)
import persample
model = torch.nn.Linear(2, 2)
for use in ("record", "watch"):
    try:
        if use == "record":
            with persample.record(model):
                model(torch.ones(2, 2))
        else:
            with persample.watch(model, print, {}):
                model(torch.ones(2, 2))
    except persample.PerSampleError as error:
        print(use, error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "record Every recording needs torch._C._current_graph_task_id, a private name" in found.stdout
    assert "watch Every recording needs" in found.stdout


# Attributes of other packages' objects that are set directly: on the hot path, where a call would cost too much.
WRITES = {
    "forward/mode.py: tracker.counted.read_last",
    "forward/use.py: uses.parameters",
    "forward/use.py: uses.factor_bytes",
}

# Attributes of objects that are not persample's: tensors, functions, modules of torch, parsers.
OF_OTHERS = {"grad", "data", "__name__", "description", "state", "reduction", "max_norm"}


def is_write_to_self(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"


@cache
def find_fields() -> dict[str, frozenset[Path]]:
    """By the name of an attribute: the files with a class that sets it."""
    found: dict[str, set[Path]] = {}
    for file in FILES:
        for cls in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)):
            for node in ast.walk(cls):
                if isinstance(node, ast.Assign | ast.AnnAssign):
                    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                        found.setdefault(ast.unparse(target), set()).add(file)
                elif isinstance(node, ast.Attribute) and is_write_to_self(node):
                    found.setdefault(node.attr, set()).add(file)
    return {name: frozenset(files) for name, files in found.items()}


def get_package(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0]


def find_foreign_writes(source: str, file: Path) -> Iterator[str]:
    """The attributes of other objects that a module sets, if no class of its package has such an attribute.

    The attributes of a tracker, a collector and gradients belong to their class alone.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, (ast.Store, ast.Del)):
            continue
        owners = find_fields().get(node.attr, frozenset()) if node.attr not in OF_OTHERS else frozenset()
        target = ast.unparse(node.value)
        is_guarded = target.split(".")[-1] in ("tracker", "_tracker", "collector", "_collector", "grads", "_grads")
        package = file.relative_to(SOURCE).parts[0]
        is_own = (
            file in owners if is_guarded else any(owner.relative_to(SOURCE).parts[0] == package for owner in owners)
        )
        if owners and target not in ("self", "cls") and not is_own:
            yield f"{file.relative_to(SOURCE)}: {ast.unparse(node)}"


def test_no_package_sets_attributes_of_objects_of_another() -> None:
    found = {write for file in FILES for write in find_foreign_writes(file.read_text(), file)}
    assert not found - WRITES, "give the class a method that changes the attribute"
    assert not WRITES - found, "remove these from the list"


@pytest.mark.parametrize(
    ("file", "source", "is_found"),
    [
        ("recording/watching.py", "self._step.tracker.batch = 3", True),
        ("forward/steps.py", "tracker.advice = ''", True),
        ("gradients/matrix.py", "self.collector.batch += 1", True),
        ("forward/tracker.py", "self.batch = 3", False),
        ("recording/hooks.py", "p.grad = None", False),
    ],
)
def test_the_search_finds_writes(file: str, source: str, is_found: bool) -> None:
    assert bool(list(find_foreign_writes(source, SOURCE / file))) == is_found


def test_there_are_about_ten_modules_at_the_root() -> None:
    assert len([file for file in FILES if file.parent == SOURCE]) <= 10


def test_every_package_says_what_it_is_for() -> None:
    packages = [info.name for info in pkgutil.iter_modules([str(SOURCE)]) if info.ispkg]
    for name in packages:
        module = importlib.import_module(f"persample.{name}")
        assert module.__doc__ and len(module.__doc__.split()) > 10, name


def test_public_names() -> None:
    assert set(persample.__all__) == {"__version__", *persample._MODULES} <= set(dir(persample))
    for name in persample.__all__:
        assert getattr(persample, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = persample.nothing  # type: ignore[attr-defined]


def test_importing_needs_torch_alone() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['numpy', 'sklearn', 'scipy', 'pyarrow', 'PIL', 'matplotlib'])); "
        "import persample, persample.cli, torch; "
        "m = torch.nn.Linear(2, 2); persample.call_for_per_sample_grads(m)(torch.ones(3, 2)).sum().backward(); "
        "assert m.weight.grad_sample.shape == (3, 2, 2)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
