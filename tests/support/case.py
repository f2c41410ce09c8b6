"""A test case: a module and a batch for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from persample.testing.oracle import Gradients, compute_test_loss, perturb, stack_gradients


@dataclass(frozen=True)
class Case:
    """A module and a batch for it.

    `dims[i]` is the batch dimension of the i-th tensor argument (keyword arguments last), None if the tensor is the
    same for all samples. `out_dim` is the batch dimension of every output. `options` are the options of
    call_for_per_sample_grads.
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
        """Make the module and its arguments, always with the same values; see `perturb` for the parameters."""
        torch.manual_seed(0)
        module = self.module()
        args, kwargs = tuple(self.inputs()), self.kwargs()
        if self.double:
            module = module.double()
            args, kwargs = pytree.tree_map(_to_double, (args, kwargs))
        perturb(module)
        return module, args, kwargs

    def sample(self, n: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments for sample n, as a batch of one."""
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

    def loop_gradients(self, module: nn.Module, args: Any, kwargs: Any, batch: int) -> Gradients:
        """Per-sample gradients of `compute_test_loss`, by a loop over the samples with plain autograd."""

        def compute_sample_loss(n: int) -> Tensor:
            sample_args, sample_kwargs = self.sample(n, args, kwargs)
            return compute_test_loss(module(*sample_args, **sample_kwargs), self.out_dim)

        return stack_gradients(map(compute_sample_loss, range(batch)), dict(module.named_parameters()))

    def find_batch_size(self, args: tuple[Any, ...]) -> int:
        """The number of samples in the arguments."""
        batch_dim = 1 if self.options.get("batch_first") is False else 0
        return self.options.get("batch_size") or args[0].shape[batch_dim]  # type: ignore[no-any-return]

    @property
    def record_options(self) -> dict[str, Any]:
        """The options of record(), for a loss that is a sum over the samples."""
        options = dict(self.options)
        return {"batch_dim": 0 if options.pop("batch_first", True) else 1, "loss_reduction": "sum", **options}

    def __str__(self) -> str:
        return self.name


def loop_gradients(module: nn.Module, x: Tensor) -> Gradients:
    """Per-sample gradients of `compute_test_loss(module(x))`, by a loop over the samples with plain autograd."""
    return Case("", lambda: module, list).loop_gradients(module, (x,), {}, len(x))


def _to_double(value: Any) -> Any:
    if is_dataclass(value):
        return type(value)(**{key: _to_double(part) for key, part in vars(value).items()})  # type: ignore[operator]
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return value
