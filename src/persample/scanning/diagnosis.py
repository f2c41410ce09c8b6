"""Explains a failed scan in terms of the data: which examples are bad, and what the loss function was given."""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from persample import _torch
from persample.errors import PerSampleError
from persample.losses import get_ignored_label, get_name, takes_outputs
from persample.scanning.errors import BadExamples, NotFinite, ScanError
from persample.scanning.measure import Measurement
from persample.scanning.predictions import Outputs, find_targets
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
    except PerSampleError:
        raise
    except Exception as error:
        if reasons := _find_bad_examples(source, measurement):
            raise BadExamples(reasons, source.names.get) from error
        if hint := _find_hint(source, measurement):
            raise ScanError(f"{type(error).__name__}: {' '.join(str(error).split())}. {hint}") from error
        raise


# ---- bad examples ----


def _find_bad_examples(source: Source, measurement: Measurement) -> dict[str, dict[int, str]]:
    """Reasons, each with the bad examples and what is wrong with them. Reads all examples, without the model."""
    classes, ignored = _count_classes(source, measurement), get_ignored_label(measurement.loss_fn)
    shapes: dict[int, Any] = {}
    reasons: dict[str, dict[int, str]] = {}
    wanted = f"the label is not from 0 to {classes - 1}" if classes else ""
    for i, example in _read_in_time(source):
        if isinstance(example, Exception):
            reasons.setdefault("cannot be read", {})[i] = " ".join(str(example).split())[:200]
            continue
        shapes[i] = _describe_shapes(example)
        if not _is_finite(example):
            reasons.setdefault("the inputs contain NaN or infinity", {})[i] = ""
        labels = _find_labels(source, example)
        if classes is not None and labels is not None:
            bad = labels[((labels < 0) | (labels >= classes)) & (labels != ignored)]
            if len(bad):
                reasons.setdefault(wanted, {})[i] = str(int(bad[0]))
    if source.collate is default_collate and len(counts := Counter(shapes.values())) > 1:
        usual = counts.most_common(1)[0][0]
        others = {i: str(shape) for i, shape in shapes.items() if shape != usual}
        reasons[f"the shape differs from the usual {usual}"] = others
    return reasons


def _find_all_nonfinite(source: Source, measurement: Measurement, error: NotFinite) -> NotFinite:
    """The same error with the ids of all examples whose loss is not finite, by forward passes."""
    found, stop = set(error.ids), time.monotonic() + SECONDS
    try:
        for batch in source.iterate_batches(source.batch_size, lambda shard: True):
            if time.monotonic() > stop:
                break
            found |= set(measurement.find_nonfinite_losses(batch.ids, batch.batch))
    except Exception:  # another batch fails in another way
        pass
    return NotFinite(sorted(found), error.quantity)


def _read_in_time(source: Source) -> Iterator[tuple[int, Any]]:
    """All examples, or an error for one that cannot be read, for at most `SECONDS`."""
    stop = time.monotonic() + SECONDS
    for i in range(source.size or 0):
        if time.monotonic() > stop:
            return
        try:
            yield i, source.read_examples([i])[i]
        except Exception as error:
            yield i, error


def _count_classes(source: Source, measurement: Measurement) -> int | None:
    """The number of classes that the model scores: the second dimension of its outputs. None if it cannot be run."""
    for batch in source.iterate_batches(1, lambda shard: shard == 0):
        outputs = Outputs(1, 0)
        try:
            with outputs.capture(measurement.model):
                measurement.compute_any_loss(batch.batch)
        except Exception:  # the loss fails, but the outputs are there
            pass
        found = outputs.get()
        targets = find_targets(batch.batch, 1)
        is_scored = found is not None and targets is not None and not targets.is_floating_point()
        return int(found.shape[1]) if is_scored and found is not None and found.dim() >= 2 else None
    return None


def _find_labels(source: Source, example: Any) -> Tensor | None:
    try:
        targets = find_targets(source.collate([example]), 1)
    except Exception:
        return None
    is_label = targets is not None and not targets.is_floating_point() and targets.dtype != torch.bool
    return targets.flatten() if is_label and targets is not None else None


def _describe_shapes(example: Any) -> str:
    """The shapes of all tensors of an example."""
    tensors = [part for part in _torch.pytree.tree_leaves(example) if hasattr(part, "shape")]
    shapes = [str(tuple(part.shape)) for part in tensors if len(part.shape)]
    return ", ".join(shapes)


def _is_finite(example: Any) -> bool:
    tensors = [part for part in _torch.pytree.tree_leaves(example) if isinstance(part, Tensor)]
    return all(bool(part.isfinite().all()) for part in tensors if part.is_floating_point())


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
            measurement.compute_any_loss(batch.batch)
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
