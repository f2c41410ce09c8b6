"""Which passes are verified: the first of each kind, and later ones that may do something else."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from weakref import ref

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


def start_verification(
    model: nn.Module,
    options: Options,
    processes: Processes,
    tracker: Tracker,
    arguments: Arguments,
    environment: Hashable,
) -> Verification | str:
    """Prepare the verification of a forward pass that is about to run, or return what is already known.

    The tracker must know where the samples lie in the arguments. Whether passes in this environment were verified is
    known before the pass. Which path it takes is known after it (`Path.find_status`).
    """
    if options.verify is False:
        return "not verified: verify=False"
    try:
        check_can_verify(processes)
        known = tracker.path.get_environments()
        if environment in known and options.verify != "always":
            return known[environment]
        if options.verify is None:
            check_unnoticed_by_modes()
        if tracker.batch < 2:
            return "not verified: the batch has fewer than two samples"
    except NotVerified as reason:
        return describe(reason, options)
    try:
        if options.verify is None:
            check_unnoticed_by_hooks(model)
        return Verification(model, arguments, tracker, partial(tracker.path.make_note, environment))
    except NotVerified as reason:
        known[environment] = describe(reason, options)
        return known[environment]


def start_late_verification(
    model: nn.Module, options: Options, tracker: Tracker, arguments: Arguments, environment: Hashable, is_random: bool
) -> Verification | str:
    """Prepare the verification of a forward pass that has just run, or return why it cannot be verified.

    For a pass that may do something else than the first one in its environment: with a sequence of functions that was
    not verified there, or with numbers that were read from samples. Extra passes start from the state after the pass.
    If it was another one before, a second run of the batch gives other outputs, and the pass is not verified.
    """
    try:
        if options.verify is None:
            check_unnoticed_by_modes()
            check_unnoticed_by_hooks(model)
        make_note = partial(tracker.path.make_note, environment)
        return Verification(model, arguments, tracker, make_note, is_random)
    except NotVerified as reason:
        return describe(reason, options, is_late=True)


def describe_environment(called: nn.Module, options: Options, arguments: Arguments) -> Hashable:
    """What a forward pass depends on, besides its path through the program of the model and the values of tensors."""
    devices = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    call = ref(called), called.training, len(arguments.args), *arguments.kwargs
    graph = torch.is_grad_enabled()  # without, no row is compared
    dtypes = tuple([tensor.dtype for tensor in arguments.iterate_tensors()])
    return options.verify, graph, call, repr(options.batch_dim), options.batch_size is None, *devices, dtypes
