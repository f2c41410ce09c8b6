"""The user's code that calls a function: the place of the call, and whether it writes a number out."""

from __future__ import annotations

import dis
import sys
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

import torch

_LIBRARIES = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
_BETWEEN = {"KW_NAMES", "PRECALL", "CACHE", "EXTENDED_ARG"}  # the last operand and the call that gets it
_CONSTANTS = {"LOAD_CONST", "LOAD_SMALL_INT"}


def find_calling_frame() -> FrameType:
    """The innermost frame that is not of torch or persample."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return frame


def is_written_out(number: float, frame: FrameType) -> bool:
    """Whether a number of the source code is an operand of what a frame runs: `x / 2`, `2 * x`, `x.div(2)`."""
    return number in _find_constants(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=256)
def _find_constants(code: CodeType, position: int) -> tuple[object, ...]:
    """The constants that are loaded as the last operand of an instruction, or as the one before it."""
    before = [instruction for instruction in dis.get_instructions(code) if instruction.offset < position]
    while before and before[-1].opname in _BETWEEN:
        before.pop()
    found = [before[-1].argval] if before and before[-1].opname in _CONSTANTS else []
    depth = 0
    while before and depth < 1:  # the instructions that compute the last operand
        instruction = before.pop()
        depth += dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
    if before and before[-1].opname in _CONSTANTS:
        found.append(before[-1].argval)
    return tuple(found)
