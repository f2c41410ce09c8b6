"""What a recording can be asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from torch import Tensor, nn

from persample._internal.models import read_model
from persample.batches import BatchDim
from persample.errors import PerSampleError
from persample.gradients import Bound, NonFinite, Reduce, UnitIds, UnitOptions, UnitReduction, check_max_norm
from persample.layouts import DivisorMode
from persample.recording.declared import Guard

Keep = Literal["everything", "norms", "clip"]

# What to record: a model, or several that are trained together.
Model = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]

# When to compare samples alone with the batch; a number: again, after at most so many passes. None: "first" where
# nobody can notice the extra passes, else never.
Verify = Literal["first", "always", False] | int | None

# Whether samples may influence each other, and what their rows are then; None: they may not.
Coupled = Literal["contributions"] | None

# Which parameters to record: names, or a predicate of name and parameter.
Selection = Iterable[str] | Callable[[str, Tensor], bool]

# What is the same for all samples: tensors, and names of the model's arguments, buffers or parameters.
Constants = Tensor | str | Iterable[Tensor | str]

# The values that these options may have.
_CHOICES: dict[str, tuple[Any, ...]] = {
    "loss_reduction": ("mean", "sum", None),
    "divisor": ("batch", "own", "refuse"),
    "keep": ("everything", "norms", "clip"),
    "passes": (1, 2, None),
    "coupled": ("contributions", None),
    "nonfinite": ("raise", "zero", "keep"),
}


class CommonOptions(TypedDict, total=False):
    """The options of every recording. `Options` documents them."""

    batch_size: int | None
    samples: Any
    batch_dim: BatchDim
    loss_reduction: str | None
    divisor: DivisorMode
    parameters: Selection | None
    keep_grad: bool
    constants: Constants
    verify: Verify
    coupled: Coupled
    nonfinite: NonFinite
    units: UnitIds | Callable[[int], UnitIds] | None
    num_units: int | None
    unit_reduction: UnitReduction


class ClipOptions(CommonOptions, total=False):
    """The options of a recording with `keep="clip"`."""

    stabiliser: float | None
    passes: Literal[1, 2] | None
    memory: int | None


class RecordOptions(ClipOptions, total=False):
    """The options of `record` and `watch`."""

    keep: Keep
    max_norm: float | Mapping[str, float] | None
    positions: int | None
    losses: Sequence[str] | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `record` and `watch`, with their defaults, checked.

    Attributes:
        batch_size: the number of samples; by default all tensors in the model's arguments must agree on it.
        samples: a tensor with one row for each sample, or a nested batch of such tensors. It tells the number of
            samples before anything is called, for calls of parts of the model that are ambiguous about it.
        batch_dim: the batch dimension of the model's arguments: one number, or one for each argument, by position or
            name; None for an argument that is the same for all samples.
        loss_reduction: how the back-propagated loss combines the samples, "mean" or "sum". None: as found. A loss that
            is found to be a mean is scaled by the batch size, so that rows are gradients of the samples' own losses. A
            sum that is divided by the batch size is a mean. What is given must agree with what is found; it decides if
            the loss is a sum in one part and a mean in another.
        divisor: what is done with a divisor that counts over all samples: targets that are not ignored, the sum of a
            mask or of class weights, `num_items_in_batch`. "batch": it is held constant, so that a row is B times the
            sample's share of the loss, and the mean of the rows is the gradient that `backward` computes. "own": each
            sample's part is divided by its own number, so that rows do not depend on the rest of the batch. "refuse":
            it is an error, as in private training. `grads.loss_reduction` tells what was found: "mean over 36 targets".
        parameters: the parameters to record: names, or a predicate of name and parameter; all by default.
        keep_grad: also add to `p.grad` what a plain backward pass would add (under several processes, the mean over
            them); otherwise `p.grad` is not touched.
        constants: what is the same for all samples: tensors, and names of the model's arguments. Any other tensor from
            outside that the code around the model uses (a target, a mask, weights) has one row per sample if it has the
            batch's size in its batch dimension: `batch_dim` if that is one number, or 0.
        keep: "everything"; or, if one answer is enough, "norms" or "clip": then each term is reduced and freed when it
            arrives, and memory stays close to that of a plain backward pass.
        max_norm: with keep="clip", the bound on the norm of each row, or on each parameter's part of it, by name.
        stabiliser: with keep="clip", use automatic clipping: every row is scaled by `max_norm / (norm + stabiliser)`.
        passes: with keep="clip", the number of backward passes: one that keeps its factors to the end, or two that keep
            nothing and need `backward()` inside the block. By default one, unless its factors take more than `memory`
            bytes; `grads.passes` and `repr(grads)` say which.
        memory: see `passes`. None: half of the memory that is free when backward begins, on the host within the limits
            of its containers, or on the GPU; 1 GiB if the system does not tell.
        verify: when to run the first and the last sample alone and to compare their outputs with those of the batch,
            so that samples that are mixed out of sight are noticed. "first": in the first forward pass of a model, of
            a mode and of a form of its arguments. "always": in every forward pass; a model that cannot be verified is
            then an error. A number n: as "first", and again after 1 to n further passes, a number that is drawn each
            time, with two samples that are drawn as well, by the system's generator. False: never. By default "first"
            where nobody can notice the extra passes (no hooks, no modes of torch, not compiled), else never. Random
            numbers, buffers and attributes of modules are restored. A model with dropout is compared without it; one
            that draws other random numbers for each sample, or does not run on one sample, is not verified; nor is
            one under several processes. `repr(grads)` says which.
        coupled: "contributions" accepts samples that influence each other, as by BatchNorm in training mode or in a
            contrastive loss, which have no gradients of their own. Row n is then what the gradient of the batch
            receives through sample n's own activations at each use of a weight. The rows add up to the gradient of the
            batch (under a mean loss, their mean is that gradient), and nothing else is promised. A tensor in which
            samples are mixed belongs to them row by row, along the first dimension with the batch's size. Nothing is
            verified. Without it, such models are refused.
        nonfinite: what happens to samples whose gradient is not finite. "raise": `norms()`, `clip()` and
            `clip_factors()` raise. "zero": the sample is left out, as if its gradient were zero, and the others are
            what they are without it; `grads.nonfinite_count` and `repr(grads)` tell how many there are. A gradient
            whose squared norm overflows counts, too. "keep": infinities and NaN are part of the answers.
        units: rows of units, such as users, in place of rows of samples: the unit of each sample, of shape (B,), or the
            number of consecutive samples of each unit, such as augmentations of one example; or a function of the batch
            size that returns either, which may be asked several times for one call. Every answer then has one row for
            each unit, in the order of the sorted ids (`grads.units`). Norms come from the same structures as those of
            samples. Under several processes, all samples of a unit must be in one of them.
        num_units: the number of rows; the ids in `units` must be numbers below it. Units without samples have rows of
            zeros, which count in means.
        unit_reduction: whether the row of a unit is the "sum" or the "mean" of its samples' gradients.
        positions: the number of positions of each sample's sequence, for `grads.by_position()`. The parts of all
            positions are kept, which takes as much memory as the activations' gradients.
        losses: names of several losses. The block then has a backward pass for each, in this order, and gives a
            `LossGradients`: rows for each sample and loss, and comparisons of the losses.
        guard: for `watch`: what private training adds. It refuses what breaks the bound although it has per-sample
            gradients: results that depend on a sample's number in the batch, and samples that outlive their step.
        keep_rows: for `watch`: with `keep="clip"`, also keep the rows themselves, before they are clipped.
        reduce: for `watch`: computes what is kept of each parameter's term when it arrives; see `ReducedTerms`.
    """

    batch_size: int | None = None
    samples: Any = None
    batch_dim: BatchDim = 0
    loss_reduction: str | None = None
    divisor: DivisorMode = "batch"
    parameters: Selection | None = None
    keep_grad: bool = False
    constants: Constants = ()
    keep: Keep = "everything"
    max_norm: float | Mapping[str, float] | None = None
    stabiliser: float | None = None
    passes: Literal[1, 2] | None = None
    memory: int | None = None
    verify: Verify = None
    coupled: Coupled = None
    nonfinite: NonFinite = "raise"
    units: UnitIds | Callable[[int], UnitIds] | None = None
    num_units: int | None = None
    unit_reduction: UnitReduction = "sum"
    positions: int | None = None
    losses: Sequence[str] | None = None
    guard: Guard | None = None
    keep_rows: bool = False
    reduce: Reduce | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (given := getattr(self, name)) not in choices:
                *others, last = map(repr, choices)
                raise PerSampleError(f"{name} must be {', '.join(others)} or {last}, got {given!r}.")
        if self.verify not in ("first", "always", None) and self.verify is not False and not self.verifies_again:
            raise PerSampleError(
                f"verify must be 'first', 'always', False, None or a number of passes, got {self.verify!r}."
            )
        if self.units is None and (self.num_units is not None or self.unit_reduction != "sum"):
            raise PerSampleError("num_units and unit_reduction require units.")
        if self.losses is not None:
            self._check_losses(self.losses)
        if self.positions is not None and (self.keep != "everything" or self.positions < 1):
            raise PerSampleError(f"positions must be positive and requires keep='everything', got {self.positions}.")
        if self.divisor == "own" and self.positions is not None:
            raise PerSampleError("divisor='own' is not available with positions.")
        if self.coupled:
            self._check_coupled()
        self._check_clipping()
        for constant in self.list_constants():
            if not isinstance(constant, (str, Tensor)):
                raise PerSampleError(
                    f"constants must consist of tensors and of names of arguments, got {type(constant).__name__}."
                )

    def _check_clipping(self) -> None:
        if (self.max_norm is not None) != (self.keep == "clip"):
            raise PerSampleError("keep='clip' requires max_norm, and max_norm requires keep='clip'.")
        if self.passes and self.keep != "clip":
            raise PerSampleError(f"passes must be 1 or 2 and requires keep='clip', got {self.passes}.")
        bounds = self.max_norm.values() if isinstance(self.max_norm, Mapping) else [self.max_norm]
        for bound in bounds:
            if bound is not None:
                check_max_norm(bound)
        if self.stabiliser is not None and not (self.keep == "clip" and self.stabiliser > 0):
            raise PerSampleError(f"stabiliser must be positive and requires keep='clip', got {self.stabiliser}.")

    def _check_losses(self, losses: Sequence[str]) -> None:
        if isinstance(losses, str) or not losses or len({*losses}) < len(losses):
            raise PerSampleError(f"losses must be a list of different names, got {losses!r}.")
        if self.keep != "everything":
            raise PerSampleError(f"losses requires keep='everything', got {self.keep!r}.")

    def _check_coupled(self) -> None:
        if self.is_isolated:
            raise PerSampleError(
                "coupled='contributions' is not available in private training: a contribution depends on all samples, "
                "so that no bound holds for it. Keep the samples separate."
            )
        if self.verify:
            raise PerSampleError(
                f"verify={self.verify!r} compares samples alone with those of the batch, which differ by design with "
                "coupled='contributions'. Leave it out."
            )
        if self.divisor == "own":
            raise PerSampleError(
                "divisor='own' divides each sample's part by its own number, so that contributions would not add up to "
                "the gradient of the batch. Leave it out with coupled='contributions'."
            )

    @property
    def verifies_again(self) -> bool:
        """Whether passes are verified again after some others."""
        return isinstance(self.verify, int) and not isinstance(self.verify, bool) and self.verify > 0

    def is_tried_again(self, status: str) -> bool:
        """Whether a pass like one with this status is to be verified, because that one could not be."""
        return self.verifies_again and not status.startswith("verified")

    def list_constants(self) -> list[Tensor | str]:
        """The tensors and names that are the same for all samples."""
        return [self.constants] if isinstance(self.constants, (str, Tensor)) else list(self.constants)

    def list_changed(self) -> dict[str, Any]:
        """The options that differ from their defaults, by name."""
        values = ((field, getattr(self, field.name)) for field in fields(self))
        return {field.name: value for field, value in values if value is not field.default}

    @property
    def is_isolated(self) -> bool:
        """Whether the steps are those of private training."""
        return self.guard is not None

    @property
    def divisor_mode(self) -> DivisorMode:
        """What is done with divisors that count; private training refuses them."""
        return "refuse" if self.is_isolated else self.divisor

    @property
    def bound(self) -> Bound | None:
        """How to clip, None without `keep="clip"`."""
        if self.max_norm is None:
            return None
        return Bound(self.max_norm, self.stabiliser, self.passes, self.memory, self.keep_rows)

    @property
    def unit_options(self) -> UnitOptions | None:
        """How samples are combined to units, None without units."""
        if self.units is None:
            return None
        return UnitOptions(self.units, self.num_units, self.unit_reduction)

    def select(self, trainable: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """The parameters to record, by name, among the trainable ones of a model."""
        if self.parameters is None:
            return trainable
        if callable(self.parameters):
            return {name: p for name, p in trainable.items() if self.parameters(name, p)}
        names = {self.parameters} if isinstance(self.parameters, str) else set(self.parameters)
        unknown = sorted(names - trainable.keys())
        if unknown:
            raise PerSampleError(f"parameters names '{unknown[0]}', which is not a trainable parameter of the model.")
        return {name: p for name, p in trainable.items() if name in names}


def get_trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that require gradients, by name."""
    return select_trainable(read_model(model)[1])


def select_trainable(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of some parameters that require gradients."""
    return {name: p for name, p in parameters.items() if p.requires_grad}
