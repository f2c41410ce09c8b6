"""What is measured in one step of a training run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from persample._internal.host import copy_to_host, read_numbers
from persample._internal.text import replace_nonfinite
from persample.errors import PerSampleError
from persample.gradients import PerSampleGradients, RecordedGradients, StreamedNorms
from persample.monitoring.noise_scale import NoiseScale, compute_parts

# Of the norms of a step.
QUANTILES = {"least": 0.0, "25%": 0.25, "median": 0.5, "75%": 0.75, "90%": 0.9, "99%": 0.99, "most": 1.0}

ExampleId = int | str


@dataclass(frozen=True)
class Measurement:
    """One step: gradients of single samples, and how they relate to the mean gradient.

    Attributes:
        step: the number of the step.
        samples: the number of samples in the batch.
        not_finite: how many of them have a gradient that is not finite. They are left out of all figures.
        norms: quantiles of the gradient norms.
        layers: for each part of the model the median and the largest norm, and its share of the squared norms.
        noise: estimate of tr(Σ), the variance of the gradients of single samples.
        signal: unbiased estimate of |G|², the squared norm of the true gradient. It may be negative.
        noise_scale: the running estimate of the noise scale.
        cosine_with_mean: the mean cosine between a sample's gradient and the mean gradient, weighted by the norms.
        cosine_between: the mean cosine between the gradients of two samples, weighted by the products of their norms.
        clipped: by bound, the share of samples that it would clip.
        hardest: the samples with the largest norms, as (id, norm); empty if the ids of the batch are not known.
        warnings: what is unusual.
        zero: how many samples have the gradient zero.
        silent: the names of the parameters in which no sample has a gradient.
        coupled: "contributions" if the figures are of contributions to the batch's gradient, not of gradients of the
            samples' own losses.
    """

    step: int
    samples: int
    not_finite: int
    norms: dict[str, float]
    layers: dict[str, dict[str, float]]
    noise: float | None
    signal: float | None
    noise_scale: NoiseScale | None
    cosine_with_mean: float | None
    cosine_between: float | None
    clipped: dict[str, float]
    hardest: list[tuple[ExampleId, float]]
    warnings: list[str]
    coupled: str | None = None
    zero: int = 0
    silent: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The measurement for JSON. NaN and infinity become None, also an infinite end of an interval."""
        answer: dict[str, Any] = replace_nonfinite(asdict(self))
        return answer

    def list_scalars(self) -> dict[str, float]:
        """The numbers for a logger, by name."""
        scale = self.noise_scale
        found = {
            "norm_median": self.norms["median"],
            "norm_90%": self.norms["90%"],
            "norm_max": self.norms["most"],
            "cosine_with_mean": self.cosine_with_mean,
            "cosine_between": self.cosine_between,
            "noise_scale": None if scale is None else scale.value,
            "noise_scale_low": None if scale is None else scale.low,
            **{f"clipped_at_{bound}": share for bound, share in self.clipped.items()},
            **{f"layer/{name}": part["median"] for name, part in self.layers.items()},
        }
        return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


def measure(
    grads: RecordedGradients,
    names: Sequence[str],
    step: int,
    groups: Mapping[str, Sequence[str]],
    bounds: Iterable[float],
    ids: Sequence[ExampleId] | None,
    hardest: int,
) -> Measurement:
    """Measure a step from the recorded norms of some parameters. The running estimate and warnings are the caller's.

    Raises:
        PerSampleError: something else recorded the step, and not what is needed.
    """
    by_name = _read_squares(grads, names)
    total = torch.stack(list(by_name.values())).sum(0)  # not of the groups: they may overlap, or leave parameters out
    is_finite = total.isfinite()
    is_finite[grads.list_nonfinite()] = False  # private training has set them to zero
    count = int(is_finite.sum())
    norms = total.sqrt().masked_fill(~is_finite, torch.inf)
    finite = norms[is_finite]
    noise, signal, with_mean, between = None, None, None, None
    if isinstance(grads, (StreamedNorms, PerSampleGradients)) and len(names) == len(grads.names):  # else no such sum
        noise, signal, with_mean, between = _compare_with_mean(grads, total, count)
    order = norms.argsort(descending=True)[:hardest].tolist()
    return Measurement(
        step=step,
        samples=len(norms),
        not_finite=len(norms) - count,
        norms={name: _compute_quantile(finite, at) for name, at in QUANTILES.items()},
        layers={name: _describe_layer(part, by_name, total, is_finite) for name, part in groups.items()},
        noise=noise,
        signal=signal,
        noise_scale=None,
        cosine_with_mean=with_mean,
        cosine_between=between,
        clipped={f"{bound:g}": float((finite > bound).double().mean()) if count else 0.0 for bound in bounds},
        hardest=[] if ids is None else [(ids[n], float(norms[n])) for n in order],
        warnings=[],
        coupled=grads.coupled,
        zero=int((total == 0).sum()),
        silent=[name for name, part in by_name.items() if not part.any()],
    )


def _read_squares(grads: RecordedGradients, names: Sequence[str]) -> dict[str, Tensor]:
    """The squared norms of some parameters' parts of the rows, on the host."""
    if not isinstance(grads, RecordedGradients) or not {*names} <= {*grads.names}:
        raise PerSampleError(
            "The step was recorded by something else (persample.watch, or private training), with several losses or "
            "without some of the monitored parameters. Pass the parameters that are recorded: monitor(parameters=...)."
        )
    by_parameter = grads.norms(per_parameter=True)
    squares = copy_to_host(torch.stack([by_parameter[name].double().square() for name in names]))
    return dict(zip(names, squares.unbind(), strict=True))


def _compare_with_mean(
    grads: StreamedNorms | PerSampleGradients, squares: Tensor, finite: int
) -> tuple[float | None, ...]:
    """tr(Σ), |G|², and the mean cosines with the mean gradient and between samples; None if they cannot be computed."""
    size = len(squares)
    if size < 2 or finite < size:  # the sum contains the rows that are not finite
        return None, None, None, None
    of_sum = grads.norm_of_sum() if isinstance(grads, StreamedNorms) else measure_direction(grads.sum(own=True))
    of_mean = read_numbers(of_sum)[0] ** 2 / size**2
    mean_square, mean_norm = float(squares.mean()), float(squares.sqrt().mean())
    noise, signal = compute_parts(mean_square, of_mean, size)
    if mean_norm == 0:
        return noise, signal, None, None
    # The sum over n of |g_n| cos(g_n, mean) is |sum| |mean| / |mean|; the sum over pairs n, k of g_n · g_k is |sum|².
    pairs = (size * mean_norm) ** 2 - size * mean_square
    between = (size**2 * of_mean - size * mean_square) / pairs if pairs > 0 else None
    return noise, signal, math.sqrt(of_mean) / mean_norm, between


def measure_direction(direction: Mapping[str, Tensor]) -> Tensor:
    """The norm of a direction `{name: shape}`."""
    return torch.stack([part.norm(dtype=torch.float64) for part in direction.values()]).norm()


def _describe_layer(
    part: Sequence[str], by_name: Mapping[str, Tensor], total: Tensor, is_finite: Tensor
) -> dict[str, float]:
    squares = sum((by_name[name] for name in part if name in by_name), torch.zeros_like(total))  # others are frozen
    squares = squares[is_finite]
    norms = squares.sqrt()
    whole = float(total[is_finite].sum())
    share = float(squares.sum()) / whole if whole else 0.0
    return {"median": _compute_quantile(norms, 0.5), "most": _compute_quantile(norms, 1.0), "share": share}


def _compute_quantile(values: Tensor, at: float) -> float:
    return float(values.quantile(at)) if len(values) else math.nan
