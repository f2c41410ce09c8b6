"""The code that calls a function: its place, what it writes out, and whether it only checks arguments."""

from __future__ import annotations

import ast
import dis
import inspect
import sys
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from textwrap import dedent
from types import CodeType, FrameType

import torch

_TORCH, _PERSAMPLE = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
_DISPATCH = str(Path(torch.__file__).parent / "overrides.py")  # calls function modes

# ---- numbers in the code of the user ----

_BETWEEN = {"KW_NAMES", "PRECALL", "CACHE", "EXTENDED_ARG"}  # the last operand and the call that gets it
_CONSTANTS = {"LOAD_CONST", "LOAD_SMALL_INT"}
_WRITTEN = {*_CONSTANTS, "BUILD_LIST", "BUILD_TUPLE", "LIST_EXTEND"}


def find_calling_frame() -> FrameType:
    """The innermost frame that is not of torch or persample."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, _PERSAMPLE)):
        frame = frame.f_back
    return frame


def is_called_by(name: str) -> bool:
    """Whether the innermost function that is not of persample has this name."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_PERSAMPLE, _DISPATCH)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == name


def is_written_out(number: float) -> bool:
    """Whether a number of the code is an operand of what the calling frame runs: `x / 2`, `2 * x`, `x.div(2)`."""
    frame = find_calling_frame()
    return number in _find_constants(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=256)
def _find_constants(code: CodeType, position: int) -> tuple[object, ...]:
    """The constants that are loaded as the last operand of an instruction, or as the one before it."""
    before = [instruction for instruction in dis.get_instructions(code) if instruction.offset < position]
    operand, depth = _pop_operand(before)
    found = [operand[0].argval] if operand and operand[0].opname in _CONSTANTS else []
    if depth == 1 and before and before[-1].opname in _CONSTANTS:  # 2: one instruction has loaded both operands
        found.append(before[-1].argval)
    return tuple(found)


def _pop_operand(before: list[dis.Instruction]) -> tuple[list[dis.Instruction], int]:
    """Remove the instructions that compute the last operand; returns them, and how many operands they compute."""
    operand: list[dis.Instruction] = []
    depth = 0
    while before and depth < 1:
        if (instruction := before.pop()).opname not in _BETWEEN:
            operand.append(instruction)
            depth += dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
    return operand, depth


def is_first_argument_written_out() -> bool:
    """Whether the first argument of the call that the calling frame makes is a literal: `torch.tensor([0.5, 0.2])`."""
    frame = find_calling_frame()
    return _is_written_out_first(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=256)
def _is_written_out_first(code: CodeType, position: int) -> bool:
    *before, call = [instruction for instruction in dis.get_instructions(code) if instruction.offset <= position]
    count = {"CALL": call.arg or 0, "CALL_KW": 1 + (call.arg or 0)}.get(call.opname, 0)  # the names are one more
    operands = [_pop_operand(before)[0] for _ in range(count)]
    return count > 0 and all(each.opname in _WRITTEN and not each.is_jump_target for each in operands[-1])


# ---- checks in the code of torch: decisions that decide about nothing but whether an error is raised ----


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
    return _find_check(frame.f_code, frame.f_lineno)


@cache
def _find_check(code: CodeType, line: int) -> bool | None:
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
