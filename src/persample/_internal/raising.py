"""Decisions in the code of torch that decide about nothing but whether an error is raised."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent
from types import CodeType, FrameType

import torch

_TORCH = str(Path(torch.__file__).parent)
_PERSAMPLE = str(Path(__file__).parents[1])
_DISPATCH = str(Path(torch.__file__).parent / "overrides.py")  # calls function modes


def find_raising_value() -> bool | None:
    """The value for which the check of torch that reads it now raises an error; None if there is no such check.

    A check is an `if` whose body ends with `raise`, or an `assert`: argument validation of `torch.distributions`, for
    example. The other value of a check changes nothing.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_PERSAMPLE, _DISPATCH)):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(_TORCH):
        return None
    return _find_in_code(frame.f_code, frame.f_lineno)


@cache
def _find_in_code(code: CodeType, line: int) -> bool | None:
    try:
        lines, start = inspect.getsourcelines(code)
        tree = ast.parse(dedent("".join(lines)))
    except (OSError, SyntaxError):
        return None
    line -= start - 1
    tests = [t for t in _iterate_raising_tests(tree) if t.lineno <= line <= (t.end_lineno or 0)]
    return _find_value(tests[0]) if len(tests) == 1 else None


def _iterate_raising_tests(tree: ast.AST) -> Iterator[ast.expr]:
    """Expressions that are true if an error is raised."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            yield node.test
        elif isinstance(node, ast.Assert):
            yield ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)


def _find_value(test: ast.expr) -> bool | None:
    """The value of what is read in a test for which the test may be true."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        value = _find_value(test.operand)
        return None if value is None else not value
    if isinstance(test, ast.BoolOp):
        values = {_find_value(each) for each in test.values}
        return values.pop() if len(values) == 1 else None
    return True if isinstance(test, (ast.Call, ast.Name, ast.Attribute)) else None
