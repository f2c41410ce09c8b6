"""What no function mode sees: right, or refused with the cause, in every pass."""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.masked import masked_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import persample
from persample import PerSampleError, SamplesMixed, _torch, call_for_per_sample_grads, watch
from persample.forward.audit import Audit
from persample.forward.program import get_program
from persample.testing import loop_gradients
from tests.support.cases import B, Calls, D, param

Forward = Callable[[Any, Tensor, Tensor], Any]

record = partial(persample.record, verify=False)  # a verification would find some cases too, and runs more passes


@pytest.fixture(autouse=True)
def _leave_no_mode() -> Iterator[None]:
    yield
    assert len(_torch.get_dispatch_modes()) == 0


def make_model(forward: Forward) -> nn.Module:
    """`forward(model, h, x)` with h = a(x), a buffer c of one row, a parameter q and a frozen parameter p."""
    torch.manual_seed(0)

    def call(m: Any, x: Tensor) -> Any:
        return forward(m, m.a(x), x)

    model = Calls(call, a=nn.Linear(D, D), q=param(D), p=nn.Parameter(torch.rand(D), requires_grad=False))
    model.register_buffer("c", torch.rand(D))
    return model.double()


def make_input(seed: int = 1) -> Tensor:
    return torch.randn(B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ---- samples that meet ----


def centre(x: Tensor) -> Tensor:
    return x - x.mean(0)


def spread(x: Tensor) -> Tensor:
    return x.mean(0).square().sum()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    scripted_centre = torch.jit.script(centre)
    traced_centre = torch.jit.trace(centre, torch.randn(B, D, dtype=torch.float64))

    class _Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(1.7 * x)

    scripted_gate = torch.jit.script(_Gate())

    @torch.jit.script
    def fork_mean(x: Tensor) -> Tensor:
        future: torch.jit.Future[Tensor] = torch.jit.fork(torch.mean, x)
        return torch.jit.wait(future)

    @torch.jit.script
    def scripted_attention(q: Tensor, k: Tensor) -> Tensor:
        weights = torch.softmax(torch.matmul(q.unsqueeze(2), k.unsqueeze(1)), -1)
        return torch.layer_norm(torch.matmul(weights, k.unsqueeze(2)).squeeze(2), [q.shape[1]])

    @torch.jit.script
    def scripted_linear(x: Tensor, weight: Tensor) -> Tensor:
        return torch.matmul(x, weight.t())

    class _Centre(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(D, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            self.last.copy_(x.mean(0))
            return x - self.last

    scripted_module = torch.jit.script(_Centre())


def statistic(h: Tensor) -> Tensor:
    return h.detach().mean(0)


def then(write: Forward) -> Forward:
    """Write into the buffer, then use it."""

    def forward(m: Any, h: Tensor, x: Tensor) -> Tensor:
        write(m, h, x)
        return h - m.c

    return forward


def add_to_data(m: Any, h: Tensor, x: Tensor) -> None:
    data = m.c.data
    data += statistic(h)


def set_items_of_data(m: Any, h: Tensor, x: Tensor) -> None:
    m.c.data[:] = statistic(h)


def set_item_of_data(m: Any, h: Tensor, x: Tensor) -> None:
    m.c.data[0] = h.detach().mean()


def replace_data(m: Any, h: Tensor, x: Tensor) -> None:
    m.c.data = statistic(h)


def write_by_numpy(m: Any, h: Tensor, x: Tensor) -> None:
    m.c.numpy()[:] = statistic(h).numpy()


def write_by_numpy_array(m: Any, h: Tensor, x: Tensor) -> None:
    np.asarray(m.c)[:] = np.asarray(x).mean(0)


def write_by_dlpack(m: Any, h: Tensor, x: Tensor) -> None:
    torch.from_dlpack(m.c).copy_(statistic(h))


def write_by_set(m: Any, h: Tensor, x: Tensor) -> None:
    torch.empty(0, dtype=x.dtype).set_(m.c).add_(statistic(h))


def write_by_storage(m: Any, h: Tensor, x: Tensor) -> None:
    torch.empty(0, dtype=x.dtype).set_(m.c.untyped_storage()).copy_(statistic(h))


def write_in_thread(m: Any, h: Tensor, x: Tensor) -> None:
    run_in_thread(lambda: m.c.copy_(x.mean(0)))


def run_in_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def run_in_pool(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def collect_in_between(made: Tensor) -> Tensor:
    gc.collect(1)
    return made


def overwrite_samples(m: Any, h: Tensor, x: Tensor) -> Tensor:
    z = 2 * x
    z.data.copy_(z.data.mean(0).expand(B, D))
    return h * z


def overwrite_behind_a_view(m: Any, h: Tensor, x: Tensor) -> Tensor:
    z = 2 * x
    first = z[:, :2]
    z.copy_(x.flip(0))
    return h[:, :2] * first


def initialise_by_data(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.q.data = -statistic(h)
    return h + m.q


def initialise(m: Any, h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.q.copy_(-h.mean(0))
    return h + m.q


def initialise_frozen(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.p.data.copy_(-statistic(h))
    return h + m.p


def differentiate(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    z = x.clone().requires_grad_()
    return torch.autograd.grad(function(z), z)[0]


def use_forward_ad(m: Any, h: Tensor, x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        tangent = torch.autograd.forward_ad.unpack_dual(centre(dual)).tangent
    return h if tangent is None else h * tangent


class Wrapper(Tensor):
    """A class of tensors that handles aten ops itself."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Any = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Wrapper, lambda wrapper: wrapper.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, func(*args, **kwargs))


def centre_without_function_modes(x: Tensor) -> Tensor:
    with _torch.DisableTorchFunction():
        return centre(x)


def centre_without_modes(x: Tensor) -> Tensor:
    with _torch.DisableTorchFunction(), _torch.disable_dispatch_modes():
        return centre(x)


def centre_in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        made = scripted_centre(x)
    return made.clone()


def write_by_pointer(m: Any, h: Tensor, x: Tensor) -> None:
    value = x.mean(0)
    ctypes.memmove(m.c.data_ptr(), value.data_ptr(), value.nbytes)


def copy_storage(m: Any, h: Tensor, x: Tensor) -> None:
    m.c.untyped_storage().copy_(x.mean(0).untyped_storage())


def rebuild(x: Tensor) -> Tensor:
    return pickle.loads(pickle.dumps(x))


def mask(x: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return masked_tensor(x, x > -9)


MIXING: dict[str, Forward] = {
    ".data.copy_": then(lambda m, h, x: m.c.data.copy_(statistic(h))),
    ".data.mul_": then(lambda m, h, x: m.c.data.mul_(statistic(h))),
    ".data.lerp_": then(lambda m, h, x: m.c.data.lerp_(statistic(h), 0.1)),
    ".data +=": then(add_to_data),
    ".data[:] =": then(set_items_of_data),
    ".data[0] =": then(set_item_of_data),
    ".data =": then(replace_data),
    ".detach().add_": then(lambda m, h, x: m.c.detach().add_(statistic(h))),
    ".detach()[1:].add_": then(lambda m, h, x: m.c.detach()[1:].add_(statistic(h)[1:])),
    ".data.view.copy_": then(lambda m, h, x: m.c.data.view(1, D).copy_(statistic(h)[None])),
    "out=": then(lambda m, h, x: torch.mean(x, 0, out=m.c.data)),
    "foreach": then(lambda m, h, x: torch._foreach_add_([m.c.data], [statistic(h)])),
    "numpy": then(write_by_numpy),
    "numpy, asarray": then(write_by_numpy_array),
    "dlpack of a buffer": then(write_by_dlpack),
    "set_ to a buffer": then(write_by_set),
    "the storage of a buffer": then(write_by_storage),
    "set_ of a buffer": then(lambda m, h, x: m.c.set_(x.mean(0))),
    "load_state_dict": then(lambda m, h, x: m.load_state_dict({"c": x.mean(0)}, strict=False)),
    "a pointer to a buffer": then(write_by_pointer),
    "a copy of storages": then(copy_storage),
    "a thread writes": then(write_in_thread),
    "over samples": overwrite_samples,
    "under a view": overwrite_behind_a_view,
    "a parameter": initialise,
    "a parameter, .data": initialise_by_data,
    "a frozen parameter": initialise_frozen,
    "vmap": lambda m, h, x: h * torch.vmap(lambda c: c - c.mean(), 1, 1)(x),
    "vmap of samples with a gradient": lambda m, h, x: torch.vmap(lambda c: c - c.mean(), 1, 1)(h),
    "vmap over pairs": lambda m, h, x: h * torch.vmap(lambda c: (c * x).sum())(x)[:, None],
    "vmap in chunks": lambda m, h, x: h * torch.vmap(lambda c: c - c.mean(), 1, 1, chunk_size=2)(x),
    "vmap, indexed": lambda m, h, x: h * torch.vmap(lambda i: x[(i[None] + 1) % len(x)][0])(torch.arange(len(x))),
    "vmap of a layer": lambda m, h, x: torch.vmap(m.a)(x),
    "no function mode": lambda m, h, x: h * centre_without_function_modes(x),
    "no mode": lambda m, h, x: h * centre_without_modes(x),
    "inference mode": lambda m, h, x: h * centre_in_inference_mode(x),
    "func.grad": lambda m, h, x: h * torch.func.grad(spread)(x),
    "func.vjp": lambda m, h, x: h * torch.func.vjp(centre, x)[0],
    "func.vjp, pulled back": lambda m, h, x: h * torch.func.vjp(centre, x)[1](x)[0],
    "func.jvp": lambda m, h, x: h * torch.func.jvp(centre, (x,), (x,))[1],
    "func.jacrev": lambda m, h, x: h * torch.func.jacrev(spread)(x),
    "func.jacfwd": lambda m, h, x: h * torch.func.jacfwd(spread)(x),
    "func.hessian": lambda m, h, x: h * torch.func.hessian(lambda z: spread(z) ** 2)(x).sum((2, 3)),
    "func.linearize": lambda m, h, x: h * torch.func.vjp(centre, h.detach())[0],
    "func.functionalize": lambda m, h, x: h * torch.func.functionalize(centre)(x),
    "func.grad in vmap": lambda m, h, x: h * torch.vmap(torch.func.grad(lambda z: (z.sum() * x).sum()))(x),
    "autograd.grad": lambda m, h, x: h * differentiate(x, spread),
    "autograd.functional": lambda m, h, x: h * torch.autograd.functional.jacobian(spread, x),
    "forward-mode AD": use_forward_ad,
    "scripted": lambda m, h, x: h * scripted_centre(x),
    "scripted, with a gradient": lambda m, h, x: scripted_centre(h),
    "traced": lambda m, h, x: h * traced_centre(x),
    "traced, with a gradient": lambda m, h, x: traced_centre(h),
    "forked": lambda m, h, x: h - fork_mean(x),
    "scripted, with weights": lambda m, h, x: scripted_linear(x, m.a.weight),
    "a wrapper": lambda m, h, x: h - Wrapper(x).mean(0).inner,
    "a scripted module": lambda m, h, x: h * scripted_module(x),
    "a thread": lambda m, h, x: h * run_in_thread(lambda: x.mean(0)),
    "a pool": lambda m, h, x: h * run_in_pool(lambda: x.mean(0)),
    "a thread, and a collection": lambda m, h, x: h * collect_in_between(run_in_thread(lambda: x.mean(0))),
    "nn.Parameter": lambda m, h, x: h * nn.Parameter(x.mean(0)),
    "nn.Parameter, frozen": lambda m, h, x: h * nn.Parameter(x.mean(0), requires_grad=False),
    "copy": lambda m, h, x: h - copy.copy(x).mean(0),
    "copy of a statistic": lambda m, h, x: h - copy.copy(x.mean(0)),
    "deepcopy": lambda m, h, x: h - copy.deepcopy(x).mean(0),
    "pickle": lambda m, h, x: h - rebuild(x).mean(0),
    "from_dlpack": lambda m, h, x: h - torch.from_dlpack(x).mean(0),
    "from_dlpack of a part": lambda m, h, x: h - torch.from_dlpack(x[1:]).mean(0),
    "a capsule of DLPack": lambda m, h, x: h - torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)).mean(0),
    "from_numpy": lambda m, h, x: h - torch.from_numpy(x.numpy()).mean(0),
    "frombuffer": lambda m, h, x: h - torch.frombuffer(x.numpy(), dtype=x.dtype).view(B, D).mean(0),
    "masked": lambda m, h, x: h - mask(x).mean(0).get_data(),
    "a subclass": lambda m, h, x: h - x.as_subclass(nn.Parameter).mean(0),
    "torch.Tensor": lambda m, h, x: h - torch.DoubleTensor(x).mean(0),
    "new_tensor": lambda m, h, x: h - x.new_tensor(x.mean(0)),
    "full_like": lambda m, h, x: h - torch.full_like(x, x[0, 0]),
    "set_": lambda m, h, x: h - torch.empty(0, dtype=x.dtype).set_(x).mean(0),
    "set_ of a storage": lambda m, h, x: h - x.new_empty(0).set_(x.untyped_storage()).view(B, D).mean(0),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("name", MIXING)
def test_samples_that_meet_unseen_are_refused_in_every_pass(name: str) -> None:
    model = make_model(MIXING[name])
    for seed in range(3):
        with pytest.raises(SamplesMixed, match=r"in (Calls|module 'a')"), record(model, loss_reduction="sum"):
            model(make_input(seed)).square().sum().backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", [".data.copy_", "vmap", "scripted", "copy", "a parameter, .data"])
def test_other_front_ends_refuse_too(name: str) -> None:
    model = make_model(MIXING[name])
    with pytest.raises(SamplesMixed, match="Calls"):
        call_for_per_sample_grads(model)(make_input()).square().sum().backward()
    model = make_model(MIXING[name])
    with watch(model, lambda grads: None, {}), pytest.raises(SamplesMixed, match="Calls"):
        model(make_input()).square().sum().backward()


@pytest.mark.parametrize("name", [".data.copy_", "vmap", "copy", "a parameter, .data"])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_samples_that_meet_in_a_later_pass(name: str, first: int) -> None:
    """As in a layer that initialises itself, or updates its statistics, in some steps only."""
    calls = 0

    def forward(m: Any, h: Tensor, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return MIXING[name](m, h, x) if calls > first else h.sin()

    model = make_model(forward)
    for _ in range(first):
        with record(model, loss_reduction="sum"):
            model(make_input()).square().sum().backward()
    for _ in range(2):
        with pytest.raises(SamplesMixed, match="Calls"), record(model, loss_reduction="sum"):
            model(make_input()).square().sum().backward()


def test_samples_written_where_constants_were() -> None:
    """The torch functions of both passes are the same."""
    values: list[Tensor] = [torch.zeros(D, dtype=torch.float64)]

    def forward(m: Any, h: Tensor, x: Tensor) -> Tensor:
        values.append(h.detach().mean(0))
        m.c.data.copy_(values[0])
        return h - m.c

    model = make_model(forward)
    for _ in range(2):
        with record(model, loss_reduction="sum"):
            model(make_input()).square().sum().backward()
        del values[1:]
    values.clear()
    with pytest.raises(SamplesMixed, match="Calls"), record(model, loss_reduction="sum"):
        model(make_input()).square().sum().backward()


def test_act_norm_is_refused_until_it_is_initialised() -> None:
    class ActNorm(nn.Module):
        """Shift and scale, set from the first batch."""

        def __init__(self) -> None:
            super().__init__()
            self.shift, self.log_scale = nn.Parameter(torch.zeros(D)), nn.Parameter(torch.zeros(D))
            self.register_buffer("is_initialised", torch.tensor(False))

        def forward(self, x: Tensor) -> Tensor:
            if self.training and not self.is_initialised:
                with torch.no_grad():
                    self.log_scale.data = -x.std(0).log()
                    self.shift.data = -(x * self.log_scale.exp()).mean(0)
                    self.is_initialised.data = torch.tensor(True)
            return self.log_scale.exp() * x + self.shift

    model, x = nn.Sequential(nn.Linear(D, D), ActNorm(), nn.Linear(D, 2)).double(), make_input()
    fresh = copy.deepcopy(model)
    with pytest.raises(SamplesMixed, match=r"'1' \(ActNorm\)"), record(fresh, loss_reduction="sum"):
        fresh(x).square().sum().backward()
    model(x)
    check(model, x)


# ---- near relatives that keep the samples apart ----


def keep_statistics(m: Any, h: Tensor, x: Tensor) -> Tensor:
    y = h * m.c.clone()
    m.c.data.lerp_(statistic(h), 0.1)
    return y


def make_rows(m: Any, h: Tensor, x: Tensor) -> Tensor:
    rows = torch.zeros_like(x)
    rows.data.copy_(x.sin())
    return h * rows


def replace_rows(m: Any, h: Tensor, x: Tensor) -> Tensor:
    rows = torch.zeros(len(x), D, dtype=x.dtype)
    rows.data = x.cos()
    return h * rows


def read_a_view_after_a_write(m: Any, h: Tensor, x: Tensor) -> Tensor:
    rows = torch.zeros_like(x)
    part = rows[:, :2]
    rows.data.copy_(x)
    return h[:, :2] * part


def read_numpy(m: Any, h: Tensor, x: Tensor) -> Tensor:
    scale = float(np.asarray(m.c).sum())
    x.numpy()
    return h * scale * m.c


def write_constants_by_numpy(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.c.numpy()[:] = 2.0
    return h * m.c.clone()


SEPARATE: dict[str, Forward] = {
    "reads .data": lambda m, h, x: h * m.q.data * x.data * m.c.detach(),
    "a buffer updated by constants": lambda m, h, x: h * m.c.data.mul_(1.0) * m.c,
    "a buffer filled": lambda m, h, x: h * (m.c.data.fill_(0.3), m.c.clone())[1],
    "a buffer from weights": lambda m, h, x: h * (m.c.data.copy_(m.q.detach()), m.c.clone())[1],
    "statistics for later": keep_statistics,
    "rows, .data.copy_": make_rows,
    "rows, .data =": replace_rows,
    "a view of rows": read_a_view_after_a_write,
    "numpy is read": read_numpy,
    "numpy writes constants": write_constants_by_numpy,
    "vmap of constants": lambda m, h, x: h * torch.vmap(lambda c: 2 * c)(m.c),
    "vmap of a frozen weight": lambda m, h, x: h * torch.vmap(torch.sin)(m.p),
    "vmap over samples": lambda m, h, x: h * torch.vmap(lambda row: row - row.mean())(x),
    "vmap over samples with a gradient": lambda m, h, x: torch.vmap(lambda row: row.sin() - row.mean())(h),
    "vmap over features": lambda m, h, x: h * torch.vmap(torch.sin, 1, 1)(x),
    "vmap over samples and constants": lambda m, h, x: h * torch.vmap(torch.mul, (0, None))(x, m.c),
    "vmap, sorted": lambda m, h, x: h * torch.vmap(lambda row: row.sort().values.cumsum(0))(x),
    "vmap, gathered": lambda m, h, x: torch.vmap(lambda row, i: row.gather(0, i))(h, x.argsort(1)),
    "vmap, products": lambda m, h, x: h * torch.vmap(lambda row: torch.outer(row, row).softmax(1).logsumexp(0))(x),
    "vmap, indexed": lambda m, h, x: h * torch.vmap(lambda i: x[:, i[None]][:, 0], 0, 1)(torch.arange(D)),
    "vmap, indexed by samples": lambda m, h, x: h * torch.vmap(lambda row: row[row.argsort()])(x),
    "a jacobian of each sample": lambda m, h, x: (torch.vmap(torch.func.jacrev(torch.sin))(x) @ h[:, :, None])[..., 0],
    "a hessian of each sample": lambda m, h, x: h * torch.vmap(torch.func.hessian(lambda z: z.sin().prod()))(x).sum(1),
    "a gradient of each sample": lambda m, h, x: h * torch.vmap(torch.func.grad(lambda row: row.sin().prod()))(x),
    "a gradient of a sum": lambda m, h, x: h * torch.func.grad(lambda z: z.sin().sum())(x),
    "a jacobian of constants": lambda m, h, x: h @ torch.func.jacrev(torch.sin)(m.c),
    "jvp": lambda m, h, x: h * torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1],
    "jvp with a gradient": lambda m, h, x: torch.func.jvp(torch.sin, (h,), (torch.ones_like(h),))[1],
    "functionalize": lambda m, h, x: h * torch.func.functionalize(torch.sin)(x),
    "autograd.grad": lambda m, h, x: h * differentiate(x, lambda z: z.sin().square().sum()),
    "scripted": lambda m, h, x: h * scripted_gate(x),
    "scripted, with a gradient": lambda m, h, x: scripted_gate(h),
    "scripted attention": lambda m, h, x: scripted_attention(h, x),
    "a wrapper": lambda m, h, x: h * Wrapper(x).sin().inner,
    "scripted, of constants": lambda m, h, x: h * scripted_gate(m.c),
    "scripted, of weights": lambda m, h, x: h * scripted_gate(m.q),
    "a thread, constants": lambda m, h, x: h * len(run_in_thread(lambda: [1, 2])),
    "nn.Parameter": lambda m, h, x: h * nn.Parameter(x),
    "nn.Parameter of constants": lambda m, h, x: h * nn.Parameter(m.c, requires_grad=False),
    "copy": lambda m, h, x: h * copy.copy(x) * copy.copy(m.c),
    "deepcopy": lambda m, h, x: h * copy.deepcopy(x) * copy.deepcopy(m.c),
    "from_dlpack": lambda m, h, x: h * torch.from_dlpack(x) * torch.from_dlpack(m.c),
    "from_numpy": lambda m, h, x: h * torch.from_numpy(x.numpy()) * torch.from_numpy(np.ones(D)),
    "set_": lambda m, h, x: h * torch.empty(0, dtype=x.dtype).set_(x),
    "masked": lambda m, h, x: h * mask(x).sin().get_data(),
    "a constant in the closure": lambda m, h, x: h * CONSTANT,
    "made like samples": lambda m, h, x: h * x.new_ones(D) * x.new_tensor([0.5]) * x.new_full((D,), 2.0),
    "legacy constructors": lambda m, h, x: h * torch.DoubleTensor([1.5] * D) * x.new([0.5]),
}  # fmt: skip

CONSTANT = torch.rand(D, dtype=torch.float64)


def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
    """A loss that leaves the buffers as they are, so that the samples of a loop do not follow each other."""
    before = [buffer.clone() for buffer in model.buffers()]
    loss = model(x).square().sum()
    for buffer, value in zip(model.buffers(), before, strict=True):
        buffer.data.copy_(value)
    return loss


def check(model: nn.Module, x: Tensor) -> None:
    """Compare output and gradients of a recording with a plain pass and the loop, twice."""
    for _ in range(2):
        plain = copy.deepcopy(model)
        expected = loop_gradients(model, x, compute_loss)
        with record(model, loss_reduction="sum") as grads:
            y = model(x)
            y.square().sum().backward()
        assert torch.equal(y, plain(x))
        for name, dense in grads.dense().items():
            torch.testing.assert_close(dense, expected.get(name, torch.zeros_like(dense)))


@pytest.mark.parametrize("name", SEPARATE)
def test_separate_samples_are_right(name: str) -> None:
    check(make_model(SEPARATE[name]), make_input())


@pytest.mark.parametrize(
    "split",
    [
        lambda data: (data[0], data[1]),
        lambda data: (data[..., :4][0], data[..., 4:][0]),
        lambda data: (data[0, :, :-1], data[0, :, 1:]),  # the next tokens of a language model
    ],
)
def test_inputs_and_targets_may_be_parts_of_one_tensor(split: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    x, y = split(torch.randn(2, 3, 8))
    model = nn.Linear(x.shape[-1], y.shape[-1])
    for _ in range(2):
        with record(model) as grads:
            (model(x) - y).square().sum(1).mean().backward()
        expected = [torch.autograd.grad((model(x[n]) - y[n]).square().sum(), model.weight)[0] for n in range(3)]
        torch.testing.assert_close(grads.dense()["weight"], torch.stack(expected))


# ---- when the audit is on ----


def count_modes(forward: Forward) -> tuple[nn.Module, list[int]]:
    counts: list[int] = []

    def counting(m: Any, h: Tensor, x: Tensor) -> Any:
        counts.append(len(_torch.get_dispatch_modes()))
        return forward(m, h, x)

    return make_model(counting), counts


def run(model: nn.Module, loss: Callable[[Tensor], Tensor] = torch.sum, **options: Any) -> None:
    with record(model, loss_reduction="sum", **options):
        loss(model(make_input())).backward()


def make_rows_in_place(m: Any, h: Tensor, x: Tensor) -> Tensor:
    rows = torch.zeros(len(x), D, dtype=x.dtype)
    rows[:, :2] = x[:, :2]
    rows[:, 2:].copy_(x[:, 2:].sin())
    return h * rows


class Sine(torch.autograd.Function):
    """An autograd.Function of samples."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


ORDINARY: dict[str, Forward] = {
    "plain": lambda m, h, x: h.sin() * m.c * m.q,
    "rows written": make_rows_in_place,
    "checkpoint": lambda m, h, x: checkpoint(lambda z: m.a(z).sin(), h, use_reentrant=False),
    "reentrant checkpoint": lambda m, h, x: checkpoint(lambda z: m.a(z).sin(), h, use_reentrant=True),
    "autograd.Function": lambda m, h, x: Sine.apply(h),
    "statistics for later": keep_statistics,
    "numpy is read": read_numpy,
    "a mask": lambda m, h, x: h.masked_fill(x > 0, 0.0),
    "a state": lambda m, h, x: torch.stack([h.new_zeros(len(h), D), h], 1).sum(1),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_the_audit_is_off_after_the_first_pass(name: str) -> None:
    model, counts = count_modes(ORDINARY[name])
    for _ in range(3):
        run(model)
    assert counts == [1, 0, 0]
    assert get_program(model).audits_due == 0


def test_a_new_sequence_of_functions_is_audited_from_where_it_differs() -> None:
    found: list[int] = []
    functions = [torch.sin, torch.sin, torch.cos, torch.cos, torch.sin, torch.cos]

    def forward(m: Any, h: Tensor, x: Tensor) -> Tensor:
        found.append(len(_torch.get_dispatch_modes()))
        h = functions[(len(found) - 1) // 2](h)
        found.append(len(_torch.get_dispatch_modes()))
        return h

    model = make_model(forward)
    for _ in functions:
        run(model)
    assert found == [1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0]


def test_another_loss_is_audited() -> None:
    """A loss that is computed by a scripted function of the outputs."""
    model = make_model(lambda m, h, x: h)
    run(model)
    with pytest.raises(SamplesMixed, match="mean"):
        run(model, loss=lambda y: (y * scripted_centre(y.detach())).sum())
    with pytest.raises(SamplesMixed, match="mean"):
        run(model, loss=lambda y: (y * scripted_centre(y.detach())).sum())


def test_what_unseen_code_made_is_followed_in_every_pass() -> None:
    model, counts = count_modes(lambda m, h, x: scripted_gate(h))
    for _ in range(3):
        run(model)
    assert counts == [1, 1, 1]


def test_the_audit_ends_with_the_forward_pass() -> None:
    counts: list[int] = []
    model = make_model(lambda m, h, x: h)
    with record(model, loss_reduction="sum"):
        y = model(make_input())
        y.register_hook(lambda grad: counts.append(len(_torch.get_dispatch_modes())))
        assert len(_torch.get_dispatch_modes()) == 1  # the code of the loss belongs to the pass
        y.sum().backward()
    assert counts == [0]


@pytest.mark.parametrize("error", [ValueError, PerSampleError])
def test_modes_are_restored_after_errors(error: type[Exception]) -> None:
    def fail(m: Any, h: Tensor, x: Tensor) -> Tensor:
        raise error("failed")

    with pytest.raises(error, match="failed"):
        run(make_model(fail))
    with pytest.raises(error, match="failed"):
        call_for_per_sample_grads(make_model(fail))(make_input())
    with watch(model := make_model(fail), lambda grads: None, {}), pytest.raises(error, match="failed"):
        model(make_input())


class Count(TorchDispatchMode):
    """Counts aten ops."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_of_the_user_end_in_order() -> None:
    """A watched step does not end inside the block in which it began."""
    found: list[Any] = []
    model = make_model(lambda m, h, x: h.sin())
    with watch(model, found.append, {"loss_reduction": "sum"}):
        with Count() as inner:
            y = model(make_input())
        assert inner.count > 2
        with Count():
            y.sum().backward()
    assert len(found) == 1
    with Count(), pytest.raises(SamplesMixed), Count() as inner:
        run(make_model(MIXING["vmap"]))
    assert inner.count > 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    for name in ("vmap", "scripted", ".data.copy_"):
        model = make_model(MIXING[name]).float()
        model.a.float()
        with pytest.raises(SamplesMixed), torch.autocast("cpu", dtype), record(model, loss_reduction="sum"):
            model(make_input().float()).float().square().sum().backward()
    model, x = make_model(lambda m, h, x: scripted_gate(h).sin() * x).float(), make_input().float()
    with torch.autocast("cpu", dtype):
        expected = model(x)
        with record(model, loss_reduction="sum"):
            y = model(x)
            y.float().sum().backward()
    assert torch.equal(y, expected)


def test_a_recording_leaves_no_cycle() -> None:
    model = make_model(lambda m, h, x: h.sin())
    gc.collect()
    before = count_audits()  # an error of another test may keep one
    gc.disable()
    try:
        with record(model, loss_reduction="sum") as grads:
            model(make_input()).sum().backward()
        after = count_audits()
        del grads
        assert after == before
    finally:
        gc.enable()


def count_audits() -> int:
    return sum(type(obj) is Audit for obj in gc.get_objects())


# ---- parts of constants that samples select ----


def make_table_model(forward: Forward, kind: str) -> nn.Module:
    model = make_model(forward)
    table = torch.rand(D, D, dtype=torch.float64)
    if kind == "buffer":
        model.register_buffer("table", table)
    else:
        model.table = nn.Parameter(table, requires_grad=kind == "parameter")
    return model


def select_rows(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return torch.stack([h[n] * m.table[x[n].argmax()] for n in range(len(h))])


SELECTING: dict[str, Forward] = {
    "rows": select_rows,
    "rows, then all": lambda m, h, x: select_rows(m, h, x) @ m.table,
    "rows of a part": lambda m, h, x: torch.stack([h[n] * m.table[1:][x[n, 1:].argmax()] for n in range(len(h))]),
}


@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("kind", ["buffer", "frozen parameter", "parameter"])
@pytest.mark.parametrize("name", SELECTING)
def test_samples_select_rows_of_a_constant(name: str, kind: str, batch: int) -> None:
    model = make_table_model(SELECTING[name], kind)
    x = make_input()[:batch]
    expected = loop_gradients(model, x, lambda m, x: m(x).square().sum())
    for _ in range(3):
        with persample.record(model, loss_reduction="sum") as grads:
            model(x).square().sum().backward()
        actual = grads.dense(expected)
        for key, rows in expected.items():
            torch.testing.assert_close(actual[key], rows)


def write_a_row(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.table[x[0].argmax()].copy_(h[0].detach())
    return h * m.table.sum(0)


def test_samples_written_to_a_selected_row_are_found() -> None:
    model = make_table_model(write_a_row, "buffer")
    for _ in range(3):
        with pytest.raises(SamplesMixed), record(model, loss_reduction="sum"):
            model(make_input()).square().sum().backward()
