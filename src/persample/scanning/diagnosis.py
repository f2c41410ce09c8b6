"""Explains a failed scan in terms of the data: which examples are bad, and what the loss function was given."""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from persample.errors import PerSampleError
from persample.losses import get_ignored_label, get_name, takes_outputs
from persample.scanning.errors import BadExamples, NotFinite, ScanError, UnreadableExample
from persample.scanning.measure import Measurement
from persample.scanning.predictions import Outputs, find_targets
from persample.scanning.screening import UNREADABLE, Screen, Unreadable, describe_shapes, say_why_unreadable
from persample.scanning.source import Source

SECONDS = 60.0  # for the search of bad examples, which reads all data once

_OUTPUT_NAMES = {
    "out", "outs", "output", "outputs", "pred", "preds", "prediction", "predictions", "logit", "logits", "scores",
    "yhat", "y_hat", "y_pred", "input",
}  # fmt: skip
_TARGET_NAMES = {"y", "t", "target", "targets", "label", "labels", "y_true", "truth"}


@contextmanager
def explain_failure(source: Source, measurement: Measurement) -> Iterator[None]:
    """If the block fails, look for bad examples and usual mistakes, and raise an error that names them."""
    try:
        yield
    except NotFinite as error:
        raise _find_all_nonfinite(source, measurement, error) from error
    except Exception as error:
        if isinstance(error, PerSampleError) and not isinstance(error, UnreadableExample):
            raise
        reasons = _find_bad_examples(source, _make_label_screen(source, measurement))
        is_of_all = len(reasons.get(UNREADABLE, ())) == source.size  # then the dataset is wrong, not an example
        if reasons and (isinstance(error, UnreadableExample) or not is_of_all):
            raise BadExamples(reasons, source.names.get) from error
        if hint := _find_hint(source, measurement):
            raise ScanError(f"{type(error).__name__}: {' '.join(str(error).split())}. {hint}") from error
        raise


# ---- bad examples ----


def make_screen(source: Source, measurement: Measurement) -> Screen:
    """What the examples of a scan that skips the bad ones must be like: as most of some examples from first to last."""
    shape = None
    if source.collate is default_collate:
        sample = [example for example in source.read_sample().values() if not isinstance(example, Unreadable)]
        shape = _find_usual(Counter(map(describe_shapes, sample)))
    source.screen = replace(source.screen or Screen(), shape=shape)  # the first good example has that shape
    return replace(_make_label_screen(source, measurement), shape=shape)


def _make_label_screen(source: Source, measurement: Measurement) -> Screen:
    return Screen(_count_classes(source, measurement), get_ignored_label(measurement.loss_fn))


def _find_usual(counts: Counter[str]) -> str | None:
    return counts.most_common(1)[0][0] if counts else None


def _find_bad_examples(source: Source, screen: Screen) -> dict[str, dict[int, str]]:
    """Reasons, each with the bad examples and what is wrong with them. Reads all examples, without the model."""
    shapes: dict[int, str] = {}
    reasons: dict[str, dict[int, str]] = {}
    for i, example in _read_in_time(source):
        if not isinstance(example, Unreadable):
            shapes[i] = describe_shapes(example)
        labels = None if screen.classes is None else _find_labels(source, example)
        if (fault := screen.find_fault(example, labels)) is not None:
            reasons.setdefault(fault[0], {})[i] = fault[1]
    if source.collate is default_collate and len(counts := Counter(shapes.values())) > 1:
        usual = _find_usual(counts)
        others = {i: shape for i, shape in shapes.items() if shape != usual}
        reasons[f"the shape differs from the usual {usual}"] = others
    return reasons


def _find_all_nonfinite(source: Source, measurement: Measurement, error: NotFinite) -> NotFinite:
    """The same error with the ids of all examples whose loss is not finite, by forward passes."""
    found, stop = set(error.ids), time.monotonic() + SECONDS
    try:
        for batch in source.iterate_batches(source.batch_size, lambda shard: True):
            if time.monotonic() > stop:
                break
            found |= set(measurement.losses.find_nonfinite(batch.ids, batch.batch))
    except Exception:  # another batch fails in another way
        pass
    return NotFinite(sorted(found), error.quantity)


def _read_in_time(source: Source) -> Iterator[tuple[int, Any]]:
    """All examples, or why one cannot be read, for at most `SECONDS`; of a stream, the first one."""
    stop = time.monotonic() + SECONDS
    if source.size is None:
        yield from source.read_examples([0]).items()
    for i in range(source.size or 0):
        if time.monotonic() > stop:
            return
        try:
            yield i, source.read_examples([i])[i]
        except Exception as error:
            yield i, Unreadable(say_why_unreadable(error))


def _count_classes(source: Source, measurement: Measurement) -> int | None:
    """The number of classes that the model scores: the second dimension of its outputs. None if it cannot be run."""
    screen = source.screen or Screen()
    example = next((found for _, found in _read_in_time(source) if screen.find_fault(found) is None), None)
    if example is None:
        return None
    batch, outputs = source.collate([example]), Outputs(1, 0)
    try:
        with outputs.capture(measurement.model):
            measurement.losses.compute_any(batch)
    except Exception:  # the loss fails, but the outputs are there
        pass
    found, targets = outputs.get(), find_targets(batch, 1)
    is_scored = found is not None and targets is not None and not targets.is_floating_point()
    return int(found.shape[1]) if is_scored and found is not None and found.dim() >= 2 else None


def _find_labels(source: Source, example: Any) -> Tensor | None:
    try:
        targets = find_targets(source.collate([example]), 1)
    except Exception:
        return None
    is_label = targets is not None and not targets.is_floating_point() and targets.dtype != torch.bool
    return targets.flatten() if is_label and targets is not None else None


# ---- usual mistakes ----


def _find_hint(source: Source, measurement: Measurement) -> str:
    """What the user may have meant; empty if nothing is known."""
    if not takes_outputs(measurement.loss_fn) and (names := _find_output_arguments(measurement.loss_fn)):
        name = get_name(measurement.loss_fn)
        call = "f" if name == "<lambda>" else name
        return (
            f"A loss function is called as loss_fn(model, batch), but the arguments of {name} are {', '.join(names)}. "
            f"For a function of outputs and targets, pass lambda model, batch: {call}(model(batch[0]), batch[1]), with "
            "one loss per sample as result, or pass a loss module of torch."
        )
    if source.shape_hint and (layer := _find_failing_layer(source, measurement)):
        return f"The model failed in {layer}. {source.shape_hint}"
    if source.columns is not None and source.collate is default_collate:
        return (
            f"The data is a Hugging Face dataset with the columns {', '.join(source.columns)}. Keep those that the "
            "loss function uses with data.select_columns([...]), or pass a function that makes a batch as collate."
        )
    return ""


def _find_failing_layer(source: Source, measurement: Measurement) -> str:
    """The innermost module that raises for the first example, with the shape of its input; empty if none does."""
    running: list[str] = []
    names = {module: name for name, module in measurement.model.named_modules()}

    def enter(module: nn.Module, args: Any) -> None:
        shapes = ", ".join(str(tuple(part.shape)) for part in args if isinstance(part, Tensor))
        where = f"its layer {names[module]} ({type(module).__name__})" if names[module] else "its own forward()"
        running.append(f"{where}, for an input of shape {shapes}")

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    hooks = [module.register_forward_pre_hook(enter) for module in names]
    hooks += [module.register_forward_hook(leave) for module in names]
    try:
        for batch in source.iterate_batches(1, lambda shard: shard == 0):
            measurement.losses.compute_any(batch.batch)
    except Exception:  # the modules that did not return are those that it passed through
        return running[-1] if running else ""
    finally:
        for hook in hooks:
            hook.remove()
    return ""


def _find_output_arguments(loss_fn: Any) -> list[str]:
    """The names of the arguments of a function, if they speak of outputs and targets."""
    try:
        names = list(inspect.signature(loss_fn).parameters)
    except (TypeError, ValueError):
        return []
    speaks = len(names) >= 2 and (names[0].lower() in _OUTPUT_NAMES or names[1].lower() in _TARGET_NAMES)
    return names if speaks else []
