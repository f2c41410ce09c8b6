"""The program of a model: the sequences of functions of its audited passes, as a tree, and what each call did.

A `Site` is a place in this tree. A pass moves from site to site (`path`). Where the arguments of a call are of the same
kind as those of the last call at its site, the call has the same effect, without a key. To compare arguments is faster
than to build a key. If a comparison fails, the call takes the way over its key, so nothing depends on it but time.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Container, Hashable, Mapping
from dataclasses import dataclass, field
from types import EllipsisType, NoneType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from persample._internal.models import SeveralModels
from persample.forward.outside import RememberedConstants
from persample.layouts import Effect, Layout, Scale, Where
from persample.rules import RULES_VERSION

# By the id of a tensor: a weak reference to the tensor; where its samples lie, and whether it required grad then.
Known = Mapping[int, tuple[Callable[[], Any], tuple[Where | None, bool]]]

# Types of arguments that are compared by identity, or by value if they are numbers. None of them can change.
_FIXED = {int, float, bool, str, NoneType, torch.dtype, torch.device, EllipsisType, torch.memory_format}

_STRIDED = torch.strided

_MAX_MISSES = 3  # then the arguments are not compared any more

# How an argument is compared: by its layout, as a parameter, or by identity.
_SAMPLES, _PARAMETER, _SAME = 0, 1, 2

# The way of comparison; the layout or object; the layout's token or a number's type; dimensions; requires grad
_Check = tuple[int, Any, Any, int, bool]

_MAX_SITES = 50_000  # of one model: a longer program is not kept, and new sequences are audited each time
_PASSES_AFTER_FINDING = 10
_MAX_STATUSES = 1000
_MAX_SETTINGS = 1000  # of functions of the user: others are checked each time


class Site(dict[Any, "Site"]):
    """A place in the sequences of functions of a model: the sites that follow, by function.

    Attributes:
        effect: the effect of the last call that led here; None if it holds for no other call, or if arguments keep
            differing.
    """

    __slots__ = ("_checks", "_count", "_misses", "_names", "effect")

    def __init__(self) -> None:
        super().__init__()
        self.effect: Effect | None = None
        self._checks: list[_Check] = []
        self._count = 0
        self._names: tuple[str, ...] = ()
        self._misses = 0  # how often a call differed from the last one

    def matches(self, args: tuple[Any, ...], kwargs: dict[str, Any], known: Known, parameters: Container[int]) -> bool:
        """Whether a call of the function that leads here has the effect of the last one."""
        if len(args) != self._count or self.effect is None or self.effect.rules_version != RULES_VERSION.number:
            return False
        values = args
        if kwargs or self._names:
            if (*kwargs,) != self._names:
                return False
            values = (*args, *kwargs.values())
        for value, (way, expected, token, dims, has_grad) in zip(values, self._checks, strict=True):
            if way == _SAMPLES:
                entry = known.get(id(value))
                if entry is None or entry[0]() is not value:
                    return False
                layout, had_grad = entry[1]
                if layout is not expected and (type(layout) is not Layout or layout.token is not token):
                    return False
                has_same_grad = had_grad is has_grad and value.requires_grad is has_grad
                if not has_same_grad or value.dim() != dims or value.layout is not _STRIDED:
                    return False
            elif way == _SAME:
                if value is not expected and (type(value) is not token or value != expected):
                    return False
            else:
                key = id(value)
                if key not in parameters or not value.requires_grad or value.dim() != dims or key in known:
                    return False
        return True

    def note(
        self, effect: Effect, args: tuple[Any, ...], kwargs: dict[str, Any], known: Known, parameters: Container[int]
    ) -> None:
        """Keep the effect of a call, which holds at any size, for the next call here."""
        if self._misses >= _MAX_MISSES:
            return
        self._misses += 1
        checks = [_make_check(value, known, parameters) for value in (*args, *kwargs.values())]
        self._checks = [check for check in checks if check is not None]
        if len(self._checks) < len(checks):
            self._misses, self.effect = _MAX_MISSES, None
        else:
            self.effect, self._count, self._names = effect, len(args), tuple(kwargs)


def _make_check(value: Any, known: Known, parameters: Container[int]) -> _Check | None:
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        entry = known.get(id(value))
        if entry is not None and entry[0]() is value:
            layout, had_grad = entry[1]
            has_grad = value.requires_grad
            if type(layout) is not Layout or layout.token is None or had_grad is not has_grad:
                return None
            return _SAMPLES, layout, layout.token, value.dim(), has_grad
        if id(value) in parameters and value.requires_grad:
            return _PARAMETER, None, None, value.dim(), True
        return None
    if kind in _FIXED or (kind is tuple and {*map(type, value)} == {int}):
        return _SAME, value, kind if kind in (int, float) else None, 0, False
    return None


class _AnySite(Site):
    """A site in which every sequence of functions counts as audited."""

    def get(self, key: Any, default: Any = None) -> Site:
        return self

    def note(self, *args: Any) -> None:
        pass


ANY_SITE = _AnySite()


class Pass(NamedTuple):
    """A pass at the end of a call of the model.

    Attributes:
        leaf: the id of the site where the path ends. Sites live as long as their program.
        decisions: what the model has read that is true or false for all samples together.
        environment: what the pass depends on besides.
    """

    leaf: int
    decisions: tuple[bool, ...]
    environment: Hashable


@dataclass
class Program:
    """What is known about the passes of one model.

    A pass is a path from the root to a leaf, in an environment: the training flag, autocast, the options and so on. It
    is audited if its leaf exists, and verified if its leaf was verified in this environment and with the same decisions
    on values of all samples.
    """

    root: Site = field(default_factory=Site)  # each path from here is the sequence of functions of an audited pass
    size: int = 0  # the number of sites
    audits_due: int = 1  # the number of passes to come that are audited as a whole
    written_outside: set[StorageWeakRef] = field(default_factory=set)  # memory that code outside torch has written to
    environments: dict[Hashable, str] = field(default_factory=dict)  # what the first verification in each has found
    statuses: dict[Pass, str] = field(default_factory=dict)  # what the verification of each pass has found
    passes_left: dict[Hashable, int] = field(default_factory=dict)  # until a pass in this environment is verified again
    settings: set[Any] = field(default_factory=set)  # of functions of the user whose backward was checked
    scales: dict[Any, Scale] = field(default_factory=dict)  # how numbers scaled sums, by places in the code
    constants: RememberedConstants = field(default_factory=RememberedConstants)
    together_with: WeakKeyDictionary[nn.Module, Program] = field(default_factory=WeakKeyDictionary)

    def add_site(self, site: Site, key: Any) -> Site | None:
        """Add a site behind another one. None if there are too many sites."""
        if self.size >= _MAX_SITES:
            return None
        self.size += 1
        return site.setdefault(key, Site())

    def note_finding(self) -> None:
        """Have the next passes audited as a whole."""
        self.audits_due = _PASSES_AFTER_FINDING

    def find_status(self, found: Pass) -> str | None:
        """What the verification of a pass has found; None if the pass is to be verified."""
        return self.statuses.get(found)

    def note_status(self, found: Pass, status: str) -> None:
        """Note what the verification of a pass has found."""
        noted: tuple[dict[Any, Any], ...] = self.environments, self.statuses, self.passes_left
        for entries in noted:
            if len(entries) >= _MAX_STATUSES:
                entries.clear()
        self.passes_left.pop(found.environment, None)
        self.environments.setdefault(found.environment, status)
        self.statuses[found] = status

    def is_due(self, environment: Hashable, most: int) -> bool:
        """Count a pass in an environment; return whether it is to be verified again.

        After a verification, a number from 1 to `most` is drawn: that pass is due, and those after it until one of
        them is verified. Code that follows a rhythm cannot avoid it.
        """
        left = self.passes_left.get(environment)
        self.passes_left[environment] = left = secrets.randbelow(most) if left is None else left - 1
        return left <= 0

    def add_setting(self, setting: Any) -> bool:
        """Add how a function of the user was called; return whether an earlier pass has called it in the same way."""
        is_known = setting in self.settings
        if len(self.settings) < _MAX_SETTINGS:
            self.settings.add(setting)
        return is_known


class AuditedSequence:
    """The sequence of functions of a pass from the moment on when it is audited.

    Attributes:
        site: where the pass is; None if the program has too many sites.
        is_new: whether the pass is one that is new, or that must be audited as a whole.
        has_finding: whether something was found that the tracker has not seen: the next passes are audited, too.
    """

    def __init__(self, program: Program, site: Site) -> None:
        self.site: Site | None = site
        self._program = program
        self._is_whole = self.is_new = site is program.root
        self.has_finding = False

    def advance(self, key: Any) -> None:
        """Note the next function."""
        if self.site is not None:
            following = self.site.get(key)
            if following is None:
                self.is_new, following = True, self._program.add_site(self.site, key)
            self.site = following

    def end(self) -> None:
        """Note whether later passes of the same sequence must be audited."""
        due = self._program.audits_due
        if self.has_finding:
            self._program.note_finding()
        elif self._is_whole:
            self._program.audits_due = max(0, due - 1)
        elif self.is_new and due == 0:  # what happened before the audit began was not seen
            self._program.audits_due = 1


# By whether steps are isolated, which refuses more in an audited pass. Entries live as long as their module.
_programs: dict[bool, WeakKeyDictionary[nn.Module, Program]] = {
    False: WeakKeyDictionary(),
    True: WeakKeyDictionary(),
}


def get_program(model: nn.Module, is_isolated: bool = False) -> Program:
    """The program of a model; that of several models outlives the module that holds the models."""
    first, *others = model.children() if isinstance(model, SeveralModels) else [model]
    programs = _programs[is_isolated]
    program = programs.get(first) or programs.setdefault(first, Program())
    for other in others:
        program = program.together_with.setdefault(other, Program())
    return program
