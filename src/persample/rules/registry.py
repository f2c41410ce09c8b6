"""The table of rules: for a torch function, which terms its weights receive."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from persample.terms import Term

Terms = Mapping[str, "Term | Sequence[Term]"]
Accepts = Callable[[Tensor, int], bool]

# torch function -> its Rule or Rewrite, or an `autograd.Function` that somebody gave to `implements_per_sample_grads`.
# An operator of another library stands there by its name, "library::operator", so that the library need not be there.
HANDLED_FUNCTIONS: dict[Callable[..., Any] | str, Any] = {}


def handler_of(func: Callable[..., Any]) -> Any:
    """What is known of a torch function, None if nothing is."""
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        packet = func.overloadpacket if isinstance(func, torch._ops.OpOverload) else func
        return HANDLED_FUNCTIONS.get(packet._qualified_op_name)
    return HANDLED_FUNCTIONS.get(func)


@dataclass(frozen=True)
class Rewrite:
    """`function` computes the same as a torch function, from others whose uses of weights are then seen one by one.

    For arguments that it does not know it returns NotImplemented.
    """

    function: Callable[..., Any]


@dataclass(frozen=True)
class Rule:
    """How the weights of one torch function get their terms.

    `terms(grad, *args, **kwargs)` is called with the gradient of the function's result and with its arguments. Every
    tensor that depends on the batch comes with its samples in front (see `layout.samples`). It gives a
    term for each weight, by the name of the argument. `accepts(input, dim)` says whether the rule holds for an input
    with its samples in `dim`; where it does not, the generic rule does.
    """

    terms: Callable[..., Terms]
    accepts: Accepts
    batched: frozenset[str]
    whole: bool

    @cached_property
    def names(self) -> list[str]:
        """The names of the function's arguments, in order."""
        return list(inspect.signature(self.terms).parameters)[1:]

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by their names."""
        return {**dict(zip(self.names, args, strict=False)), **kwargs}


def rule(
    *functions: Callable[..., Any],
    accepts: Accepts = lambda input, dim: dim == 0,
    batched: Sequence[str] = ("input",),
    whole: bool = False,
) -> Callable[[Callable[..., Terms]], Callable[..., Terms]]:
    """Registers a function as the rule of some torch functions, which share its signature after `grad`.

    `batched` names the arguments in which samples may lie; all others are weights or the same for the whole batch.
    `whole`: the rule is the function's whole backward and gives the `batched` arguments a term too, which is their
    gradient. All other rules leave that to the function's own backward.
    """

    def register(terms: Callable[..., Terms]) -> Callable[..., Terms]:
        for function in functions:
            HANDLED_FUNCTIONS[function] = Rule(terms, accepts, frozenset(batched), whole)
        return terms

    return register
