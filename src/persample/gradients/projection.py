"""Random projections of whole rows, with one sketch for each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from persample._internal import tracing
from persample.errors import PerSampleError
from persample.terms import KroneckerSketch, Sides, Sketch, SparseSketch, TensorSketch, Term, allocate

Method = Literal["tensor", "sparse", "kronecker"]
METHODS: tuple[Method, ...] = get_args(Method)
Shapes = tuple[tuple[str, torch.Size], ...]


class Projection:
    """Projects rows to `dim` numbers: the projection of each parameter is added to the slice of the parameter."""

    def __init__(
        self,
        dim: int,
        slices: Mapping[str, slice],
        sketches: Mapping[str, Sketch | KroneckerSketch],
        device: torch.device,
    ) -> None:
        self._dim, self._slices, self._sketches, self._device = dim, slices, sketches, device

    def project(self, terms: Mapping[str, Term], batch: int) -> Tensor:
        """`(batch, dim)`: the projection of the rows with these terms by parameter. Missing parameters are zero."""
        return self.assemble({name: self.project_term(name, term) for name, term in terms.items()}, batch)

    def project_term(self, name: str, term: Term) -> Tensor:
        """The projection of one parameter's part of the rows."""
        sketch = self._sketches[name]
        if isinstance(sketch, KroneckerSketch):
            return sketch.fold(term.multiply_sides(sketch.sides))
        return term.project(sketch)

    @property
    def sides(self) -> dict[str, Sides]:
        """The matrices for both sides of the gradients of each parameter, with the method "kronecker"."""
        return {name: part.sides for name, part in self._sketches.items() if isinstance(part, KroneckerSketch)}

    def replace_sides(self, sides: Mapping[str, Sides]) -> Projection:
        """The same projection with other matrices for both sides of some parameters."""
        sketches = dict(self._sketches)
        for name, own in sides.items():
            sketch = sketches[name]
            if not isinstance(sketch, KroneckerSketch):
                raise ValueError(f"The projection of {name!r} has no sides.")
            sketches[name] = sketch.replace_sides(own)
        return Projection(self._dim, self._slices, sketches, self._device)

    def assemble(self, parts: Mapping[str, Tensor], batch: int) -> Tensor:
        """`(batch, dim)`: the projection of the rows from what `project_term` returned for each parameter."""
        dtype = torch.float32
        for part in parts.values():
            dtype = torch.promote_types(dtype, part.dtype)
        total = torch.zeros(batch, self._dim, device=self._device, dtype=dtype)
        for name in self._sketches:  # in this order, in which the parts may not have been computed
            if name in parts:
                total[:, self._slices[name]] += parts[name]
        return total


def check_projection(method: str, dim: int, parameters: Mapping[str, Tensor]) -> None:
    """Refuse arguments of `project()`, and parameters that it is not defined for."""
    if method not in METHODS:
        raise PerSampleError(f"method must be one of {', '.join(map(repr, METHODS))}; got {method!r}.")
    if dim < 1:
        raise PerSampleError(f"dim must be a positive number, got {dim}.")
    for name, p in parameters.items():
        if p.is_complex():
            raise PerSampleError(f"'{name}' is complex, and project() is defined for real parameters only.")


def make_projection(method: Method, dim: int, seed: int, shapes: Shapes, device: torch.device) -> Projection:
    """The projection for parameters with these names and shapes. It is always the same for the same arguments."""
    if tracing.get_trace() is not None:  # the tensors that a compiled step makes are its own
        return _draw_projection(method, dim, seed, shapes, device)
    return _get_projection(method, dim, seed, shapes, device)


def _draw_projection(method: Method, dim: int, seed: int, shapes: Shapes, device: torch.device) -> Projection:
    used = {name: shape for name, shape in shapes if shape.numel()}
    slices = allocate(dim, used) if method == "kronecker" else dict.fromkeys(used, slice(0, dim))
    sketches: dict[str, Sketch | KroneckerSketch] = {}
    for name, shape in used.items():
        if method == "kronecker":
            size = slices[name].stop - slices[name].start
            sketches[name] = KroneckerSketch(size, seed, name, shape, device)
        elif method == "tensor":
            sketches[name] = TensorSketch(dim, seed, name, shape, device)
        else:
            sketches[name] = SparseSketch(dim, seed, name)
    return Projection(dim, slices, sketches, device)


_get_projection = lru_cache(maxsize=2)(_draw_projection)  # drawing takes longer than multiplying
