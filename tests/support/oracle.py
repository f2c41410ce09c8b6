"""The one oracle: a loop over samples with plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils import _pytree as pytree

Grads = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A module and a batch for it.

    `dims[i]` is the dim of the i-th tensor argument (keyword arguments last) that holds the samples, None where the
    tensor is the same for all; `out_dim` is where they lie in every output. `options` go to call_for_per_sample_grads.
    """

    name: str
    module: Callable[[], nn.Module]
    inputs: Callable[[], Sequence[Any]]
    kwargs: Callable[[], dict[str, Any]] = dict
    dims: Sequence[int | None] | None = None
    out_dim: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    double: bool = True

    def build(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The module and its arguments, always the same, with nothing left at a value that hides a mistake."""
        torch.manual_seed(0)
        module = self.module()
        args, kwargs = tuple(self.inputs()), self.kwargs()
        if self.double:
            module = module.double()
            args, kwargs = pytree.tree_map(_to_double, (args, kwargs))
        disturb(module)
        return module, args, kwargs

    def sample(self, n: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments for sample n alone, as a batch of one."""
        if args and is_dataclass(args[0]):
            fields = {key: value[n : n + 1] for key, value in vars(args[0]).items()}
            return (type(args[0])(**fields), *args[1:]), kwargs
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        dims = self.dims if self.dims is not None else [0] * len(tensors)
        assert len(dims) == len(tensors)
        for i, dim in zip(tensors, dims, strict=True):
            if dim is not None:
                leaves[i] = leaves[i].narrow(dim, n, 1)
        return pytree.tree_unflatten(leaves, spec)

    def __str__(self) -> str:
        return self.name


def _to_double(value: Any) -> Any:
    if is_dataclass(value):
        return type(value)(**{key: _to_double(part) for key, part in vars(value).items()})  # type: ignore[operator]
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return value


def disturb(module: nn.Module) -> None:
    """Moves every parameter and statistic off the value it starts at: a zero or a one may hide a lost factor."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]:
            noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 0.4 + 0.05
            tensor += noise.to(tensor.dtype)


def loss_of(outputs: Any, out_dim: int) -> Tensor:
    """A loss whose gradient differs everywhere: fixed weights over each sample's entries, and a quadratic term."""
    total: Any = 0
    for output in tensors_within(outputs):
        if not (output.is_floating_point() or output.is_complex()):
            continue
        shape = list(output.shape)
        if output.dim() > out_dim:
            shape[out_dim] = 1
        weights = torch.arange(1, 1 + max(1, torch.Size(shape).numel())).sin().view(shape)
        weights = weights.to(output.real.dtype)
        total = total + (output * weights).real.sum() + 0.5 * (output * output.conj()).real.sum()
    return total  # type: ignore[no-any-return]


def tensors_within(value: Any) -> Iterable[Tensor]:
    if isinstance(value, PackedSequence):
        value = pad_packed_sequence(value, batch_first=True)[0]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def oracle(case: Case, module: nn.Module, args: Any, kwargs: Any, batch: int) -> Grads:
    """The gradient of each sample's own loss, sample after sample."""
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    rows = []
    for n in range(batch):
        own_args, own_kwargs = case.sample(n, args, kwargs)
        loss_of(module(*own_args, **own_kwargs), case.out_dim).backward()
        rows.append([p.grad for p in parameters.values()])
        module.zero_grad()
    grads = {}
    for name, parts in zip(parameters, zip(*rows, strict=True), strict=True):
        if any(part is not None for part in parts):
            zeros = torch.zeros_like(parameters[name])
            grads[name] = torch.stack([zeros if part is None else part for part in parts])
    return grads


def assert_rows_close(actual: Grads, expected: Grads, tolerance: float = 1e-9) -> None:
    """Equal for each parameter and sample, relative to the scale of the row."""
    assert actual.keys() == expected.keys(), (actual.keys(), expected.keys())
    for name, want in expected.items():
        got = actual[name]
        assert got.shape == want.shape, f"{name}: {tuple(got.shape)} instead of {tuple(want.shape)}"
        assert got.dtype == want.dtype, f"{name}: {got.dtype} instead of {want.dtype}"
        difference, scale = (t.abs().reshape(len(want), -1).amax(1) for t in (got - want, want))
        error = (difference / scale.clamp(min=1e-3)).max()
        assert error < tolerance, f"{name}: off by {float(error):.2e} of its row's scale"
