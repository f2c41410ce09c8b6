"""The user's code that calls a function: the place of the call, and whether it writes a number out."""

from __future__ import annotations

import dis
import sys
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

import torch

_LIBRARIES = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
_BETWEEN = {"KW_NAMES", "PRECALL", "CACHE", "EXTENDED_ARG"}  # the last argument and the call that gets it
_CONSTANTS = {"LOAD_CONST", "LOAD_SMALL_INT"}


def find_calling_frame() -> FrameType:
    """The innermost frame that is not of torch or persample."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return frame


def is_written_out(number: float, frame: FrameType) -> bool:
    """Whether the call that a frame makes has a number of the source code as its last argument: `x / 2`, `x.div(2)`."""
    return _find_last_constant(frame.f_code, frame.f_lasti) == number


@lru_cache(maxsize=256)
def _find_last_constant(code: CodeType, position: int) -> object:
    """The constant that is loaded right before an instruction; None if something else is."""
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.offset >= position:
            break
        if instruction.opname not in _BETWEEN:
            before = instruction
    return before.argval if before is not None and before.opname in _CONSTANTS else None
