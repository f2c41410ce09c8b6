"""Later passes call the same functions as an audited one, but write samples into other memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import SamplesMixed, record
from persample.testing import assert_rows_close, loop_gradients

B, D = 4, 4

Write = Callable[[Any, Tensor, Tensor], Any]

# Ways to write a statistic of all samples into a tensor `t` of the model.
WRITES: dict[str, Write] = {
    ".copy_": lambda m, t, mean: t.copy_(mean),
    ".data.copy_": lambda m, t, mean: t.data.copy_(mean),
    ".data +=": lambda m, t, mean: t.data.__iadd__(mean),
    ".data[:] =": lambda m, t, mean: t.data.__setitem__(slice(None), mean),
    ".data.fill_": lambda m, t, mean: t.data.fill_(mean.sum()),
    ".data =": lambda m, t, mean: setattr(t, "data", mean),
    ".detach().add_": lambda m, t, mean: t.detach().add_(mean),
    ".detach()[1:].copy_": lambda m, t, mean: t.detach()[1:].copy_(mean[1:]),
    ".view().copy_": lambda m, t, mean: t.view(2, 2).copy_(mean.view(2, 2)),
    "[1:].mul_": lambda m, t, mean: t[1:].mul_(mean.sum()),
    "two views": lambda m, t, mean: [view.add_(other) for view in (t.view(-1),) for other in (mean, t.view(-1))],
    "a kept alias": lambda m, t, mean: m.aliases[m.into].copy_(mean),
    "a kept view": lambda m, t, mean: m.views[m.into].__setitem__(0, mean[0]),
    "set_": lambda m, t, mean: t.set_(mean),
    "set_ to it": lambda m, t, mean: mean.new_empty(0).set_(t.data).copy_(mean),
    "set_ to its storage": lambda m, t, mean: mean.new_empty(0).set_(t.untyped_storage()).copy_(mean),
    "foreach_add_": lambda m, t, mean: torch._foreach_add_([t.data], [mean]),
    "foreach_copy_": lambda m, t, mean: torch._foreach_copy_([t.data], [mean]),
    "foreach_mul_": lambda m, t, mean: torch._foreach_mul_([t.data], mean.sum()),
    "out=": lambda m, t, mean: torch.add(mean, 1, out=t.data),
    "a storage": lambda m, t, mean: t.untyped_storage().copy_(mean.untyped_storage()),
    "numpy": lambda m, t, mean: np.copyto(t.detach().numpy(), mean.numpy()),
    "a kept array": lambda m, t, mean: np.copyto(m.arrays[m.into], mean.numpy()),
    "dlpack": lambda m, t, mean: torch.from_dlpack(t.detach()).copy_(mean),
    "nn.init": lambda m, t, mean: nn.init.constant_(t.data, mean.sum()),
    "index_copy_": lambda m, t, mean: t.data.index_copy_(0, torch.tensor([0]), mean[:1]),
    "load_state_dict": lambda m, t, mean: m.load_state_dict({m.into: mean}, strict=False),
    "vector_to_parameters": lambda m, t, mean: nn.utils.vector_to_parameters(mean, [t]),
}

# Ways to keep a tensor in a model.
KINDS: dict[str, Callable[[nn.Module, str, Tensor], None]] = {
    "buffer": lambda m, name, t: m.register_buffer(name, t),
    "parameter": lambda m, name, t: setattr(m, name, nn.Parameter(t)),
    "frozen parameter": lambda m, name, t: setattr(m, name, nn.Parameter(t, requires_grad=False)),
    "attribute": lambda m, name, t: setattr(m, name, t),
}


class Writing(nn.Module):
    """Writes into one of two tensors, and reads one of them."""

    c: Tensor
    spare: Tensor

    def __init__(self, write: Write, kind: str) -> None:
        super().__init__()
        self.l, self.write = nn.Linear(D, D), write
        self.into, self.read = "spare", "c"
        for name in ("c", "spare"):
            KINDS[kind](self, name, torch.ones(D, dtype=torch.float64))
        names = ("c", "spare")
        self.arrays = {name: getattr(self, name).detach().numpy() for name in names}
        self.aliases = {name: getattr(self, name).detach() for name in names}
        self.views = {name: getattr(self, name).data[:] for name in names}
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        with torch.no_grad():
            self.write(self, getattr(self, self.into), h.detach().mean(0))
        return h - getattr(self, self.read)


def run(model: nn.Module, batch: int = B) -> None:
    with record(model, loss_reduction="sum"):
        model(torch.randn(batch, D, dtype=torch.float64)).square().sum().backward()


@pytest.mark.parametrize("change", [{"into": "c"}, {"read": "spare"}])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WRITES)
def test_samples_written_where_a_later_pass_reads(way: str, kind: str, change: dict[str, str]) -> None:
    if way == "load_state_dict" and kind == "attribute":
        pytest.skip("not in the state_dict")
    model = Writing(WRITES[way], kind)
    for _ in range(3):
        run(model)
    vars(model).update(change)
    for _ in range(2):
        with pytest.raises(SamplesMixed):
            run(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", sorted(WRITES.keys() - {"a kept array", "a kept alias", "a kept view"}))
def test_verification_leaves_what_a_plain_pass_writes(way: str, kind: str) -> None:
    model = Writing(WRITES[way], kind)
    plain, x = copy.deepcopy(model), torch.randn(B, D, dtype=torch.float64)
    memory = model.spare.untyped_storage().data_ptr()
    plain(x)
    with record(model, loss_reduction="sum") as grads:
        model(x).square().sum().backward()
    assert grads.verification.startswith("verified")
    assert torch.equal(model.spare, plain.spare)
    assert torch.equal(model.c, plain.c)
    assert way in ("set_", ".data =", "vector_to_parameters") or model.spare.untyped_storage().data_ptr() == memory


@pytest.mark.parametrize("sizes", [(4, 4, 8), (2, 8), (4, 8, 4)])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_samples_as_channels_that_meet_at_some_batch_sizes(dims: int, sizes: tuple[int, ...]) -> None:
    """At 4 samples, each group of channels has one."""
    convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            h = self.l(x)
            groups = min(4, len(x))
            weight = h.new_ones(len(x), len(x) // groups, *[3] * dims)
            return convolve(h.view(len(x), *[1] * (dims - 1), D), weight, groups=groups, padding=1).flatten(1)

    model = Model().double()
    for size in sizes:
        x = torch.randn(size, D, dtype=torch.float64)
        if size > 4:
            with pytest.raises(SamplesMixed):
                run(model, size)
        else:
            with record(model, loss_reduction="sum") as grads:
                model(x).square().sum().backward()
            assert_rows_close(grads.dense(), loop_gradients(model, x, lambda m, x: m(x).square().sum()))
