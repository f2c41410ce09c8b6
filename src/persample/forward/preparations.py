"""Calls that are replaced, before they run, by an equivalent call that can be followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from persample._internal.facts import all_with, find_functions
from persample.forward.own_rows import select_own_rows
from persample.forward.sizes import read_sizes, read_slices
from persample.forward.unused_branch import drop_unused_branch
from persample.layouts import Call

# Function -> the call to run in place of a call of it.
PREPARATIONS: dict[Any, Callable[[Call], Call]] = {
    Tensor.__getitem__: lambda call: select_own_rows(read_slices(call)),
    **dict.fromkeys(all_with("takes_sizes"), read_sizes),
    **dict.fromkeys(find_functions("where"), drop_unused_branch),
}
