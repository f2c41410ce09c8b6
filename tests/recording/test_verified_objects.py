"""The extra passes of a verification leave the caller's objects, containers and generators as the user's code does."""

from __future__ import annotations

import copy
import random
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import SamplesMixed, record
from persample._internal.copies import CannotCopy, copy_values
from persample.testing import loop_gradients
from persample.testing.oracle import assert_rows_close

B, D = 5, 4


@dataclass
class Seen:
    values: list[Any] = field(default_factory=list)
    count: int = 0


@dataclass(frozen=True)
class Frozen:
    values: list[Any] = field(default_factory=list)


class Slots:
    __slots__ = ("count", "last")

    def __init__(self) -> None:
        self.count = 0


class Cache:
    """As a cache of keys and values: rows of all samples, with a graph."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor) -> Tensor:
        self.layers.append((keys, keys * 2))
        return torch.stack([k for k, _ in self.layers]).sum(0)


def make_array() -> np.ndarray[Any, Any]:
    return np.zeros(2)


def increment(array: Any) -> float:
    array += 1
    return float(array[0])


def count_with(seen: Any) -> float:
    seen.count += 1
    return float(seen.count)


def call_closure() -> Callable[[], int]:
    seen: list[int] = []

    def append() -> int:
        seen.append(1)
        return len(seen)

    return append


def add(values: Any, method: str, number: Callable[[Any], Any] = len) -> float:
    getattr(values, method)(number(values))
    return float(len(values))


def make_file() -> Any:
    return open(__file__)


# How an object is made, and a number that a use of it returns, which changes it.
OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "list": (list, lambda o: add(o, "append")),
    "set": (set, lambda o: add(o, "add")),
    "deque": (lambda: deque(maxlen=9), lambda o: add(o, "append")),
    "dict": (dict, lambda o: float(len(o.setdefault("a", [])) + (o["a"].append(1) or 1))),
    "dict of lists": (lambda: {"a": {"b": [[]]}}, lambda o: add(o["a"]["b"][0], "append")),
    "OrderedDict": (OrderedDict, lambda o: float(o.update({len(o): 1}) or len(o))),
    "defaultdict": (lambda: defaultdict(list), lambda o: add(o["a"], "append")),
    "dataclass": (Seen, count_with),
    "frozen dataclass": (Frozen, lambda o: add(o.values, "append")),
    "SimpleNamespace": (lambda: SimpleNamespace(count=0), count_with),
    "slots": (Slots, count_with),
    "array": (make_array, increment),
    "list of arrays": (lambda: [make_array()], lambda o: increment(o[0])),
    "random.Random": (lambda: random.Random(0), lambda o: o.random()),
    "np.random.Generator": (lambda: np.random.default_rng(0), lambda o: float(o.random())),
    "np.random.RandomState": (lambda: np.random.RandomState(0), lambda o: float(o.rand())),
    "torch.Generator": (lambda: torch.Generator().manual_seed(0), lambda o: float(torch.rand((), generator=o))),
    "bound method": (lambda: [].append, lambda o: float(len(o.__self__)) + (o(1) or 1.0)),
    "closure": (call_closure, lambda o: float(o())),
    "list iterator": (lambda: iter([1.0, 2.0, 3.0, 4.0]), lambda o: next(o)),
    "tensor": (lambda: torch.zeros(()), lambda o: float(o.add_(1))),
}


def describe(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """Everything that is reachable from a value: types, contents, and which parts are one object."""
    seen = {} if seen is None else seen
    if value is None or isinstance(value, (bool, int, float, str, type)):
        return value
    if id(value) in seen:
        return ("again", seen[id(value)][0])
    seen[id(value)] = len(seen), value  # kept, so that no other object gets its id
    name = type(value).__name__
    if isinstance(value, Tensor):
        return name, value.tolist(), value._version, describe(vars(value), seen)
    if isinstance(value, torch.Generator):
        return name, value.get_state().tolist()
    if isinstance(value, np.ndarray):
        return name, [describe(part, seen) for part in value.tolist()]
    if isinstance(value, random.Random):
        return name, value.getstate()
    if isinstance(value, (np.random.Generator, np.random.RandomState)):
        generator = getattr(value, "bit_generator", value)
        return name, str(getattr(generator, "state", None) or value.get_state())  # type: ignore[union-attr]
    if isinstance(value, dict):
        return name, [(describe(k, seen), describe(v, seen)) for k, v in value.items()]
    if isinstance(value, (list, tuple, set, deque)):
        return name, [describe(part, seen) for part in value]
    if callable(value) and not isinstance(value, nn.Module):
        cells = getattr(value, "__closure__", None) or ()
        return name, [describe(c.cell_contents, seen) for c in cells], describe(getattr(value, "__self__", None), seen)
    if isinstance(value, Iterator):
        return name, value.__reduce__()[1:]
    slots = {s: getattr(value, s) for s in getattr(type(value), "__slots__", ()) if hasattr(value, s)}
    return name, describe(slots, seen), describe(getattr(value, "__dict__", None), seen)


class Uses(nn.Module):
    """Two calls of it use an object twice, and scale their result by what they find."""

    def __init__(self, use: Callable[[Any], float], dropout: float = 0.0, **attributes: Any) -> None:
        super().__init__()
        self.linear, self.use, self.drop = nn.Linear(D, D), use, nn.Dropout(dropout)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        number = self.use(self.given if given is None else given)
        return self.drop(self.linear(x)) * number


def run_twice(model: nn.Module, x: Tensor, *args: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    with record(model, **options) as grads:
        (model(x, *args) + model(x, *args)).square().sum().backward()
    return grads


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("name", OBJECTS)
def test_objects_among_the_arguments_are_left_as_they_are(name: str, dropout: float) -> None:
    make, use = OBJECTS[name]
    states, norms = [], []
    model, x = Uses(use, dropout), torch.randn(B, D)
    for verify in (False, None):
        run, given = copy.deepcopy(model), make()
        grads = run_twice(run, x, given, verify=verify, batch_size=B)
        states.append(describe([given, run]))
        norms.append(grads.norms())
    assert states[0] == states[1]
    torch.testing.assert_close(norms[0], norms[1])
    # With a tensor that changes in place, a second run of the batch cannot be compared.
    assert grads.verification == "verified with 2 samples" or name == "tensor", grads.verification


# What functions refer to is not restored, and iterators cannot be.
ATTRIBUTES = OBJECTS.keys() - {"bound method", "closure", "list iterator"}


@pytest.mark.parametrize("place", ["module", "submodule", "weight", "object", "slot", "array of objects"])
@pytest.mark.parametrize("name", sorted(ATTRIBUTES))
def test_attributes_of_modules_and_of_what_they_hold_are_restored(name: str, place: str) -> None:
    make, use = OBJECTS[name]
    get, put = PLACES[place]
    states, norms = [], []
    model, x = Uses(lambda holder: use(get(holder))), torch.randn(B, D)
    for verify in (False, None):
        run = copy.deepcopy(model)
        run.given = run  # type: ignore[assignment]
        put(run, make())
        grads = run_twice(run, x, verify=verify)
        states.append(describe(run))
        norms.append(grads.norms())
    assert states[0] == states[1]
    torch.testing.assert_close(norms[0], norms[1])


def put_slot(model: Any, value: Any) -> None:
    model.box = Slots()
    model.box.last = (value,)


def put_into_array(model: Any, value: Any) -> None:
    model.box = np.empty(1, dtype=object)
    model.box[0] = value


PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    "module": (lambda m: m.value, lambda m, o: setattr(m, "value", o)),
    "submodule": (lambda m: m.linear.value[0], lambda m, o: setattr(m.linear, "value", [o])),
    "weight": (lambda m: m.linear.weight.value, lambda m, o: setattr(m.linear.weight, "value", o)),
    "object": (lambda m: m.box["a"].value, lambda m, o: setattr(m, "box", {"a": SimpleNamespace(value=o)})),
    "slot": (lambda m: m.box.last[0], put_slot),
    "array of objects": (lambda m: m.box[0], put_into_array),
}


def test_attributes_that_a_pass_adds_are_those_of_the_pass() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.box = nn.Linear(D, D), Slots()

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            self.box.last = self.linear.weight.last = self.linear.last = h.detach()  # type: ignore[attr-defined]
            return h

    model = Adds()
    with record(model) as grads:
        h = model(torch.randn(B, D))
    assert grads.verification == "verified with 2 samples"
    for holder in (model.box, model.linear.weight, model.linear):
        assert torch.equal(holder.last, h)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize(
    "make", [make_file, lambda: make_generator(), threading.Lock], ids=["file", "generator", "lock"]
)
def test_a_model_with_a_handle_is_not_verified(make: Callable[[], Any]) -> None:
    model = Uses(lambda o: 1.0, given=0)
    model.box = [SimpleNamespace(a=make())]
    assert "not verified: the model holds an object of type" in repr(run_twice(model, torch.randn(B, D)))


def make_generator() -> Iterator[float]:
    yield from (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("make", "use", "cause"),
    [
        (make_generator, lambda o: next(o), "type generator cannot be copied"),
        (lambda: map(float, make_generator()), lambda o: next(o), "type generator cannot be copied"),
        (make_file, lambda o: float(len(o.readline())), "type _io.TextIOWrapper cannot be copied"),
        (lambda: SimpleNamespace(lock=threading.Lock()), lambda o: 1.0, "lock cannot be copied"),
    ],
    ids=["generator", "map of a generator", "file", "lock"],
)
def test_what_cannot_be_copied_is_not_touched_and_not_verified(make: Any, use: Any, cause: str) -> None:
    model, x, given, plain = Uses(use), torch.randn(B, D), make(), make()
    expected = model(x, plain) + model(x, plain)
    with record(model, batch_size=B) as grads:
        torch.testing.assert_close(model(x, given) + model(x, given), expected)
    assert grads.verification.startswith("not verified: among the arguments, an object of type")
    assert cause in grads.verification


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_cache_of_three_calls(dropout: float) -> None:
    """Prefix, extension and loss: each call adds rows, with a graph, to a cache that the caller holds."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.drop = nn.Linear(D, D), nn.Dropout(dropout)

        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            return cache.update(self.drop(self.linear(x)).tanh())

    model, x = Decoder().double(), torch.randn(3, B, D, dtype=torch.double)
    found, caches = [], []
    for verify in (False, None):
        torch.manual_seed(0)
        caches.append(Cache())
        run = copy.deepcopy(model)
        with record(run, batch_size=B, verify=verify) as grads:
            for part in x:
                output = run(part, caches[-1])
            output.square().sum().backward()
        found.append(grads.dense())
    assert [len(cache.layers) for cache in caches] == [3, 3]
    assert_rows_close(found[1], dict(found[0]), 1e-6)
    if not dropout:

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            cache = Cache()
            return [model(part, cache) for part in x.unbind(1)][-1].square().sum()

        assert_rows_close(found[1], loop_gradients(model, x.movedim(0, 1), loss), 1e-5)


def test_a_cache_of_transformers_in_three_calls() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=16, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    )
    model = transformers.GPT2LMHeadModel(config).double()
    ids = torch.randint(11, (B, 9))

    def compute_loss(model: nn.Module, ids: Tensor) -> Tensor:
        cache = transformers.DynamicCache()
        for part in (ids[:, :3], ids[:, 3:6], ids[:, 6:]):
            logits = model(part, past_key_values=cache, use_cache=True).logits
        assert cache.get_seq_length() == ids.shape[1]
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 7:].flatten(), reduction="sum")

    with record(model, batch_size=B) as grads:
        compute_loss(model, ids).backward()
    assert_rows_close(grads.dense(), loop_gradients(model, ids, compute_loss), 1e-9)


def test_one_copy_for_one_object_and_none_for_a_sentinel() -> None:
    values: list[Any] = [[1], {2}]
    values += [values[0], SENTINEL, F.relu, values]
    made = copy_values(values, torch.clone)
    assert made[0] is made[2] and made[0] is not values[0] and made[5] is made
    assert made[3] is SENTINEL and made[4] is F.relu
    with pytest.raises(CannotCopy, match="type generator"):
        copy_values([make_generator()], torch.clone)


class _Sentinel:
    pass


SENTINEL = _Sentinel()


# ---- random numbers ----


class Denoiser(nn.Module):
    """Draws noise for each entry and returns its loss."""

    def __init__(self, noise: Callable[[Tensor], Tensor], loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.noise, self.loss = nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, D)), noise, loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.body(x + self.noise(x)) - x)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("loss", [lambda d: d.square().mean(), lambda d: d.square().sum()], ids=["mean", "sum"])
@pytest.mark.parametrize(
    "noise",
    [torch.randn_like, lambda x: torch.rand(len(x), 1), lambda x: torch.randint(9, (len(x), 1)) / 9],
    ids=["randn_like", "rand", "randint"],
)
def test_a_scalar_loss_of_noise_is_no_false_alarm(noise: Any, loss: Any, seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Denoiser(noise, loss).double(), torch.randn(B, D, dtype=torch.double)
    state = torch.get_rng_state()
    drawn = noise(x)
    torch.set_rng_state(state)
    with record(model) as grads:
        model(x).backward()
    assert grads.verification == "not verified: the forward pass draws random numbers other than those of dropout"
    expected = loop_gradients(model, (x, drawn), lambda m, pair: m.loss(m.body(pair[0] + pair[1]) - pair[0]))
    assert_rows_close(grads.dense(), expected, 1e-10)


def test_a_scalar_loss_with_dropout_that_mixes_is_refused() -> None:
    model = Uses(lambda o: 1.0, 0.5)
    model.forward = lambda x: (model.drop(model.linear(x)) / x.numpy().std()).square().mean()  # type: ignore[method-assign]
    with pytest.raises(SamplesMixed, match="should be a sum"), record(model):
        model(torch.randn(B, D)).backward()


class MixesLater(nn.Module):
    """From the second step on, subtracts a mean that numpy computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.is_mixing = nn.Linear(D, D), nn.Dropout(0.5), False

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.linear(x))
        shift = torch.from_numpy(x.numpy().copy())
        return h - (shift.mean(0) if self.is_mixing == "torch" else 0) - (float(shift.numpy().mean()) * self.is_mixing)


def test_mixing_that_starts_in_a_later_step_of_a_model_with_dropout_is_refused() -> None:
    model, x = MixesLater(), torch.randn(B, D)
    run_twice(model, x)
    assert run_twice(model, x).verification == f"verified with {B} samples"
    model.is_mixing = True
    with pytest.raises(SamplesMixed):
        run_twice(model, x)


def test_a_later_step_that_cannot_be_verified_says_so() -> None:
    class Noisy(MixesLater):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (torch.randn_like(x) if self.is_noisy else 0)

    model, x = Noisy(), torch.randn(B, D)
    model.is_noisy = False
    run_twice(model, x)
    model.is_noisy = True
    cause = "not verified in this step: the forward pass draws random numbers other than those of dropout"
    assert cause in repr(run_twice(model, x))
