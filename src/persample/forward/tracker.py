"""The function mode that follows the samples through every op of a forward pass and finds the uses of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from types import FunctionType, MappingProxyType
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from persample import _torch
from persample._internal import tracing
from persample._internal.dropped_arguments import DROPPED, find_dropped
from persample._internal.dynamo import disable_compilation, exclude_from_graph, skip_compilation
from persample._internal.functions import find_results, is_inplace
from persample._internal.graph import find_leaves, find_nodes
from persample._internal.model_table import read_model
from persample._internal.parameter_hooks import REGISTRATIONS
from persample._internal.tree import find_tensors
from persample._torch import get_saved_tensor_hooks
from persample.backward.collector import Collector
from persample.backward.parameter_gradients import compute_parameter_gradients, make_refusal
from persample.backward.tap import is_tap
from persample.distributed import Processes
from persample.errors import (
    ELSEWHERE,
    ROWS_ADVICE,
    Complain,
    PerSampleError,
    SamplesMixed,
    find_place,
    get_op_name,
    raise_or_complain,
)
from persample.forward.audit import ANY_SEQUENCE, Audit, get_history
from persample.forward.beside_sums import is_beside_sum, run_beside_sum
from persample.forward.by_rows import use_by_rows
from persample.forward.checkpointing import SavedLayouts, prepare_recomputation, prepare_reentrant, save_layout
from persample.forward.contributions import find_coupled_motion, find_owners, own_tensor, prepare_use, scales_statistic
from persample.forward.fastpath import WholeModules
from persample.forward.gradient_hooks import check_custom_backward, follow_module_hooks, follow_tensor_hook
from persample.forward.inline import is_composite, make_inline
from persample.forward.isolation import Isolation
from persample.forward.known_tensors import TensorMap
from persample.forward.outside import CLASS_WEIGHTS, IMPORTS, OutsideTensors
from persample.forward.own_rows import selects_first_rows
from persample.forward.places import RANDOM
from persample.forward.preparations import PREPARATIONS
from persample.forward.quick import (
    HAS_PARAMETERS,
    HAS_SAMPLES,
    QUICK_CALLS,
    WITHOUT_TENSORS,
    Key,
    QuickCall,
    add_quick_call,
    has_fixed_weights,
    make_key,
)
from persample.forward.repeats import note_repeat
from persample.forward.roots import NoteLoss, watch_sum
from persample.forward.tried import TriedFunctions
from persample.forward.use import can_repeat, check_not_mixed, repeat_use, run_use
from persample.forward.written import UPDATING, Written
from persample.layouts import (
    BILINEAR,
    BY_SHAPE,
    CACHE,
    MOVES,
    READS,
    SIZE_FREE,
    Call,
    CountedSizes,
    Divided,
    DivisorMode,
    Layout,
    Lost,
    Motion,
    Reduced,
    Scale,
    Scattered,
    Summed,
    Where,
    add_samples_to_layout,
    find_layout_of_ids,
    find_listed_total,
    find_motion,
    find_read_total,
    find_simple_layout,
    find_size_free_layout,
    get_argument,
    is_pointwise,
    make_call,
    make_sample_ids,
    make_strided_ids,
    mark_simple,
)
from persample.rules import Rewrite, count_rule_changes, find_adapter, get_handler, get_rules

# Functions that return their argument itself, unchanged.
_UNCHANGING = {
    Tensor.requires_grad_, Tensor.register_hook, Tensor.retain_grad, Tensor.backward, torch.autograd.backward,
    torch.autograd.grad,
}  # fmt: skip

_DIFFERENTIATING = {Tensor.backward, torch.autograd.backward, torch.autograd.grad}

# Functions that read only the dtype and device of their second tensor, or only its shape.
_TYPED = {Tensor.type_as, Tensor.to}
_SHAPED: dict[Any, Any] = {
    Tensor.expand_as: Tensor.expand, Tensor.view_as: Tensor.view, Tensor.reshape_as: Tensor.reshape,
}  # fmt: skip

# Functions that return whether two tensors are equal as a whole.
_COMPARING = {torch.equal, torch.allclose, Tensor.equal, Tensor.allclose}

# Functions of the entries of two tensors of one shape, besides the pointwise ones.
_ENTRYWISE: set[Any] = {
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.cosine_similarity, F.pairwise_distance,
    torch.dist, Tensor.dist, torch.dot, Tensor.dot, torch.vdot, Tensor.vdot, Tensor.copy_,
}  # fmt: skip

# Functions that replace the memory of their first argument.
_REPLACING: set[Any] = {Tensor.data.__set__}  # type: ignore[attr-defined]

_UNKNOWN = (Lost("the tracker has not seen it"), False)

_ADVICE = (
    "Keep the samples separate (GroupNorm or LayerNorm instead of BatchNorm, or BatchNorm in eval(); statistics and "
    "attention within a sample), or say where the samples lie with "
)


# For each model: how numbers were read by which the code scaled sums over the samples, by places in the code.
_SCALES: WeakKeyDictionary[nn.Module, dict[Any, Scale]] = WeakKeyDictionary()


def _do_nothing(tensor: Tensor) -> None:
    pass


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


class Tracker(TorchFunctionMode):
    """While it is entered, the layout of each tensor that depends on the batch is known.

    A *use* is an op with a weight on one side (a parameter, or a tensor computed from parameters alone) and samples on
    the other. It runs with the weight detached, and a tap on its result finds the terms in backward. Ops of weights
    alone run under ordinary autograd, through which the collector pulls gradients back.

    Args:
        collector: takes the terms.
        model: the module whose forward is tracked, for names in errors, buffers and transformer layers.
        batch: the batch size; a recording sets it with `start_forward`.
        loss_reduction: for rules in the convention of expanded weights.
        layout_options: the options by which the user can say where the samples lie, for errors.
        processes: the processes that share the batch.
        run_backward: called in place of `Tensor.backward`, with the function, its args and its kwargs.
        note_loss: called in each backward pass with the sum over the samples that the pass starts from.
        outside: decides about tensors that the code around the model uses; by default they are constants.
        note_outside: called with each tensor from outside.
        isolation: what private training refuses besides: numbers of samples in the batch, samples of other steps.
        complain: takes refusals in place of raising them, and sets `has_ended`.
        is_coupled: samples may influence each other; what the tracker follows is who owns each row.
        divisors: what is done with divisors of the loss that are counted over all samples.

    Attributes:
        start_by_use: called with an op that combines weights with other tensors, none of which is known to depend on
            the batch, outside of calls of modules; returns whether some are samples, as the tracker knows then.
    """

    def __init__(
        self,
        collector: Collector,
        model: nn.Module | None = None,
        *,
        batch: int = 0,
        loss_reduction: str = "sum",
        layout_options: str = "batch_dim and batch_size",
        processes: Processes | None = None,
        run_backward: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None,
        note_loss: NoteLoss | None = None,
        outside: OutsideTensors | None = None,
        note_outside: Callable[[Tensor], None] = _do_nothing,
        isolation: Isolation | None = None,
        complain: Complain | None = None,
        is_coupled: bool = False,
        divisors: DivisorMode = "refuse",
    ) -> None:
        super().__init__()
        self.batch = batch
        self.collector = collector
        self._model = None if model is None else ref(model)  # the mode of a dropped model must not keep it
        self.loss_reduction = loss_reduction
        self.processes = processes or Processes()
        self.run_backward = run_backward
        self.note_loss = note_loss
        self.outside = outside
        self.note_outside = note_outside
        self.isolation = isolation
        self.complain = complain
        self.is_coupled = is_coupled
        self.start_by_use: Callable[[Call], bool] | None = None
        self.places = None if isolation is None else isolation.places
        self.advice = f"{_ADVICE}{layout_options}."
        self.has_inputs = False
        self.can_retain = False  # whether small uses may do without a tap
        self.is_inside = batch > 0  # whether the model's forward is running, as far as is known
        self.has_ended = False  # nothing is followed any more, and the mode can be removed at any time
        self.is_paused = False  # nothing is followed now
        self.tried = TriedFunctions()
        self.number_of_reads = 0  # of numbers that may depend on several samples
        self.saved_layouts: SavedLayouts = {}
        self._given: dict[int | None, StorageWeakRef] = {}  # memory of samples from outside
        self._audit: Audit | None = None
        self._checked_nodes: WeakSet[Any] = WeakSet()  # of custom functions
        self._hooks = ExitStack()  # undoes that hooks of modules on gradients are followed
        self._audit_node: Any = ANY_SEQUENCE  # where the pass is in the sequences of audited passes
        self._buffers_before: dict[int | None, Tensor] = {}
        sites = _SCALES.setdefault(model, {}) if model is not None else {}
        self._counted = CountedSizes("refuse" if tracing.get_trace() is not None else divisors, sites)
        if outside is not None:
            self._counted.is_held = outside.is_held
        self._decisions: list[bool] = []  # what the model has read that is true or false for all samples together
        self._has_read_values = False  # whether the model has read values of samples, other than counts
        self._module_names: WeakKeyDictionary[nn.Module, str] | None = None
        self._depth = 0
        self._whole_modules: WholeModules | None = None
        self.modules: list[nn.Module] | None = None  # for `start`, if the caller has just searched the model
        self._summed: TensorMap[Summed] = TensorMap()  # sums over the samples
        self._of_hidden_weights: TensorMap[bool] = TensorMap()  # computed from weights and samples without grad
        # The layout of a tensor, and whether the tensor required grad when the layout was found.
        self._known: TensorMap[tuple[Where | None, bool]] = TensorMap()
        if isolation is not None:
            isolation.start_step(self)

    @property
    def model(self) -> nn.Module | None:
        """The module whose forward is tracked, None if there is none or if it has been freed."""
        return None if self._model is None else self._model()

    @property
    def anchor(self) -> Tensor:
        """The leaf that every tapped result depends on."""
        return self.collector.anchor

    # ---- entering and leaving ----

    def start(self) -> None:
        """Prepare the model and torch for tracking."""
        if self._depth == 0:
            self._uncompiled = disable_compilation()
            self._uncompiled.__enter__()
            if self.model is not None:
                modules, self.modules = self.modules, None  # the tracker must not keep its model
                self._whole_modules = WholeModules(self, modules or read_model(self.model)[0])
        self._depth += 1

    def stop(self) -> None:
        """Undo `start`."""
        self._depth -= 1
        if self._depth == 0:
            self.end_audit()
            if self._whole_modules is not None:
                self._whole_modules.remove()
                self._whole_modules = None  # it refers to the tracker: break the cycle
            self._uncompiled.__exit__(None, None, None)

    def __enter__(self) -> Any:
        self.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self.stop()

    # ---- the audit ----

    def begin_audit(self) -> None:
        """Compare the functions from now on with those of audited passes, and audit what is new."""
        if self.model is None or tracing.get_trace() is not None:
            return
        self._hooks.close()
        if self._whole_modules is not None and self._whole_modules.with_hooks and not self.is_coupled:
            self._hooks.enter_context(follow_module_hooks(self._whole_modules.with_hooks, self))
        with _torch.DisableTorchFunction():
            if self._audit is not None:
                self._audit.add_known_tensors()
                return
            history = get_history(self.model, self.isolation is not None)
            self._audit_node = history.root
            if history.audits_due:
                self._start_audit()

    def _start_audit(self) -> Audit:
        assert self.model is not None
        self._audit = audit = Audit(self, get_history(self.model, self.isolation is not None), self._audit_node)
        self._audit_node = None
        audit.start()
        return audit

    def audit_next_passes(self) -> None:
        """Audit the next passes of the model, too."""
        if self.model is not None:
            get_history(self.model, self.isolation is not None).note_finding()

    def end_audit(self) -> None:
        """Let the functions that follow pass without an audit: the forward pass has ended."""
        self._summed = TensorMap()  # it keeps activations
        audit, self._audit = self._audit, None  # it refers to the tracker: break the cycle
        self._audit_node = ANY_SEQUENCE
        if audit is not None:
            audit.stop()
        self._hooks.close()

    @property
    def has_read_samples(self) -> bool:
        """Whether the model has read values of samples as numbers, or decided on values of all samples."""
        return self._has_read_values or bool(self._decisions)

    def may_differ_from_earlier_passes(self) -> bool:
        """At the end of a forward pass: whether it may do with samples what no pass of the model has done before.

        Its sequence of functions is new, it took other decisions on values of all samples (`if x.mean() > 0`), or
        values of samples were read as numbers, which code outside torch can use.
        """
        history = None if self.model is None else get_history(self.model, self.isolation is not None)
        decided_before = history is None or history.add_decisions(tuple(self._decisions))
        return self._audit is not None or self._has_read_values or not decided_before

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside the block, nothing is followed or audited: it runs passes that are not part of the recording."""
        was_paused, self.is_paused = self.is_paused, True
        try:
            with nullcontext() if self._audit is None else self._audit.pause():
                yield
        finally:
            self.is_paused = was_paused

    @contextmanager
    def resume(self) -> Iterator[None]:
        """Inside the block, a recording that was given up is followed again, until it is refused again.

        For recomputations: they must save what the forward pass has saved.
        """
        had_ended = self.has_ended
        if self.complain is not None:
            self.has_ended = False
        try:
            yield
        finally:
            self.has_ended |= had_ended

    def follow_whole(self) -> AbstractContextManager[Any]:
        """Inside the block, ops are part of a call whose results are set by `set_layout`."""
        return nullcontext() if self._audit is None else self._audit.follow_whole()

    # ---- what is known about a tensor ----

    def note_integers(self, numbers: Iterable[int]) -> None:
        """Note numbers among the arguments, which may count what all samples have, such as `num_items_in_batch`."""
        if self._counted.holds_divisors:
            self._counted.given_integers |= {*numbers}

    def start_batch(self, batch: int, arguments: Iterable[Tensor]) -> None:
        """Set the batch size, for a call of the model that is about to run with these arguments."""
        self.batch = batch
        if self.outside is not None:
            self._counted.totals.update(self.outside.get_early_totals(batch))
            for tensor, layout in self.outside.take_early(arguments, batch):
                self._known[tensor] = (layout, tensor.requires_grad)

    def grow(self, batch: int) -> None:
        """Add samples to the batch. The samples so far keep their numbers."""
        before, self.batch = self.batch, batch
        if self.outside is not None and self.outside.remembered is not None:
            self.outside.remembered.forget_step()
        for tensor, (where, had_grad) in list(self._known.items()):
            self._known[tensor] = (add_samples_to_layout(where, tensor.shape, before, batch), had_grad)
        for address, where in list(self.saved_layouts.items()):
            self.saved_layouts[address] = add_samples_to_layout(where, address[2], before, batch)
        if self._audit is not None:
            self._audit.grow(before, batch)

    def is_given(self, tensor: Tensor) -> bool:
        """Whether a tensor outside the model shares memory with samples that were given, of which it is the rest."""
        storage = None if self.is_inside else self._given.get(_torch.find_storage_id(tensor))
        return storage is not None and not storage.expired()

    def note_given(self, tensor: Tensor) -> None:
        """Note that a tensor of samples comes from outside, so that other parts of its memory do, too."""
        storage = _torch.find_storage(tensor)
        if storage is not None and self.isolation is None:
            self._given[_torch.find_storage_id(tensor)] = StorageWeakRef(storage)

    def add_input(self, tensor: Tensor, layout: Where) -> None:
        """Set the layout of a tensor from outside, unless the tracker has seen where it comes from."""
        self.has_inputs = True
        self.can_retain &= not tensor.requires_grad  # else a use may have no tap behind its activations
        self.note_outside(tensor)
        if self.isolation is not None:
            self.isolation.note_given(tensor)
        if tensor not in self._known:
            if self.outside is not None and isinstance(layout, Layout):
                layout = self.outside.reorder(layout)
            self._known[tensor] = (layout, tensor.requires_grad)

    def add_samples(self, tensor: Tensor, dim: int = 0) -> None:
        """Declare a tensor of the data: one row per sample in `dim`, or else in 0, if it has the batch's size there."""
        for each in (dim, 0):
            if self.batch and tensor.dim() > each and tensor.shape[each] == self.batch:
                self.add_input(tensor, Layout(each))
                return

    def add_packed(self, ids: Sequence[int], sizes: Sequence[int]) -> None:
        """Set the order of a packed sequence from outside: the sample of each row, and the rows of each step."""
        self._counted.add_packed(ids, sizes)

    def add_constant(self, tensor: Tensor) -> None:
        """Declare that a tensor is the same for all samples."""
        if self.outside is not None:
            self.outside.add_constant(tensor)

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor from outside is known to be the same for all samples."""
        if self.outside is None or not self.outside.is_declared(tensor):
            return False
        return self.isolation is not None or not self.outside.is_drawn(tensor)

    def find_layout(self, tensor: Tensor) -> Where | None:
        """Where the samples lie in a tensor, None if it does not depend on the batch."""
        return self.find_known_layout(tensor) if self._audit is None else self._audit.find_layout(tensor)

    def is_known(self, tensor: Tensor) -> bool:
        """Whether `set_layout` was called for a tensor."""
        return tensor in self._known

    def get_known(self, tensor: Tensor) -> Where | None:
        """The layout that was set for a tensor, None if there is none."""
        known = self._known.get(tensor)
        return None if known is None else known[0]

    def iterate_known(self) -> Iterator[tuple[Tensor, tuple[Where | None, bool]]]:
        """The tensors that are alive and have a layout; whether they required grad when it was set."""
        return self._known.items()

    def add_known(self, entries: Mapping[int, Any]) -> None:
        """Add layouts of tensors, in the form of `TensorMap.entries`."""
        self._known.entries.update(entries)

    def forget(self, tensor: Tensor) -> None:
        """Forget the layout of a tensor."""
        if tensor in self._known:
            del self._known.entries[id(tensor)]

    def forget_known(self, entries: Mapping[int, Any]) -> None:
        """Forget the layouts of the tensors in `entries`, also where another one was set since."""
        known = self._known.entries
        for key, entry in entries.items():
            found = known.get(key)
            if found is not None and (found is entry or found[0]() is entry[0]()):
                del known[key]

    def check_state(self) -> None:
        """Refuse samples in parameters and buffers, if steps are isolated."""
        if self.isolation is not None:
            with _torch.DisableTorchFunction():
                self.isolation.check_state(self, self._audit)

    def check_gradient(self, output: Tensor, gradient: Tensor) -> None:
        """Refuse constants that differ between samples as the gradient of an output, if steps are isolated."""
        if self.places is None or output.shape != gradient.shape:
            return
        layout = self.find_layout(output)
        if isinstance(layout, Layout):
            call = make_call(Tensor.backward, (output, gradient), {}, self.batch, self.find_layout)
            self.places.check(call, Motion((layout,), ((1, layout),)), self)

    def find_known_layout(self, tensor: Tensor) -> Where | None:
        """`find_layout`, as far as torch functions show it."""
        known = self._known.get(tensor)
        if known is None:
            if tensor.is_nested:
                self.refuse_nested()
            base = tensor._base
            if base is not None and (of_base := self._known.get(base)) is not None:
                layout = self.find_layout_of_view(tensor, base, of_base[0])
                self._check_backward(tensor, layout)
                return layout
            if tensor.grad_fn is None:
                if tensor.requires_grad and id(tensor) not in self.collector.parameters:
                    self.can_retain = False  # no tap is behind what is computed from it
                return None if self.is_inside or self.outside is None else self._find_outside_layout(tensor)
            return self._find_unseen_layout(tensor)
        layout, had_grad = known
        if not had_grad and layout is not None and tensor.requires_grad:
            if tensor.grad_fn is None:  # requires_grad_(): a use of it has no tap behind its activations
                self.can_retain = False
            else:
                self._check_custom_function(tensor, layout)
        self._check_backward(tensor, layout)
        return layout

    def refuse_nested(self) -> NoReturn:
        """Raise: a nested tensor was met."""
        raise PerSampleError(
            f"A nested tensor is used in {self.place()}. Samples in nested tensors are not followed. Use padded "
            f"tensors with a mask, or packed sequences. {ROWS_ADVICE}"
        )

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor that does not depend on the batch is a parameter, or computed from parameters."""
        if id(tensor) in self.collector.parameters:
            return tensor.requires_grad
        return tensor.requires_grad and (self._known.get(tensor) or _UNKNOWN)[0] is None

    def set_layout(self, tensor: Tensor, layout: Where | None) -> None:
        """Set where the samples lie in a tensor; None: nowhere, it was computed from weights alone."""
        if isinstance(layout, (Lost, Reduced)) and not layout.place:
            # A loss outside the model is in none of its modules: skip the search through the stack in each step.
            is_searched = self.is_inside or isinstance(layout, Lost)
            place = self.place() if is_searched else ELSEWHERE
            if isinstance(layout, Lost) and self.outside is not None and not self.is_inside:
                place += self.outside.describe_assumed()
            layout = replace(layout, place=place)
        if self.is_coupled:
            layout = own_tensor(tensor, layout, self.batch)
        if isinstance(layout, Lost) and tensor.grad_fn is not None and not isinstance(layout, (Scattered, Divided)):
            tensor.register_hook(self._make_refusal(f"{layout.cause}, in {layout.place}"))
        if isinstance(layout, Reduced) and self.note_loss is not None and tensor.grad_fn is not None:
            watch_sum(tensor, layout, self.collector.anchor_node, self.note_loss)
        save_layout(self.saved_layouts, tensor, layout)
        self._known[tensor] = (layout, has_grad := tensor.requires_grad)
        if has_grad and tensor.grad_fn is None:  # rand_like(x, requires_grad=True)
            self.can_retain = False

    def place(self) -> str:
        """The module whose code is running, in words."""
        if self._module_names is None:
            modules = () if self.model is None else self.model.named_modules()
            self._module_names = WeakKeyDictionary({module: name for name, module in modules})
        return find_place(self._module_names)

    # ---- each op ----

    @exclude_from_graph
    @skip_compilation(with_callees=True)
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        if func in WITHOUT_TENSORS:
            result = func(*args, **kwargs)
            if not self.is_inside and self.outside is not None:
                self.outside.note_size(result)
            return result
        if self.has_ended or self.is_paused:
            if func is torch.autograd.grad and self.complain is not None and not self.is_paused:
                return self._run_autograd_grad(args, kwargs)
            return func(*args, **kwargs, **find_dropped(func))
        before = None if self.complain is None else Written(func, args, kwargs)
        try:
            if func in SIZE_FREE:
                return self._run_size_free(func, args, kwargs)
            if func in _DIFFERENTIATING:
                if func is torch.autograd.grad:
                    return self._run_autograd_grad(args, kwargs)
                if self.run_backward is not None:
                    return self.run_backward(func, args, kwargs)
            return self._audit_or_follow(func, args, kwargs)
        except PerSampleError as error:
            if before is None:
                raise
            return self._give_up(error, before, func, args, kwargs)

    def _give_up(
        self,
        error: PerSampleError,
        before: Written,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Give up the recording because of a call that was refused; the call gets its ordinary result."""
        assert self.complain is not None
        self.complain(error)
        if func in _DIFFERENTIATING:  # the weights are not in the graph, and another run would not find them
            raise error
        if before.has_changed():  # it has run, and must not run again
            if any(map(self.is_weight, find_tensors((args[1:], kwargs)))):  # with its weights detached
                raise error
            return None if func is Tensor.__setitem__ else before.tensor
        before.restore_statistics()
        return func(*args, **kwargs, **find_dropped(func))

    def _audit_or_follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follow a call as in an audited pass; audit the rest of the pass if no audited pass had it here."""
        node = self._audit_node
        if node is None or (following := node.get(func)) is None:
            return (self._audit or self._start_audit()).run(func, args, kwargs)
        self._audit_node = following
        if func in BY_SHAPE and not kwargs and self.batch > 1:
            result = self._run_by_shape(func, args)
            if result is not None:
                return result
        return self._follow_call(func, args, kwargs, self.find_known_layout, None)

    def follow(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        find_layout: Callable[[Tensor], Where | None],
    ) -> Any:
        """Run a torch function in an audited pass; `find_layout` says where the samples lie in an argument."""
        quick = None
        if self.batch > 1 and func in SIZE_FREE:
            rows = 0 if self.places is None else self.batch
            quick = make_key(func, args, kwargs, self._known.entries, self.collector.parameters, self.is_inside, rows)
        return self._follow_call(func, args, kwargs, find_layout, quick)

    def _follow_call(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        find_layout: Callable[[Tensor], Where | None],
        quick: tuple[Key, int] | None,
    ) -> Any:
        """Run a torch function on the general path. `quick` is its key without shapes, None if it has none."""
        call = make_call(func, args, kwargs, self.batch, find_layout, self._counted)
        # Calls of other functions with the same key, including shapes, move the samples in the same way.
        motion = CACHE.get(call.key)
        if motion is not None and torch.is_grad_enabled():
            if self.isolation is not None and (motion.simple is not None or motion.use is not None):
                self.isolation.check_call(call, self)
                self.isolation.places.check(call, motion, self)
            if (simple := find_simple_layout(call, motion)) is not None:
                result = func(*args, **kwargs)
                if isinstance(result, Tensor):  # not so for `x.grad` if there is none now
                    self.set_layout(result, simple)
                    if type(simple) is Reduced and self._counted.holds_divisors:
                        self._summed[result] = replace(self._make_summed(call), made=simple)
                    if quick is not None:
                        self._keep_quick_call(quick, call, result)
                return result
            if motion.use is not None and func not in UPDATING and can_repeat(call, motion.use, self):
                is_checkpointed = prepare_recomputation(self)
                result = repeat_use(args, kwargs, motion.use, self, is_checkpointed)
                self.set_layout(result, motion.results[0])
                if quick is not None:
                    self._keep_quick_call(quick, call, result)
                return result
        call = self._without_unread_tensor(call, find_layout)
        result = self._run(call)
        if quick is not None:
            self._keep_quick_call(quick, call, result)
        return result

    # ---- the hot path ----

    def _run_size_free(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function whose motion may be free of sizes. Most calls end here: as few calls of Python as possible."""
        node = self._audit_node
        if node is None or (following := node.get(func)) is None:
            return (self._audit or self._start_audit()).run(func, args, kwargs)
        self._audit_node = following
        if self.batch < 2:
            return self._follow_call(func, args, kwargs, self.find_known_layout, None)
        entries, parameters = self._known.entries, self.collector.parameters
        repeat = following.repeat
        if repeat is not None and torch.is_grad_enabled() and repeat.matches(args, kwargs, entries, parameters):
            return self._repeat_call(func, args, kwargs, repeat.quick)
        rows = 0 if self.places is None else self.batch
        quick = make_key(func, args, kwargs, entries, parameters, self.is_inside, rows)
        if quick is None:
            return self._follow_call(func, args, kwargs, self.find_known_layout, None)
        key, contents = quick
        if torch.is_grad_enabled() or not (contents & HAS_PARAMETERS or self._of_hidden_weights.entries):
            known = QUICK_CALLS.get(key)
            if known is not None and known.changes == count_rule_changes():  # a call like one that was followed before
                if torch.is_grad_enabled():
                    note_repeat(following, known, args, kwargs, entries, parameters)
                return self._repeat_call(func, args, kwargs, known)
            if not contents and not is_inplace(func) and not (rows and func in RANDOM):  # constants alone
                return func(*args, **kwargs)
        return self._follow_call(func, args, kwargs, self.find_known_layout, quick)

    def _repeat_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: QuickCall) -> Any:
        """Run a call that has the same effect as one that was followed before."""
        is_checkpointed = get_saved_tensor_hooks() is not None and prepare_recomputation(self)
        if known.plan is None:
            result = func(*args, **kwargs)
        else:
            result = repeat_use(args, kwargs, known.plan, self, is_checkpointed)
        if type(result) is Tensor and not is_checkpointed:  # as `_note`, without the call of a function
            self._known.entries[id(result)] = (ref(result), (known.layout, result.requires_grad))
        else:
            for each in [result] if isinstance(result, Tensor) else result:
                self._note(each, known.layout)
        return result

    def _run_by_shape(self, func: Any, args: tuple[Any, ...]) -> Tensor | None:
        """Run a function of one tensor whose motion follows from shapes; None, without running it, if it does not."""
        tensor = args[0]
        found = self._known.get(tensor)
        if found is None and not self.is_inside:  # a tensor from outside may be judged now
            self.find_known_layout(tensor)
            found = self._known.get(tensor)
        if found is None or type(layout := found[0]) is not Layout or not layout.is_pattern:
            return None
        is_hidden = bool(self._of_hidden_weights) and not torch.is_grad_enabled()
        if is_hidden or (tensor.requires_grad and not found[1]):  # the latter: a leaf, or made by an autograd.Function
            return None
        find, shape = BY_SHAPE[func], tensor.shape
        if func is Tensor.__getitem__:
            moved = find(layout, shape, (), args[1:], self.batch)
            if moved is None:
                return None
            result = func(*args)
        else:
            if any([isinstance(arg, Tensor) for arg in args[1:]]):
                return None
            result = func(*args)
            moved = find(layout, shape, result.shape, args[1:], self.batch)
        if moved is None:
            self._follow(make_call(func, args, {}, self.batch, self.find_layout, self._counted), result)
        else:
            self._note(result, moved)
        return result

    def _note(self, tensor: Tensor, layout: Layout) -> None:
        """`set_layout` for a layout of samples."""
        self._known.entries[id(tensor)] = (ref(tensor), (layout, tensor.requires_grad))
        save_layout(self.saved_layouts, tensor, layout)

    def _keep_quick_call(self, quick: tuple[Key, int], call: Call, result: Any) -> None:
        """After a call on the general path: keep what it did, if later calls with its key do the same."""
        key, contents = quick
        if not contents & HAS_SAMPLES or isinstance(get_handler(call.func), Rewrite) or not torch.is_grad_enabled():
            return
        if call.func in UPDATING and get_argument(call, 5, "training", "use_input_stats", default=True):
            return
        results = find_results(result, call.args)
        layout = find_size_free_layout(call, results)
        if layout is None or not self._knows(results, layout):
            return
        if call.is_inplace or call.kwargs.get("requires_grad"):  # the audit compares what was written
            return
        plan = None
        if contents & HAS_PARAMETERS:
            motion = CACHE.get(call.key)
            plan = motion.use if motion is not None else None
            if plan is None or not has_fixed_weights(call, plan, layout, results[0]):
                return
        elif not all(isinstance(each, Tensor) for each in (result if isinstance(result, (tuple, list)) else [result])):
            return
        add_quick_call(key, layout, plan)

    def _knows(self, results: Sequence[Tensor], layout: Layout) -> bool:
        return all((self._known.get(each) or _UNKNOWN)[0] == layout for each in results)

    # ---- the general path ----

    def _without_unread_tensor(self, call: Call, find_layout: Callable[[Tensor], Where | None]) -> Call:
        """The same call without a second tensor of which only the dtype and device, or the shape, is read."""
        args: tuple[Any, ...]
        if call.func in _TYPED and len(call.tensors) > 1:
            func, args, kwargs = Tensor.to, (call.args[0], call.tensors[1].device, call.tensors[1].dtype), call.kwargs
        elif call.func in _SHAPED and not (call.func is Tensor.expand_as and self.is_weight(call.tensors[0])):
            func, args, kwargs = _SHAPED[call.func], (call.tensors[0], call.tensors[1].shape), {}
        elif self.outside is not None and call.func in CLASS_WEIGHTS:
            return self.outside.read_class_weights(call)
        elif self.outside is not None and self.outside.has_reads and self.isolation is None:
            return self.outside.read_indices(call)
        else:
            return call
        return make_call(func, args, kwargs, self.batch, find_layout, self._counted)

    def _run(self, call: Call) -> Any:
        """Run an op: a rewrite, a use, an op of weights alone, or an op without weights."""
        if dropped := find_dropped(call.func):
            return self._run_op_by_op(call, dropped)
        has_samples = any(call.where)
        if (call.is_inplace or call.func in _REPLACING) and not self._is_audited_write(call):
            return self._start_audit().follow(call.func, call.args, call.kwargs)
        prepare = PREPARATIONS.get(call.func)
        if prepare is not None:
            call = prepare(call)
        handler = get_handler(call.func)
        if has_samples and isinstance(handler, Rewrite):
            with self:
                result = handler.function(*call.args, **call.kwargs)
            if result is not NotImplemented:
                return result
        if has_samples and any([type(where) is Scattered for where in call.where]):
            with self:
                result = use_by_rows(call, self.find_layout)
            if result is not NotImplemented:
                return result
        if has_samples and handler is None and is_composite(call.func):
            with self:
                return make_inline(call.func)(*call.args, **call.kwargs)
        if self.isolation is not None and has_samples:
            self.isolation.check_call(call, self)
            self.isolation.places.prepare(call)
        weights = {i: t for i, t in enumerate(call.tensors) if call.where[i] is None and self.is_weight(t)}
        if weights and not has_samples and self._is_start(call, weights):
            return self._audit_or_follow(call.func, call.args, call.kwargs)
        if weights and call.func in REGISTRATIONS:
            raise PerSampleError(
                f"{get_op_name(call.func)} of a weight is called in {self.place()}: a recording keeps the gradients of "
                "weights per sample, and the hook would not run. Change the recorded gradients instead."
            )
        if call.func is Tensor.register_hook and isinstance(call.where[0], Layout) and not self.is_coupled:
            hook = follow_tensor_hook(call.args[1], call.where[0], self.place(), self)
            return call.func(call.args[0], hook)
        if weights and has_samples and torch.is_grad_enabled():
            if self._counted.holds_divisors and is_beside_sum(call) and not scales_statistic(call):
                return self._run_beside_sum(call, weights)
            return self._run_use(call, weights)
        self._save_buffers(call)
        func, args, kwargs = call.func, call.args, call.kwargs
        if func in MOVES and call.is_inplace:  # its argument has another shape afterwards
            unchanged = call.tensors[0].detach()
            call = replace(call, args=(unchanged, *args[1:]), tensors=(unchanged, *call.tensors[1:]))
        if weights and not has_samples:
            with self.processes.saving_weights():
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if func is Tensor.retain_grad:  # from now on the gradient of the tensor is the user's
            self.collector.release(call.tensors[0])
        if not torch.is_grad_enabled() and (weights or any(t in self._of_hidden_weights for t in call.tensors)):
            for made in find_tensors(result):
                self._of_hidden_weights[made] = True
        if has_samples and func in READS:
            self._counted.add(result)
            self._counted.totals.update(find_read_total(call.tensors[0], call.where[0], result))
            self.number_of_reads += self.batch > 1 or isinstance(call.where[0], (Lost, Reduced))
            if type(result) is bool:
                self._note_decision(call, result)
            elif self.is_inside:
                self._has_read_values |= call.tensors[0].is_floating_point()
            elif self.outside is not None:
                self.outside.has_reads = True
        elif has_samples:
            if type(result) is bool:
                self._note_decision(call, result)
            self._follow(call, result)
            self._note_statistics(call)
            if isinstance(handler, Rewrite) or weights or func in UPDATING or func in DROPPED:
                return result
            if func is not Tensor.__getitem__ or not selects_first_rows(call.where[0], args[1], self.batch):
                mark_simple(call, result)  # the values of the first rows decide in each call
        elif weights and (self.batch or torch.is_grad_enabled()):
            for made in find_tensors(result):
                if made.requires_grad and id(made) not in self.collector.parameters:
                    self.set_layout(made, None)
                elif self.outside is not None and not made.requires_grad:  # as by detach(): no samples, of any size
                    self.outside.add_constant(made)
        elif self.outside is not None:
            for weight in weights.values():  # in a pass without gradients, before the model is called
                self.outside.add_constant(weight)
            self.outside.note_call(call, result, self.batch, self.is_inside)
            if self.outside.has_reads and func in IMPORTS and not self.is_inside and self.batch > 1:
                lost = self.outside.judge_import(result, self.batch)
                if lost is not None:
                    self.set_layout(result, lost)
        if self.places is not None and not has_samples:
            self.places.note_constant(call, result)
        return result

    def _is_start(self, call: Call, weights: Mapping[int, Tensor]) -> bool:
        """Whether an op of weights outside of calls of modules has tensors of samples, as is known from now on."""
        if self.start_by_use is None or self.is_inside or not torch.is_grad_enabled():
            return False
        if call.func in _COMPARING or call.func in READS:
            return False
        # A tensor that is combined with a weight entry by entry is no batch: pretrained weights, a running average.
        shapes = {w.shape for w in weights.values()} if is_pointwise(call.func) or call.func in _ENTRYWISE else set()
        others = [i for i, t in enumerate(call.tensors) if i not in weights and t.shape not in shapes]
        return bool(others) and self.start_by_use(replace(call, tensors=tuple(call.tensors[i] for i in others)))

    def _note_decision(self, call: Call, result: bool) -> None:
        of_all = call.func in _COMPARING or any(isinstance(where, (Lost, Reduced)) for where in call.where)
        if of_all:
            self.number_of_reads += 1
        if of_all and self.is_inside:
            self._decisions.append(result)

    def _is_audited_write(self, call: Call) -> bool:
        """Whether a write is like one in an audited pass: with samples in the same arguments."""
        key = tuple([where is not None for where in call.where])
        if self._audit is not None:
            self._audit.advance(key)
            return True
        following = self._audit_node.get(key)
        if following is None:
            return False
        self._audit_node = following
        return True

    def _run_beside_sum(self, call: Call, weights: dict[int, Tensor]) -> Any:
        summed = self._make_summed(call)
        result = run_beside_sum(call, weights, self)
        if call.func not in BILINEAR:
            self._follow(call, result, summed)
            return result
        where = next(where for where in call.where if isinstance(where, Reduced))
        self.set_layout(result, where)
        self._summed[result] = replace(summed, made=where)
        return result

    def _make_summed(self, call: Call) -> Summed:
        """How a call is about to make a sum over the samples; `made` is to be set."""
        versions = tuple([0 if t.is_inference() else t._version for t in call.tensors])
        return Summed(call, versions, tuple(map(self._summed.get, call.tensors)))

    def get_summed(self, tensor: Tensor) -> Summed | None:
        """How a sum over the samples was computed, in this pass."""
        return self._summed.get(tensor)

    def _run_use(self, call: Call, weights: dict[int, Tensor]) -> Any:
        self._save_buffers(call)
        if self.is_coupled:
            call = prepare_use(call, self.place())
        handler, rules = get_handler(call.func), get_rules(call.func)
        adapter = find_adapter(handler)
        if not rules and adapter is None and isinstance(call.func, FunctionType):
            return self._run_op_by_op(call)
        if adapter is not None:
            check_not_mixed(call, self)
            result = adapter(self, handler, call, weights)
            self._follow(call, result)
            self._note_statistics(call)
            return result
        prepare_recomputation(self)
        result, motion = run_use(call, weights, rules, self)
        if motion.is_tried:
            self.tried.add(call.func, self.place())
        if self.places is not None:
            self.places.check(call, motion, self)
        for made, layout in zip(find_results(result, call.args), motion.results, strict=True):
            self.set_layout(made, layout)
        self._note_statistics(call)
        return result

    def find_use_motion(self, call: Call, results: Sequence[Tensor]) -> tuple[Call, Motion]:
        """How a use moves the samples, and the call with the samples that own the rows of its results."""
        return find_owners(call, results) if self.is_coupled else (call, find_motion(call, results))

    def _run_op_by_op(self, call: Call, dropped: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """Run a Python function of torch op by op, with an argument that torch has not handed over."""
        if "out" in dropped:
            raise PerSampleError(
                f"{get_op_name(call.func)}(out=...) is called in {self.place()}: torch does not pass `out` on to "
                "function modes, by which a recording follows the samples. Assign the result instead."
            )
        with self:
            return make_inline(call.func)(*call.args, **call.kwargs, **dropped)

    def _follow(self, call: Call, result: Any, summed: Summed | None = None) -> None:
        """Find the layout of each result. `summed`: how the call adds up samples, if it changes its arguments."""
        results = find_results(result, call.args) if result is not None or call.is_inplace else ()
        if not results or call.func in _UNCHANGING:
            return
        self._counted.sizes = None if self.is_inside or self.outside is None else self.outside.sizes
        motion = find_coupled_motion(call, results) if self.is_coupled else find_motion(call, results)
        if motion.is_tried:
            self.tried.add(call.func, self.place())
        if self.places is not None:
            self.places.check(call, motion, self)
        for made, layout in zip(results, motion.results, strict=True):
            if not self.is_inside:
                self._counted.totals.update(find_listed_total(made, layout))
            if call.is_inplace and made._base is not None and (layout != call.where[0] or type(layout) is Lost):
                self._update_base(made, layout)  # a lost view may have a base that is not: rows chosen by position
            if layout is not None or made._base is not None:
                self.set_layout(made, layout)
                if type(layout) is Reduced and made.requires_grad and self._counted.holds_divisors:
                    self._summed[made] = replace(summed or self._make_summed(call), made=layout)
            elif not self.is_inside:
                self.add_constant(made)

    def _run_autograd_grad(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`autograd.grad` of something else than parameters; it leaves no per-sample gradients."""
        inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
        if any(id(t) in self.collector.parameters for t in find_tensors(inputs)):
            if self.complain is not None:
                run_backward = self.run_backward if self.run_backward and not self.has_ended else _run
                found = compute_parameter_gradients(run_backward, self.collector.parameters, args, kwargs)
                if found is not None:
                    return found
            raise make_refusal(self.name_parameters(inputs), args, kwargs)
        if self.has_ended:
            return torch.autograd.grad(*args, **kwargs)
        try:
            result = self._audit_or_follow(torch.autograd.grad, args, kwargs)
            if args[4] if len(args) > 4 else kwargs.get("create_graph"):
                self.collector.refuse_second_derivatives()
            return result
        finally:
            self.collector.forget_gradients(is_graph_kept=True)

    # ---- views ----

    def _update_base(self, view: Tensor, layout: Where | None) -> None:
        """Update the layout of a base after a write through one of its views."""
        base = view._base
        assert base is not None
        if not isinstance(layout, (Lost, Reduced)) or isinstance(layout, Scattered):
            with tracing.suspend():
                ids = make_strided_ids(base, (self._known.get(base) or _UNKNOWN)[0], self.batch)
                of_view = ids.as_strided(view.shape, view.stride(), view.storage_offset())
                of_view.copy_(make_sample_ids(view, layout, self.batch))
                is_loose = isinstance(layout, (Layout, Scattered)) and layout.loose
                layout = find_layout_of_ids(ids, self.batch, is_loose)
        self.set_layout(base, layout)

    def find_layout_of_view(self, view: Tensor, base: Tensor, layout: Where | None) -> Where | None:
        """The layout of a view that was made before samples were written into its base."""
        if not isinstance(layout, (Layout, Scattered)):
            return None if isinstance(layout, Lost) and layout.listing else layout
        with tracing.suspend():
            ids = make_strided_ids(base, layout, self.batch)
            return find_layout_of_ids(
                ids.as_strided(view.shape, view.stride(), view.storage_offset()), self.batch, layout.loose
            )

    # ---- buffers ----

    @cached_property
    def _buffers(self) -> dict[int | None, Tensor]:
        """The model's buffers by their memory, which views of them share."""
        return {} if self.model is None else {_torch.find_storage_id(b): b for b in self.model.buffers()}

    def is_buffer(self, tensor: Tensor) -> bool:
        """Whether a tensor is a buffer of the model."""
        return self._buffers.get(_torch.find_storage_id(tensor)) is tensor

    def _save_buffers(self, call: Call) -> None:
        """Copy the model's buffers before an op changes them, for `restore_buffers`."""
        if (call.is_inplace or call.func in UPDATING or call.func in _REPLACING) and self._buffers:
            for key in map(_torch.find_storage_id, call.tensors):
                if key in self._buffers and key not in self._buffers_before:
                    self._buffers_before[key] = self._buffers[key].clone()

    def _note_statistics(self, call: Call) -> None:
        """After a norm layer with running statistics: these hold samples, if it updates them."""
        if self.isolation is None or call.func not in UPDATING:
            return
        if not get_argument(call, 5, "training", "use_input_stats", default=call.func is nn.functional.instance_norm):
            return
        first = 3 if call.func in (torch.batch_norm, torch.instance_norm) else 1
        for position, name in ((first, "running_mean"), (first + 1, "running_var")):
            statistic = get_argument(call, position, name)
            if isinstance(statistic, Tensor):
                self.set_layout(statistic, Lost(f"{get_op_name(call.func)} adds the samples to running statistics"))

    def restore_buffers(self) -> None:
        """Give the model's buffers the values that they had before the forward pass."""
        with torch.no_grad():
            for key, before in self._buffers_before.items():
                self._buffers[key].copy_(before)
        if self.isolation is not None:
            self.isolation.restore_buffers()
            if self._audit is not None:
                self._audit.note_finding()  # else the refused sequence would count as audited

    # ---- tensors that no mode sees being made ----

    def _check_custom_function(self, tensor: Tensor, layout: Where) -> None:
        """Refuse an `autograd.Function` that uses weights.

        Its result was computed without grad, as far as the mode can see, and has a `grad_fn` now.
        """
        if not prepare_reentrant(self, tensor.grad_fn):
            self._refuse_hidden_weight(tensor)
            if tensor in self._of_hidden_weights:
                raise PerSampleError(
                    f"{type(tensor.grad_fn).__name__}, an autograd.Function called in {self.place()}, uses weights "
                    "that the recording cannot see (a reversible layer, or its own kind of checkpoint): their "
                    "gradients would arrive as a sum over the batch. Use torch.utils.checkpoint, or turn it off. "
                    f"{ROWS_ADVICE}"
                )
        elif self.collector.early:
            raise PerSampleError(
                "A reentrant checkpoint runs a backward pass of its own, in which not all uses of a weight are known. "
                "Checkpoint with use_reentrant=False, or record with keep='everything'."
            )
        self.set_layout(tensor, layout)

    def _check_backward(self, tensor: Tensor, layout: Where | None) -> None:
        """In an audited pass: have the backward of an `autograd.Function` checked, which may mix samples."""
        node = tensor.grad_fn
        if self._audit is None or not isinstance(node, BackwardCFunction) or not isinstance(layout, Layout):
            return
        if self.is_coupled:
            return
        if self.batch > 1 and node not in self._checked_nodes and not is_tap(node):
            self._checked_nodes.add(node)
            check_custom_backward(tensor, layout, self)

    def _find_unseen_layout(self, tensor: Tensor) -> Where | None:
        """The layout of a tensor with a `grad_fn` that the tracker did not see being made."""
        if any(map(is_tap, find_nodes(tensor))):
            self._refuse_hidden_weight(tensor)
            name = type(tensor.grad_fn).__name__
            lost = Lost(f"{name} made a tensor of shape {tuple(tensor.shape)} without a torch function")
            self.set_layout(tensor, lost)
            return lost
        if self._find_parameters_behind(tensor):
            self.processes.check_saved(tensor)
            self.set_layout(tensor, None)
        else:
            self.can_retain = False
        return None

    def has_parameters_behind(self, tensor: Tensor) -> bool:
        """Whether a backward pass from a tensor would reach parameters other than through a tap."""
        return bool(self._find_parameters_behind(tensor))

    def _find_parameters_behind(self, tensor: Tensor) -> list[Tensor]:
        return [leaf for leaf in find_leaves(tensor) if id(leaf) in self.collector.parameters]

    def name_parameters(self, value: Any) -> list[str]:
        """The names of the parameters among some tensors."""
        names = {} if self.model is None else {id(p): name for name, p in self.model.named_parameters()}
        return [names.get(id(t), "?") for t in find_tensors(value) if id(t) in self.collector.parameters]

    def _refuse_hidden_weight(self, tensor: Tensor) -> None:
        hidden = self._find_parameters_behind(tensor)
        if hidden:
            raise PerSampleError(
                f"{type(tensor.grad_fn).__name__}, an autograd.Function called in {self.place()}, uses the parameter "
                f"'{self.name_parameters(hidden)[0]}' together with samples: its gradient arrives as a sum over the "
                "batch. Write the function with torch functions, or make it a torch function (torch.overrides) and "
                f"register a rule for it with persample.register_rule. {ROWS_ADVICE}"
            )

    def _find_outside_layout(self, tensor: Tensor) -> Where | None:
        """The layout of a tensor that the code around the model uses, and that the tracker has not seen before."""
        assert self.outside is not None
        is_recomputation = _torch.get_backward_pass() >= 0
        if self.batch < 2 or tensor.requires_grad or is_recomputation:
            return None
        layout = self.outside.find_layout(tensor, self.batch)
        if layout is not None:
            self._known[tensor] = (layout, False)
            self.note_given(tensor)
            if self.isolation is not None:
                self.isolation.note_given(tensor)
        return layout

    # ---- outputs ----

    def guard_output(self, output: Tensor) -> Tensor:
        """An output of the model that refuses gradients if it belongs to no sample."""
        layout = self.find_layout(output)
        if isinstance(layout, Reduced) and output.dim() and output.grad_fn is not None:
            output.register_hook(self._make_refusal(f"{layout.cause}, in {layout.place}"))
        if layout is None and self.is_weight(output):
            if output.dim() and output.shape[0] == self.batch > 1 and output.stride(0) == 0:
                return self._give_to_each_sample(output)
            output = output.view_as(output) if output.is_leaf else output
            output.register_hook(self._make_refusal("it was computed from weights alone"))
        return output

    def _give_to_each_sample(self, output: Tensor) -> Tensor:
        """A tensor of weights that was expanded to the batch, with row n as sample n's."""
        call = Call(Tensor.clone, (output,), {}, (output,), (None,), self.batch)
        return run_use(call, {0: output}, (), self, Motion((Layout(0),)))[0]

    def _make_refusal(self, cause: str) -> Callable[[Tensor], None]:
        advice, complain = self.advice, self.complain  # not self: the hook must not keep the tracker alive

        def refuse(grad: Tensor) -> None:
            message = f"The loss depends on a tensor in which the samples of the batch are mixed: {cause}. {advice}"
            raise_or_complain(SamplesMixed(message), complain)

        return refuse
