"""The table of rules: for a torch function, which terms its weights receive."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from persample import _torch
from persample.terms import Term

Terms = Mapping[str, "Term | Sequence[Term]"]
Accepts = Callable[[Tensor, int], bool]


class Owners(Protocol):
    """The sample that each entry of a result belongs to (`ids`, -1: none), out of `batch` samples."""

    @property
    def ids(self) -> Tensor: ...

    @property
    def batch(self) -> int: ...

    def group(self, owner: Tensor, *rows: Tensor) -> list[Tensor]:
        """Each `(N, ...)` as `(batch, n, ...)`: the rows of each sample, filled up with zeros; `owner` is `(N,)`."""


# torch function -> its Rule or Rewrite, or an `autograd.Function` that somebody gave to `implements_per_sample_grads`.
# An operator of another library stands there by its name, "library::operator", so that the library need not be there.
HANDLED_FUNCTIONS: dict[Callable[..., Any] | str, Any] = {}


# Further rules of torch functions, of which the first that holds for a call is taken; a bare ExpandedWeight has none of
# these, as torch's has none.
FURTHER_RULES: dict[Callable[..., Any] | str, list[Rule]] = {}

_RULES: dict[Callable[..., Any] | str, list[Rule]] = {}
_NONE: list[Rule] = []


def get_handler(func: Callable[..., Any]) -> Any:
    """What HANDLED_FUNCTIONS knows of a torch function, None if nothing."""
    return HANDLED_FUNCTIONS.get(_key(func))


def get_rules(func: Callable[..., Any]) -> list[Rule]:
    """The rules that a torch function has: the same list as long as none is added or replaced."""
    key = _key(func)
    first, rules = HANDLED_FUNCTIONS.get(key), FURTHER_RULES.get(key, _NONE)
    if isinstance(first, Rule):
        rules = [first, *rules]
    kept = _RULES.setdefault(key, rules)
    if kept != rules:  # the rules themselves are compared by identity
        kept = _RULES[key] = list(rules)
    return kept


def _key(func: Callable[..., Any]) -> Callable[..., Any] | str:
    if func in HANDLED_FUNCTIONS:
        return func
    return _torch.get_operator_name(func) or func


# Runs a use by a handler that is neither a Rule nor a Rewrite: `adapter(tracker, handler, op, weights)`.
Adapter = Callable[[Any, Any, Any, Mapping[int, Tensor]], Any]

_ADAPTERS: dict[type, Adapter] = {}


def register_adapter(kind: type, adapter: Adapter) -> None:
    """Have an adapter run the handlers of one type, for a front end with its own convention of rules."""
    _ADAPTERS[kind] = adapter


def find_adapter(handler: Any) -> Adapter | None:
    """The adapter that runs a handler, None if the handler is a Rule, a Rewrite or None."""
    return next((adapter for kind, adapter in _ADAPTERS.items() if isinstance(handler, kind)), None)


@dataclass(frozen=True)
class Rewrite:
    """`function` computes the same as a torch function, from others whose uses of weights are then seen one by one.

    For arguments that it does not know it returns NotImplemented.
    """

    function: Callable[..., Any]


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


@dataclass(frozen=True, eq=False)
class Rule:
    """How the weights of one torch function get their terms.

    `terms(grad, *args, **kwargs)` is called with the gradient of the function's result and with its arguments. Every
    tensor that depends on the batch comes with its samples in front (see `layout.samples`). It gives a
    term for each weight, by the name of the argument. `accepts(input, dim)` says whether the rule holds for an input
    with its samples in `dim`, and `when(*args, **kwargs)` whether it holds for such a call; where it does not, another
    or the generic rule does.
    """

    terms: Callable[..., Terms]
    accepts: Accepts
    batched: frozenset[str]
    when: Callable[..., bool] = _always
    whole: bool = False
    as_they_lie: bool = False
    reads_result: bool = True

    @cached_property
    def names(self) -> list[str]:
        """The names of the function's arguments, in order."""
        return list(inspect.signature(self.terms).parameters)[2 if self.as_they_lie or self.whole else 1 :]

    @cached_property
    def known(self) -> frozenset[str]:
        return frozenset(self.names)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by their names."""
        return {**dict(zip(self.names, args, strict=False)), **kwargs}


def register_rule(
    *functions: Callable[..., Any] | str,
    accepts: Accepts = lambda input, dim: dim == 0,
    batched: Sequence[str] = ("input",),
    when: Callable[..., bool] = _always,
    whole: bool = False,
    as_they_lie: bool = False,
    reads_result: bool = True,
    further: bool = True,
) -> Callable[[Callable[..., Terms]], Callable[..., Terms]]:
    """Registers a function as the rule of some torch functions, which share its signature after `grad`.

    A torch function is one that a `torch.overrides` mode sees: of torch itself, of one's own with
    `handle_torch_function`, or an operator of a library, by its name "library::operator". The rule is called in the
    backward pass with the gradient of the function's result and its arguments, and gives a term for each argument that
    may be a weight, by its name. Tensors that depend on the batch come with the samples in front: `(T, B, D)` as
    `(B, T, 1, D)`, for a sample is a batch of one. All rules leave the gradients of the samples to the function's own
    backward; `reads_result=False` says that this one does not read the function's result, which saves a copy of it.

    `batched` names the arguments in which samples lie; all others are weights, or the same for the whole batch.
    `accepts(input, dim)` says in which dims the samples may lie there, `when(*args, **kwargs)` which calls the rule is
    for. For all other calls the function's derivative is taken for each sample by itself, which needs no rule.

    >>> import torch
    >>> from persample.terms import Dense
    >>> @register_rule(torch.nn.functional.hardtanh, when=lambda *args, **kwargs: False)  # of which nothing is a weight
    ... def hardtanh(grad, input, min_val=-1.0, max_val=1.0, inplace=False):
    ...     return {}
    >>> FURTHER_RULES.pop(torch.nn.functional.hardtanh)[0].names
    ['input', 'min_val', 'max_val', 'inplace']

    Used inside of this library: `whole`, for a rule that is the function's whole backward: it gets the function's
    results too, after `grad`, and gives the `batched` arguments a term, which is their gradient; `as_they_lie`, for one
    that takes its tensors as they are, and after `grad` the `Owners` of its entries; `further=False` for those that a
    bare ExpandedWeight has too.
    """

    def register(terms: Callable[..., Terms]) -> Callable[..., Terms]:
        made = Rule(terms, accepts, frozenset(batched), when, whole, as_they_lie, reads_result)
        for function in functions:
            if further:
                FURTHER_RULES.setdefault(function, []).insert(0, made)
            else:
                HANDLED_FUNCTIONS[function] = made
        return terms

    return register
