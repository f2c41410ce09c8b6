"""The registry of rules: for each torch function, how its weights get their terms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

from torch import Tensor

from persample import _torch
from persample.terms import Term

# The result of a rule: for each weight, by the name of the argument, its term; for a list of weights, a list of terms.
Terms = Mapping[str, Term | Sequence[Term]]
Accepts = Callable[[Tensor, int], bool]
RuleFunction = TypeVar("RuleFunction", bound=Callable[..., Terms])


class EntryOwners(Protocol):
    """The sample of each entry of a function's result (`ids`, -1 for none), and the number of samples (`batch`)."""

    @property
    def ids(self) -> Tensor: ...

    @property
    def batch(self) -> int: ...

    def group(self, owner: Tensor, *rows: Tensor) -> list[Tensor]:
        """Each tensor `(N, ...)` as `(batch, n, ...)`: the rows of each sample, padded with zeros.

        `owner` is `(N,)`: the sample of each row.
        """


class _Version:
    """Counts the changes of all registries, so that a plan which was made with other rules is noticed."""

    number = 0


RULES_VERSION = _Version()


class _Registry(dict[Any, Any]):
    """A dict whose changes are counted."""

    def __setitem__(self, key: Any, value: Any) -> None:
        RULES_VERSION.number += 1
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        RULES_VERSION.number += 1
        super().update(*args, **kwargs)

    def clear(self) -> None:
        RULES_VERSION.number += 1
        super().clear()

    def __delitem__(self, key: Any) -> None:
        RULES_VERSION.number += 1
        super().__delitem__(key)

    def pop(self, *args: Any) -> Any:
        RULES_VERSION.number += 1
        return super().pop(*args)


# torch function -> Rule, Rewrite, or an `autograd.Function` from `implements_per_sample_grads`. Operators of other
# libraries are listed by name, "library::operator", so that the library does not have to be installed.
HANDLED_FUNCTIONS: dict[Callable[..., Any] | str, Any] = _Registry()


# Further rules of a torch function, the one registered last first. The first rule that holds for a call is used. They
# do not apply to a bare ExpandedWeight, because torch's expanded weights do not support these functions.
FURTHER_RULES: dict[Callable[..., Any] | str, list[Rule]] = _Registry()

_RULES: dict[Callable[..., Any] | str, list[Rule]] = {}
_NO_RULES: list[Rule] = []


def get_handler(func: Callable[..., Any]) -> Any:
    """The entry of a torch function in HANDLED_FUNCTIONS, or None."""
    return HANDLED_FUNCTIONS.get(_find_key(func))


def is_handler(value: Any) -> bool:
    """Whether an object is the entry of a torch function in HANDLED_FUNCTIONS."""
    return any(handler is value for handler in HANDLED_FUNCTIONS.values())


def get_rules(func: Callable[..., Any]) -> list[Rule]:
    """All rules of a torch function. The same list object is returned until a rule is added or replaced.

    Threads may call this at the same time: at worst one of them gets an equal list that is not kept.
    """
    key = _find_key(func)
    first, rules = HANDLED_FUNCTIONS.get(key), FURTHER_RULES.get(key, _NO_RULES)
    if isinstance(first, Rule):
        rules = [first, *rules]
    kept = _RULES.setdefault(key, rules)
    if kept != rules:  # rules are compared by identity
        kept = _RULES[key] = list(rules)
    return kept


def _find_key(func: Callable[..., Any]) -> Callable[..., Any] | str:
    if func in HANDLED_FUNCTIONS:
        return func
    return _torch.get_operator_name(func) or func


# Runs a use by a handler that is neither a Rule nor a Rewrite: `adapter(tracker, handler, call, weights)`.
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
    """A function that computes the same as a torch function from other torch functions, which have rules.

    It returns NotImplemented for arguments that it does not support.
    """

    function: Callable[..., Any]


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


@dataclass(frozen=True, eq=False)
class Rule:
    """How the weights of a torch function get their terms; `register_rule` explains the fields.

    `terms(grad, *args, **kwargs)` computes the terms from the gradient of the function's result and its arguments.
    """

    terms: Callable[..., Terms]
    accepts: Accepts
    batched: frozenset[str]
    when: Callable[..., bool] = _always
    whole: bool = False
    as_they_lie: bool = False
    reads_result: bool = True
    stacks: bool = False

    @cached_property
    def names(self) -> list[str]:
        """The names of the function's arguments, in order."""
        return list(inspect.signature(self.terms).parameters)[2 if self.as_they_lie or self.whole else 1 :]

    @cached_property
    def known(self) -> frozenset[str]:
        """The names of the function's arguments, as a set."""
        return frozenset(self.names)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name."""
        return {**dict(zip(self.names, args, strict=False)), **kwargs}


def register_rule(
    *functions: Callable[..., Any] | str,
    accepts: Accepts = lambda input, dim: dim == 0,
    batched: Sequence[str] = ("input",),
    when: Callable[..., bool] = _always,
    whole: bool = False,
    as_they_lie: bool = False,
    reads_result: bool = True,
    stacks: bool = False,
    further: bool = True,
) -> Callable[[RuleFunction], RuleFunction]:
    """Decorator: register a function as the rule of one or several torch functions.

    In the backward pass, the rule is called as `rule(grad, *args, **kwargs)` with the gradient of the torch function's
    result and the arguments of the call. It returns a dict with a term for each argument that may be a weight, by the
    argument's name. Tensors that depend on the batch have the samples in dimension 0, and each sample is a batch of
    one: `(B, T, D)` becomes `(B, 1, T, D)`, and a time-first `(T, B, D)` becomes `(B, T, 1, D)`. Weights are unchanged.
    The gradients of the samples come from the torch function's own backward.

    Of several rules for one function, the rule registered last is asked first whether it holds for a call, but rules
    with `further=False` are asked before all others. For calls without a rule, the derivative of the function itself is
    taken for each sample.

    Args:
        functions: The torch functions. They share the rule's signature after `grad`. A torch function is any function
            that a `torch.overrides` mode sees: one of torch, one that calls `handle_torch_function`, or an operator of
            a library, given by its name "library::operator".
        accepts: `accepts(tensor, dim)` tells whether the rule holds for an argument with the samples in dimension
            `dim`. By default, `dim` must be 0.
        batched: The names of the arguments that contain samples. All other tensors are weights or constants.
        when: `when(*args, **kwargs)` tells whether the rule holds for a call with these arguments. By default it
            always does.
        reads_result: Whether the torch function's own backward reads the function's result. False saves a copy of the
            result.
        stacks: Whether the terms depend on the shapes of the weights only, not on their values. Then uses of several
            weights of the same shape can be computed in one call of the rule.
        whole: Internal. The rule is the function's whole backward: it gets the function's results after `grad`, and
            also returns terms for the `batched` arguments, which are their gradients.
        as_they_lie: Internal. The rule gets its tensors unchanged, and after `grad` the `EntryOwners` of the result.
        further: Internal. False for the rules that also apply to a bare ExpandedWeight.

    >>> import persample, torch
    >>> from persample.terms import Dense
    >>> from torch.overrides import handle_torch_function, has_torch_function
    >>> def scale(input, weight):
    ...     if has_torch_function((input, weight)):
    ...         return handle_torch_function(scale, (input, weight), input, weight)
    ...     return input * weight
    >>> @persample.register_rule(scale, reads_result=False)
    ... def compute_scale_terms(grad, input, weight):
    ...     return {"weight": Dense((grad * input).sum(1))}
    >>> class Scale(torch.nn.Linear):
    ...     def forward(self, x):
    ...         return scale(x, self.bias)
    >>> model = Scale(2, 2)
    >>> with persample.record(model, loss_reduction="sum") as grads:
    ...     model(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    >>> grads.dense()["bias"]
    tensor([[1., 2.],
            [3., 4.]])
    """

    def register(terms: RuleFunction) -> RuleFunction:
        rule = Rule(terms, accepts, frozenset(batched), when, whole, as_they_lie, reads_result, stacks)
        for function in functions:
            if further:
                FURTHER_RULES[function] = [rule, *FURTHER_RULES.get(function, ())]  # a new list: see `get_rules`
            else:
                HANDLED_FUNCTIONS[function] = rule
        return terms

    return register
