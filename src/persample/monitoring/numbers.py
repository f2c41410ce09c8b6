"""Where the numbers of measured steps go: a file of lines of JSON, a function, TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from persample._internal.text import describe_value
from persample._version import __version__
from persample.errors import PerSampleError

# Receives the numbers of a measured step by name, and the number of the step.
Log = Callable[[dict[str, float], int], None]


class RunFile:
    """A file with a line about the run, and a line for each measured step.

    Args:
        path: the file.
        every: how many calls of the model go by between measured steps.
        layers: the number of entries of each part of the model.
        coupled: as in `record`.
        warn: called with a text if the file can no longer be written.
    """

    def __init__(
        self, path: str | Path, every: int, layers: Mapping[str, int], coupled: str | None, warn: Callable[[str], None]
    ) -> None:
        self._warn = warn
        self._file: TextIO | None = open(path, "w", encoding="utf-8")  # noqa: SIM115  # until close()
        about = {"persample": __version__, "torch": torch.__version__, "every": every, "layers": dict(layers)}
        self.write(about if coupled is None else {**about, "coupled": coupled})

    def write(self, line: dict[str, Any]) -> None:
        """Write a line."""
        if self._file is None:
            return
        try:
            print(json.dumps(line), file=self._file, flush=True)
        except OSError as error:  # such as a full disk
            self._file = None
            self._warn(f"The monitor writes nothing more to its file: {error}")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def make_log(log: Log | Any) -> Log | None:
    """The function that receives the numbers: as given, or one that writes to TensorBoard."""
    if log is None or callable(log):
        return log
    if not hasattr(log, "add_scalar"):
        raise PerSampleError(
            f"log must be a function of (numbers, step), or a SummaryWriter of TensorBoard, got {describe_value(log)}."
        )

    def write(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            log.add_scalar(f"gradients/{name}", value, step)

    return write
