"""Which passes are verified: the first of each kind, and later ones that may do something else."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from persample.batches import Arguments
from persample.distributed import Processes
from persample.forward import Tracker
from persample.recording.options import Options
from persample.recording.verification.one_pass import Verification
from persample.recording.verification.status import (
    NotVerified,
    check_can_verify,
    check_unnoticed_by_hooks,
    check_unnoticed_by_modes,
    describe,
)

# What was found for each model, by what the forward pass depends on: "verified ..." or "not verified: ...".
_found: WeakKeyDictionary[nn.Module, dict[Any, str]] = WeakKeyDictionary()


def start_verification(
    model: nn.Module, options: Options, processes: Processes, tracker: Tracker, arguments: Arguments
) -> Verification | str:
    """Prepare the verification of a forward pass that is about to run, or return what is already known.

    The tracker must know where the samples lie in the arguments.
    """
    if options.verify is False:
        return "not verified: verify=False"
    try:
        check_can_verify(processes)
        known = _found.setdefault(model, {})
        key = _make_key(model, options, arguments)
        if key in known and options.verify != "always":
            return known[key]
        if options.verify is None:
            check_unnoticed_by_modes()
        if tracker.batch < 2:
            return "not verified: the batch has fewer than two samples"
    except NotVerified as reason:
        return describe(reason, options)
    try:
        if options.verify is None:
            check_unnoticed_by_hooks(model)
        return Verification(model, arguments, tracker, lambda status: known.__setitem__(key, status))
    except NotVerified as reason:
        known[key] = describe(reason, options)
        return known[key]


def start_late_verification(
    model: nn.Module, options: Options, tracker: Tracker, arguments: Arguments, is_random: bool
) -> Verification | str:
    """Prepare the verification of a forward pass that has just run, or return why it cannot be verified.

    For a pass that may do something else than the first one: with a new sequence of functions, or with numbers that
    were read from samples. Extra passes start from the state after the pass. If it was another one before, a second run
    of the batch gives other outputs, and the pass is not verified.
    """
    try:
        if options.verify is None:
            check_unnoticed_by_modes()
            check_unnoticed_by_hooks(model)
        return Verification(model, arguments, tracker, None, is_random)
    except NotVerified as reason:
        return describe(reason, options, is_late=True)


def _make_key(model: nn.Module, options: Options, arguments: Arguments) -> tuple[Any, ...]:
    autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    call = len(arguments.args), *arguments.kwargs
    graph = torch.is_grad_enabled()  # without, no row is compared
    return options.verify, model.training, graph, call, repr(options.batch_dim), options.batch_size is None, autocast
