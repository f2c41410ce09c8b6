"""List what persample relies on in torch, and whether the installed torch has it: `python tools/private_names.py`.

The private names are those of `src/persample/_torch`; the operators are those with a rule or a declared layout. With
`--json` the answer is one line of JSON, which `tools/test_versions.py` puts into `docs/reference/versions.md`.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp._fully_shard as fully_shard
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from persample import _torch
from persample._torch.lookup import Missing, find
from persample.errors import get_op_name
from persample.layouts.algebra.arguments import find_signatures
from persample.layouts.algebra.engine import DECLARATIONS
from persample.rules.registry import HANDLED_FUNCTIONS

SOURCE = Path(_torch.__file__).parent
# Private names without torch: of Python, and of persample's own stand-ins.
_NOT_TORCH = {"_getframe", "_raise"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    found = {"torch": torch.__version__, "names": find_names(), "operators": find_operators()}
    if parser.parse_args().json:
        print(json.dumps(found))
        return
    for name, exists in found["names"].items():
        print("yes    " if exists else "MISSING", name)
    print(f"torch {found['torch']}: {sum(map(bool, found['names'].values()))} of {len(found['names'])} names exist")
    print(f"{len(found['operators'])} operators have a rule or a declared layout")


def find_names() -> dict[str, bool]:
    """The private names of torch in `_torch`, and whether the installed torch has them."""
    tree = ast.Module([ast.parse(file.read_text()) for file in sorted(SOURCE.glob("*.py"))], [])  # type: ignore[misc]
    paths = {path: _has_path(path) for path in _find_paths(tree)}
    code = "".join(inspect.getsource(module) for module in _list_fsdp_modules())
    probes = _make_probes()
    attributes = {
        f".{name}": any(hasattr(probe, name) for probe in probes) or re.search(rf"\.{name}\b", code) is not None
        for name in _find_attributes(tree)
    }
    return dict(sorted(paths.items())) | dict(sorted(attributes.items()))


def find_operators() -> dict[str, str]:
    """The functions with a rule or a declared layout, with a checksum of their arguments."""
    names = {}
    for function in [*DECLARATIONS, *HANDLED_FUNCTIONS]:
        if isinstance(function, str):
            continue
        signatures = sorted(str(signature) for signature in find_signatures(function))
        where = str(getattr(function, "__module__", None) or "").removeprefix("torch._C").lstrip("._")
        name = f"{where}.{get_op_name(function)}".lstrip(".")
        names[name] = f"{zlib.crc32(chr(10).join(signatures).encode()):08x}"
    return dict(sorted(names.items()))


def _find_paths(tree: ast.AST) -> set[str]:
    """The dotted names below torch that stand in strings; those with one part from a list are written out."""
    found = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.ListComp, ast.SetComp)) and isinstance(node.generators[0].iter, ast.Tuple):
            parts = [ast.literal_eval(part) for part in node.generators[0].iter.elts]
            prefixes = [part.values[0].value for part in ast.walk(node.elt) if isinstance(part, ast.JoinedStr)]  # type: ignore[attr-defined]
            found |= {f"{prefix}{part}" for prefix in prefixes for part in parts}
    return {path for path in found if re.fullmatch(r"torch(\.\w+)+", path)}


def _find_attributes(tree: ast.AST) -> set[str]:
    """The private attributes that are read from torch's objects."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("read", "getattr"):
            found |= {part.value for part in node.args[1:2] if isinstance(part, ast.Constant)}
    return {name for name in found if re.fullmatch(r"_[a-z]\w*", name)} - own - _NOT_TORCH


def _has_path(path: str) -> bool:
    if not isinstance(find(path, ""), Missing):
        return True
    try:
        return importlib.import_module(path) is not None
    except ImportError:
        return False


class _Same(torch.autograd.Function):
    """Stands for a user's function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


def _make_probes() -> list[Any]:
    """Objects of torch of all kinds whose attributes are read."""
    leaf = torch.ones(2, 3, requires_grad=True)
    view, custom = leaf.select(0, 1), _Same.apply(leaf)
    operator = torch.ops.aten.add
    return [
        leaf, view.grad_fn, custom.grad_fn, torch.UntypedStorage, torch.UntypedStorage(1), torch.nn.Linear(2, 2),
        operator, operator.Tensor, forward_ad, torch.nn.parallel.DistributedDataParallel, checkpoint, torch.compile,
        torch.compile(torch.nn.Identity().forward), *_list_fsdp_modules(), *_list_helpers(),
    ]  # fmt: skip


def _list_fsdp_modules() -> list[Any]:
    return [value for name, value in vars(fully_shard).items() if name.startswith("_fsdp") and inspect.ismodule(value)]


def _list_helpers() -> Iterator[Any]:
    for name in ("torch.distributed._composable_state", "torch.distributed._composable.contract"):
        if _has_path(name):
            yield importlib.import_module(name)


if __name__ == "__main__":
    main()
