"""The function mode that follows the samples through every op of a forward pass and finds the uses of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from persample import _torch
from persample._internal import tracing
from persample._internal.dynamo import disable_compilation, exclude_from_graph, skip_compilation
from persample._internal.facts import all_with, facts
from persample._internal.functions import find_dropped, is_inplace
from persample._internal.models import read_model
from persample._internal.tree import find_tensors
from persample._torch import get_saved_tensor_hooks
from persample.backward import Collector, compute_parameter_gradients, make_refusal
from persample.distributed import Processes
from persample.errors import (
    ELSEWHERE,
    ROWS_ADVICE,
    Complain,
    PerSampleError,
    SamplesMixed,
    find_place,
)
from persample.forward.checkpointing import SavedLayouts, prepare_recomputation, save_layout
from persample.forward.contributions import find_owners, make_advice, own_tensor
from persample.forward.fastpath import WholeModules
from persample.forward.isolation import Isolation
from persample.forward.known_tensors import TensorMap
from persample.forward.loss_code import guard_node
from persample.forward.outputs import make_gradient_refusal
from persample.forward.outside import OutsideTensors
from persample.forward.path import Path
from persample.forward.program import Site
from persample.forward.progress import Progress, Stage
from persample.forward.roots import NoteLoss, watch_sum
from persample.forward.steps import NEXT, follow, set_layouts, without_unread_tensor
from persample.forward.tried import TriedFunctions
from persample.forward.unseen import check_backward, check_custom_function, find_unseen_layout, name_parameters
from persample.forward.use import WITHOUT_TENSORS, Use, keep_effect, repeat_use
from persample.forward.written import Buffers, Written
from persample.layouts import (
    BY_SHAPE,
    HAS_PARAMETERS,
    MEMO,
    SIZE_FREE,
    Call,
    CountedSizes,
    Crossed,
    Divided,
    DivisorMode,
    Effect,
    Key,
    Layout,
    Lost,
    Motion,
    Reduced,
    SampleUnits,
    Scattered,
    SizesRead,
    Summed,
    Where,
    add_samples_to_layout,
    find_layout_of_base,
    find_layout_of_view,
    find_motion_with_units,
    find_plain_layout,
    lose_entries,
    make_call,
    make_size_free_key,
)
from persample.rules import RULES_VERSION

# Called in place of `Tensor.backward`, with the function, its args and its kwargs.
RunBackward = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

# Called with an op that combines weights with other tensors, none of which is known to depend on the batch, outside of
# calls of modules; returns whether some are samples, as the tracker knows then.
StartByUse = Callable[[Call], bool]

_NOTHING_READ = SizesRead()

_DIFFERENTIATING = all_with("differentiates")

_GRAD_FN: Any = Tensor.grad_fn.__get__  # type: ignore[union-attr]

_UNKNOWN = (Lost("the tracker has not seen it"), False)


def _is_refused(where: Where | None) -> bool:
    """Whether a gradient that comes back through a tensor is refused."""
    return isinstance(where, Lost) and not isinstance(where, (Scattered, Divided))


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
        loss_reduction: how the loss combines the samples, if the user has said so.
        advice: what to do about samples that are mixed, for errors.
        processes: the processes that share the batch.
        note_loss: called in each backward pass with the sum over the samples that the pass starts from.
        outside: decides about tensors that the code around the model uses; by default they are constants.
        note_outside: called with each tensor from outside.
        isolation: what private training refuses besides: numbers of samples in the batch, samples of other steps.
        complain: takes refusals in place of raising them, and ends the recording.
        is_coupled: samples may influence each other; what the tracker follows is who owns each row.
        divisors: what is done with divisors of the loss that are counted over all samples.
        can_retain: whether small uses may do without a tap.
        tried: is told of functions that are tried.
        modules: the modules of the model, if the caller has just searched it.
    """

    def __init__(
        self,
        collector: Collector,
        model: nn.Module | None = None,
        *,
        batch: int = 0,
        loss_reduction: str | None = None,
        advice: str | None = None,
        processes: Processes | None = None,
        note_loss: NoteLoss | None = None,
        outside: OutsideTensors | None = None,
        note_outside: Callable[[Tensor], None] = _do_nothing,
        isolation: Isolation | None = None,
        complain: Complain | None = None,
        is_coupled: bool = False,
        divisors: DivisorMode = "refuse",
        can_retain: bool = False,
        tried: TriedFunctions | None = None,
        modules: list[nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.batch = batch
        self.collector = collector
        self._model = None if model is None else ref(model)  # the mode of a dropped model must not keep it
        self.loss_reduction = loss_reduction or "sum"  # for rules in the convention of expanded weights
        self.processes = processes or Processes()
        self.run_backward: RunBackward | None = None
        self.note_loss = note_loss
        self.outside = outside
        self.note_outside = note_outside
        self.isolation = isolation
        self.complain = complain
        self.is_coupled = is_coupled
        self.start_by_use: StartByUse | None = None
        self.places = None if isolation is None else isolation.places
        self.loss_code = None if isolation is None else isolation.loss_code
        self.advice = make_advice() if advice is None else advice
        self.has_inputs = False
        self.can_retain = can_retain
        self.progress = Progress(is_inside=batch > 0)
        self._mixed_use: SamplesMixed | None = None
        self.tried = TriedFunctions() if tried is None else tried
        self.saved_layouts: SavedLayouts = {}
        self._given: dict[int | None, StorageWeakRef] = {}  # memory of samples from outside
        self.path = Path(model, isolation is not None)
        scales = None if self.path.program is None else self.path.program.scales
        divisors = "refuse" if tracing.get_trace() is not None else divisors
        is_held = None if outside is None else outside.is_held
        self.counted = CountedSizes(divisors, scales, loss_reduction, is_held)
        self._module_names: WeakKeyDictionary[nn.Module, str] | None = None
        self._depth = 0
        self._sizes_read = SizesRead()  # right before the next call, by the code around the model
        self._whole_modules: WholeModules | None = None
        self._modules = modules  # until `start`: the tracker must not keep its model
        self.summed: TensorMap[Summed] = TensorMap()  # sums over the samples
        self.of_hidden_weights: TensorMap[bool] = TensorMap()  # computed from weights and samples without grad
        # The layout of a tensor, and whether the tensor required grad when the layout was found.
        self._known: TensorMap[tuple[Where | None, bool]] = TensorMap()
        if isolation is not None:
            isolation.start_step(self)

    @property
    def model(self) -> nn.Module | None:
        """The module whose forward is tracked, None if there is none or if it has been freed."""
        return None if self._model is None else self._model()

    @property
    def is_inside(self) -> bool:
        """Whether a call of the model runs, as far as is known."""
        return self.progress.stage is Stage.INSIDE

    @property
    def has_ended(self) -> bool:
        """Whether nothing is followed any more."""
        return self.progress.has_ended

    @property
    def anchor(self) -> Tensor:
        """The leaf that every tapped result depends on."""
        return self.collector.anchor

    def connect(self, run_backward: RunBackward | None, start_by_use: StartByUse | None) -> None:
        """Set what is called at a backward pass, and at a use of weights outside of modules; None breaks the cycles."""
        self.run_backward, self.start_by_use = run_backward, start_by_use

    # ---- entering and leaving ----

    def start(self) -> None:
        """Prepare the model and torch for tracking."""
        if self._depth == 0:
            self._uncompiled = disable_compilation()
            self._uncompiled.__enter__()
            if self.model is not None:
                modules, self._modules = self._modules, None
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

    def begin_audit(self) -> None:
        """Compare the functions from now on with those of audited passes, and audit what is new."""
        self.path.begin(self)

    def end_audit(self) -> None:
        """Let the functions that follow pass without an audit: the forward pass has ended."""
        self.summed = TensorMap()  # it keeps activations
        self.path.end()

    def find_hooked_modules(self) -> list[nn.Module]:
        """The modules of the model that have hooks on gradients."""
        return [] if self._whole_modules is None else self._whole_modules.with_hooks

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside the block, nothing is followed or audited: it runs passes that are not part of the recording."""
        with self.progress.pause(), self.path.pause():
            yield

    # ---- what is known about a tensor ----

    def forbid_retaining(self) -> None:
        """Put a tap on each use from now on: a tap may be missing behind its activations."""
        self.can_retain = False

    def add_advice(self, advice: str) -> None:
        """Say more in errors about mixed samples."""
        if advice not in self.advice:
            self.advice += advice

    def replace_advice(self, advice: str) -> None:
        """Say something else in errors about mixed samples."""
        self.advice = advice

    def note_mixed_use(self, error: SamplesMixed) -> None:
        """Note a use of weights on mixed samples, which is refused if the loss depends on it."""
        self._mixed_use = self._mixed_use or error

    def take_mixed_use(self) -> SamplesMixed | None:
        """The first use in this call of weights on mixed samples, which is forgotten."""
        found, self._mixed_use = self._mixed_use, None
        return found

    def start_batch(self, batch: int, arguments: Iterable[Tensor], units: SampleUnits | None) -> None:
        """Set the batch size, for a call of the model that is about to run with these arguments."""
        self.batch, arguments = batch, [*arguments]
        self.counted.start_batch(units)
        if self.outside is not None:
            self.counted.totals.update(self.outside.get_early_totals(batch))
            if self.isolation is None and self.counted.units is None:
                self.add_advice(self.outside.describe_repeats(arguments, batch))
            for tensor, layout in self.outside.take_early(arguments, batch):
                self._known[tensor] = (layout, tensor.requires_grad)
                if self.isolation is not None and isinstance(layout, Layout):
                    self.isolation.note_given(tensor)

    def grow(self, batch: int, advice: str) -> None:
        """Add samples to the batch. The samples so far keep their numbers. `advice` is added to errors from now on."""
        self.add_advice(advice)
        before, self.batch = self.batch, batch
        if self.outside is not None and self.outside.remembered is not None:
            self.outside.remembered.forget_step()
        for tensor, (where, had_grad) in list(self._known.items()):
            self._known[tensor] = (add_samples_to_layout(where, tensor.shape, before, batch), had_grad)
        for address, where in list(self.saved_layouts.items()):
            self.saved_layouts[address] = add_samples_to_layout(where, address[2], before, batch)
        self.path.grow(before, batch)

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
        self.counted.add_packed(ids, sizes)

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
        return self.path.find_layout(tensor, self.find_known_layout)

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
                self.isolation.check_state(self, self.path.audit)

    def check_backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """If steps are isolated: check what the code around the model has done, and what `backward` starts from."""
        if self.loss_code is None:
            return
        self.check_state()
        if any(_is_refused(self.find_known_layout(output)) for output in outputs):
            return
        for output, gradient in zip(outputs, gradients, strict=False):
            self._check_gradient(output, gradient)
        self.loss_code.check_backward((outputs, gradients), self)

    def _check_gradient(self, output: Tensor, gradient: Tensor) -> None:
        """Refuse gradients of an output that depend on several samples, and constants that differ between samples."""
        if isinstance(where := self.find_known_layout(gradient), (Lost, Reduced)):
            raise SamplesMixed(
                "The gradient that is passed to backward() was computed from the samples, and would change the "
                f"gradients of all of them: {where.cause}. Call backward() without it."
            )
        if self.places is None or output.shape != gradient.shape:
            return
        layout = self.find_layout(output)
        if isinstance(layout, Layout):
            call = make_call(Tensor.backward, (output, gradient), {}, self.batch, self.find_layout)
            self.places.check(call, Motion((layout,), ((1, layout),)), self)

    def find_known_layout(self, tensor: Tensor) -> Where | None:
        """`find_layout`, as far as torch functions show it."""
        entry = self._known.entries.get(id(tensor))
        if entry is None or entry[0]() is not tensor:
            if tensor.is_nested:
                self.refuse_nested()
            base = tensor._base
            if base is not None and (of_base := self._known.get(base)) is not None:
                layout = find_layout_of_view(tensor, base, of_base[0], self.batch)
                check_backward(tensor, layout, self)
                return layout
            if tensor.grad_fn is None:
                if tensor.requires_grad and id(tensor) not in self.collector.parameters:
                    self.can_retain = False  # no tap is behind what is computed from it
                return None if self.is_inside or self.outside is None else self._find_outside_layout(tensor)
            return find_unseen_layout(tensor, self)
        layout, had_grad = entry[1]
        if not had_grad and layout is not None and tensor.requires_grad:
            if tensor.grad_fn is None:  # requires_grad_(): a use of it has no tap behind its activations
                self.can_retain = False
            else:
                check_custom_function(tensor, layout, self)
        if isinstance(tensor.grad_fn, BackwardCFunction):
            check_backward(tensor, layout, self)
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
        if isinstance(layout, Crossed) and (self.isolation is not None or self.is_coupled or tracing.get_trace()):
            layout = lose_entries(layout)  # a pair of different samples that overflows makes both gradients NaN
        if self.is_coupled:
            layout = own_tensor(tensor, layout, self.batch)
        if isinstance(layout, Lost) and _is_refused(layout) and tensor.grad_fn is not None:
            pairs = layout if isinstance(layout, Crossed) else None
            tensor.register_hook(make_gradient_refusal(f"{layout.cause}, in {layout.place}", self, pairs))
        if isinstance(layout, Reduced) and self.note_loss is not None and tensor.grad_fn is not None:
            watch_sum(tensor, layout, self.collector.anchor_node, self.note_loss)
        if get_saved_tensor_hooks() is not None:
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
            if self.progress.stage is not Stage.INSIDE and self.outside is not None:
                self._sizes_read = self.outside.note_size(func, args, result, self._known)
            if self.loss_code is not None and not self.has_ended:
                return self._note_attribute(func, args, result)
            return result
        self.counted.read_last, self._sizes_read = self._sizes_read, _NOTHING_READ
        if not self.progress.is_following:
            if func is torch.autograd.grad and self.complain is not None and not self.progress.is_paused:
                return self._run_autograd_grad(args, kwargs)
            return func(*args, **kwargs, **find_dropped(func))
        is_loss_code = self.progress.stage not in (Stage.INSIDE, Stage.BACKWARD)
        if self.loss_code is None or not is_loss_code or func in _DIFFERENTIATING:
            if self.complain is None and func not in _DIFFERENTIATING:
                return self.follow_again(func, args, kwargs)
            return self._follow_or_give_up(func, args, kwargs)
        return self.loss_code.run(func, args, kwargs, self, self._follow_or_give_up)

    def _note_attribute(self, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> Any:
        """In private training: what a program gets that reads an attribute or a size of a tensor."""
        assert self.loss_code is not None
        if func == _GRAD_FN:
            return guard_node(result)
        if not self.is_inside:
            self.loss_code.note_size(func, args, self)
        return result

    def _follow_or_give_up(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = None if self.complain is None else Written(func, args, kwargs)
        try:
            if func in _DIFFERENTIATING:
                if func is torch.autograd.grad:
                    return self._run_autograd_grad(args, kwargs)
                if self.run_backward is not None:
                    return self.run_backward(func, args, kwargs)
            return self.follow_again(func, args, kwargs)
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

    def follow_again(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follow a call as in an audited pass; audit the rest of the pass if no audited pass had it here.

        Most calls end here: as few calls of Python as possible.
        """
        path = self.path
        site = None if path.site is None else path.site.get(func)
        if site is None:
            return (path.audit or path.start_audit(self)).run(func, args, kwargs)
        path.site = site
        if self.batch > 1:
            effect = site.effect
            if effect is not None and torch.is_grad_enabled():
                if site.matches(args, kwargs, self._known.entries, self.collector.parameters):
                    return self._repeat_call(func, args, kwargs, effect)
            elif func in BY_SHAPE and not kwargs:
                result = self._run_by_shape(func, args)
                if result is not None:
                    return result
        call = make_call(func, args, kwargs, self.batch, self.find_known_layout, self.counted)
        return self._follow_call(call, site, self.find_known_layout)

    def follow(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        find_layout: Callable[[Tensor], Where | None],
    ) -> Any:
        """Run a torch function in an audited pass; `find_layout` says where the samples lie in an argument."""
        call = make_call(func, args, kwargs, self.batch, find_layout, self.counted)
        return self._follow_call(call, None, find_layout)

    def _follow_call(self, call: Call, site: Site | None, find_layout: Callable[[Tensor], Where | None]) -> Any:
        """Run a call over its keys: without sizes, then with sizes, and then by the steps.

        `site` is its place in the program; None if the pass is audited.
        """
        free: tuple[Key, int] | None = None
        if call.batch > 1 and call.func in SIZE_FREE:
            free = make_size_free_key(call, self.collector.parameters, self.is_inside, self.places is not None)
        if free is not None and site is not None:
            result = self._look_up(call, *free, site)
            if result is not NEXT:
                return result
        effect = MEMO.get(call.key) if torch.is_grad_enabled() else None
        if effect is not None and effect.rules_version == RULES_VERSION.number:
            result = self._repeat_with_sizes(call, effect)
            if result is not NEXT:
                return result
        result = follow(without_unread_tensor(call, find_layout, self), self)
        if free is not None:
            keep_effect(call, result, *free, self)
        return result

    def _look_up(self, call: Call, key: Key, contents: int, site: Site) -> Any:
        """Run a call that has the effect of an earlier one with its key without sizes; else return NEXT."""
        func, has_grad = call.func, torch.is_grad_enabled()
        if not has_grad and (contents & HAS_PARAMETERS or self.of_hidden_weights.entries):
            return NEXT
        effect = MEMO.get(key)
        if effect is not None and effect.rules_version == RULES_VERSION.number:
            if has_grad:
                site.note(effect, call.args, call.kwargs, self._known.entries, self.collector.parameters)
            return self._repeat_call(func, call.args, call.kwargs, effect)
        if contents or is_inplace(func) or (self.places is not None and facts(func).is_random):
            return NEXT
        return func(*call.args, **call.kwargs)  # of constants alone

    def _repeat_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], effect: Effect) -> Any:
        """Run a call whose effect holds at any size."""
        is_checkpointed = get_saved_tensor_hooks() is not None and prepare_recomputation(self)
        if type(effect) is Use:
            result = repeat_use(args, kwargs, effect.plan, self, is_checkpointed)
        else:
            result = func(*args, **kwargs)
        layout = effect.motion.results[0]
        if type(result) is Tensor and not is_checkpointed:  # as `_note`, without the call of a function
            self._known.entries[id(result)] = (ref(result), (layout, result.requires_grad))
        else:
            for each in [result] if isinstance(result, Tensor) else result:
                self._note(each, layout)
        return result

    def _repeat_with_sizes(self, call: Call, effect: Effect) -> Any:
        """Run a call that has an effect for these sizes; return NEXT, without running it, if it must take the steps."""
        use = effect if isinstance(effect, Use) else None
        if use is not None and any([id(call.tensors[i]) not in self.collector.parameters for i in use.weights]):
            return NEXT
        if self.isolation is not None:
            self.isolation.check_call(call, self)
            self.isolation.places.check(call, effect.motion, self)
        if use is not None:
            result = repeat_use(call.args, call.kwargs, use.plan, self, prepare_recomputation(self))
            self.set_layout(result, effect.motion.results[0])
        elif (layout := find_plain_layout(call, effect.motion)) is not None:
            result = call.func(*call.args, **call.kwargs)
            if isinstance(result, Tensor):  # not so for `x.grad` if there is none now
                self.set_layout(result, layout)
                self.note_summed(result, layout, call)
        else:
            return NEXT
        return result

    # ---- the hot path ----

    def _run_by_shape(self, func: Any, args: tuple[Any, ...]) -> Tensor | None:
        """Run a function of one tensor whose motion follows from shapes; None, without running it, if it does not."""
        tensor: Tensor = args[0]
        entry = self._known.entries.get(id(tensor))
        if entry is None and not self.is_inside:  # a tensor from outside may be judged now
            self.find_known_layout(tensor)
            entry = self._known.entries.get(id(tensor))
        if entry is None or entry[0]() is not tensor:
            return None
        layout, had_grad = entry[1]
        if type(layout) is not Layout or not layout.is_pattern:
            return None
        is_hidden = self.of_hidden_weights.entries and not torch.is_grad_enabled()
        if is_hidden or (tensor.requires_grad and not had_grad):  # the latter: a leaf, or made by an autograd.Function
            return None
        find, shape = BY_SHAPE[func], tensor.shape
        if func is Tensor.__getitem__:
            moved = find(layout, shape, (), args[1:], self.batch)
            if moved is None:
                return None
            result = func(*args)
        else:
            for arg in args[1:]:
                if isinstance(arg, Tensor):
                    return None
            result = func(*args)
            moved = find(layout, shape, result.shape, args[1:], self.batch)
        if moved is None:
            set_layouts(make_call(func, args, {}, self.batch, self.find_layout, self.counted), result, self)
        else:
            self._note(result, moved)
        return result

    def _note(self, tensor: Tensor, layout: Where | None) -> None:
        """`set_layout` for a layout of samples."""
        self._known.entries[id(tensor)] = (ref(tensor), (layout, tensor.requires_grad))
        if get_saved_tensor_hooks() is not None:
            save_layout(self.saved_layouts, tensor, layout)

    # ---- what steps need ----

    def make_summed(self, call: Call) -> Summed:
        """How a call is about to make a sum over the samples; `made` is to be set."""
        versions = tuple([0 if t.is_inference() else t._version for t in call.tensors])
        return Summed(call, versions, tuple(map(self.summed.get, call.tensors)))

    def note_summed(self, result: Tensor, where: Where | None, call: Call, summed: Summed | None = None) -> None:
        """Keep how a sum over the samples was made, if it can be multiplied by a weight.

        Args:
            summed: what `make_summed` returned before the call, if the call changes its arguments.
        """
        if type(where) is Reduced and result.requires_grad and self.counted.holds_divisors:
            self.summed[result] = replace(summed or self.make_summed(call), made=where)

    def find_use_motion(self, call: Call, results: Sequence[Tensor]) -> tuple[Call, Motion]:
        """How a use moves the samples, and the call with the samples that own the rows of its results."""
        return find_owners(call, results) if self.is_coupled else find_motion_with_units(call, results)

    def _run_autograd_grad(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`autograd.grad` of something else than parameters; it leaves no per-sample gradients."""
        inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
        if any(id(t) in self.collector.parameters for t in find_tensors(inputs)):
            if self.complain is not None:
                run_backward = self.run_backward if self.run_backward and not self.has_ended else _run
                found = compute_parameter_gradients(run_backward, self.collector.parameters, args, kwargs)
                if found is not None:
                    return found
            raise make_refusal(name_parameters(inputs, self), args, kwargs)
        if self.has_ended:
            return torch.autograd.grad(*args, **kwargs)
        try:
            result = self.follow_again(torch.autograd.grad, args, kwargs)
            if args[4] if len(args) > 4 else kwargs.get("create_graph"):
                self.collector.refuse_second_derivatives()
            return result
        finally:
            self.collector.forget_gradients(is_graph_kept=True)

    def update_base(self, view: Tensor, layout: Where | None) -> None:
        """Set the layout of a base after a write through one of its views."""
        assert view._base is not None
        before = (self._known.get(view._base) or _UNKNOWN)[0]
        self.set_layout(view._base, find_layout_of_base(view, layout, before, self.batch))

    # ---- buffers ----

    @cached_property
    def buffers(self) -> Buffers:
        """The buffers of the model, with copies of those that calls have changed."""
        return Buffers(self.model)

    def restore_buffers(self) -> None:
        """Give the model's buffers the values that they had before the forward pass."""
        if "buffers" in vars(self):
            self.buffers.restore()
        if self.isolation is not None:
            self.isolation.restore_buffers()
            if self.path.audit is not None:
                self.path.audit.note_finding()  # else the refused sequence would count as audited

    # ---- tensors from outside ----

    def _find_outside_layout(self, tensor: Tensor) -> Where | None:
        """The layout of a tensor that the code around the model uses, and that the tracker has not seen before."""
        assert self.outside is not None
        is_recomputation = _torch.get_backward_pass() >= 0
        if not self.batch or tensor.requires_grad or is_recomputation:
            return None
        layout = self.outside.find_layout(tensor, self.batch)
        if layout is not None:
            self._known[tensor] = (layout, False)
            self.note_given(tensor)
            if self.isolation is not None:
                self.isolation.note_given(tensor)
        return layout
