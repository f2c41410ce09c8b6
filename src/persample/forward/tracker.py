"""The function mode that follows the samples through every op of a forward pass and finds the uses of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from persample._internal import tracing
from persample._internal.dynamo import disable_compilation, exclude_from_graph, skip_compilation
from persample._internal.functions import find_results
from persample._internal.graph import find_leaves, find_nodes
from persample._internal.tree import find_tensors
from persample.backward.collector import Collector
from persample.backward.tap import is_tap
from persample.distributed import Processes
from persample.errors import ELSEWHERE, PerSampleError, SamplesMixed, find_place
from persample.forward.checkpointing import SavedLayouts, prepare_recomputation, prepare_reentrant, save_layout
from persample.forward.fastpath import WholeModules
from persample.forward.inline import make_inline
from persample.forward.known_tensors import TensorMap
from persample.forward.use import can_repeat, check_not_mixed, repeat_use, run_use
from persample.layouts import (
    CACHE,
    MOVES,
    Call,
    CountedSizes,
    Layout,
    Lost,
    Motion,
    Reduced,
    Where,
    find_layout_of_ids,
    find_motion,
    make_call,
    make_sample_ids,
    make_strided_ids,
    mark_simple,
)
from persample.rules import Rewrite, find_adapter, get_handler, get_rules

# Functions that return their argument itself, unchanged.
_UNCHANGING = {
    Tensor.requires_grad_, Tensor.register_hook, Tensor.retain_grad, Tensor.backward, torch.autograd.backward,
    torch.autograd.grad,
}  # fmt: skip

# Functions that read only the dtype and device of their second tensor, or only its shape.
_TYPED = {Tensor.type_as, Tensor.to}
_SHAPED: dict[Any, Any] = {
    Tensor.expand_as: Tensor.expand, Tensor.view_as: Tensor.view, Tensor.reshape_as: Tensor.reshape,
}  # fmt: skip

# Functions that return Python numbers.
_LEAVING = {Tensor.tolist, Tensor.item, Tensor.__int__, Tensor.__index__}

# Functions that write into buffers among their arguments.
_UPDATING = {nn.functional.batch_norm, nn.functional.instance_norm, torch.batch_norm, torch.instance_norm}

_UNKNOWN = (Lost("the tracker has not seen it"), False)

_ADVICE = (
    "Keep the samples separate (GroupNorm or LayerNorm instead of BatchNorm, or BatchNorm in eval(); statistics and "
    "attention within a sample), or say where the samples lie with "
)


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
    ) -> None:
        super().__init__()
        self.batch = batch
        self.collector = collector
        self.model = model
        self.loss_reduction = loss_reduction
        self.processes = processes or Processes()
        self.run_backward = run_backward
        self.advice = f"{_ADVICE}{layout_options}."
        self.anchor = torch.empty(0, requires_grad=True)
        self.anchor_node = get_gradient_edge(self.anchor).node
        self.has_inputs = False
        self.is_inside = batch > 0  # whether the model's forward is running, as far as is known
        self.is_resting = False  # lets everything through: the backward pass has ended
        self.saved_layouts: SavedLayouts = {}
        self._buffers_before: dict[int, Tensor] = {}
        self._counted = CountedSizes()
        self._module_names: dict[nn.Module, str] | None = None
        self._depth = 0
        self._whole_modules: WholeModules | None = None
        self._of_hidden_weights: TensorMap[bool] = TensorMap()  # computed from weights and samples without grad
        # The layout of a tensor, and whether the tensor required grad when the layout was found.
        self._known: TensorMap[tuple[Where | None, bool]] = TensorMap()

    # ---- entering and leaving ----

    def start(self) -> None:
        """Prepare the model and torch for tracking."""
        if self._depth == 0:
            self._uncompiled = disable_compilation()
            self._uncompiled.__enter__()
            if self.model is not None:
                self._whole_modules = WholeModules(self)
        self._depth += 1

    def stop(self) -> None:
        """Undo `start`."""
        self._depth -= 1
        if self._depth == 0:
            if self._whole_modules is not None:
                self._whole_modules.remove()
                self._whole_modules = None  # it refers to the tracker: break the cycle
            self._uncompiled.__exit__(None, None, None)

    def __enter__(self) -> Any:
        self.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.stop()

    # ---- what is known about a tensor ----

    def add_input(self, tensor: Tensor, layout: Where) -> None:
        """Set the layout of a tensor from outside, unless the tracker has seen where it comes from."""
        self.has_inputs = True
        if tensor not in self._known:
            self._known[tensor] = (layout, tensor.requires_grad)

    def find_layout(self, tensor: Tensor) -> Where | None:
        """Where the samples lie in a tensor, None if it does not depend on the batch."""
        known = self._known.get(tensor)
        if known is None:
            base = tensor._base
            if base is not None and (of_base := self._known.get(base)) is not None:
                return self._find_layout_of_view(tensor, base, of_base[0])
            return None if tensor.grad_fn is None else self._find_unseen_layout(tensor)
        layout, had_grad = known
        if not had_grad and layout is not None and tensor.grad_fn is not None:
            self._check_custom_function(tensor, layout)
        return layout

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor that does not depend on the batch is a parameter, or computed from parameters."""
        if id(tensor) in self.collector.parameters:
            return True
        return tensor.requires_grad and (self._known.get(tensor) or _UNKNOWN)[0] is None

    def set_layout(self, tensor: Tensor, layout: Where | None) -> None:
        """Set where the samples lie in a tensor; None: nowhere, it was computed from weights alone."""
        if isinstance(layout, (Lost, Reduced)) and not layout.place:
            # A loss outside the model is in none of its modules: skip the search through the stack in each step.
            is_searched = self.is_inside or isinstance(layout, Lost)
            layout = replace(layout, place=self.place() if is_searched else ELSEWHERE)
        if isinstance(layout, Lost) and tensor.grad_fn is not None:
            tensor.register_hook(self._make_refusal(f"{layout.cause}, in {layout.place}"))
        save_layout(self.saved_layouts, tensor, layout)
        self._known[tensor] = (layout, tensor.requires_grad)

    def place(self) -> str:
        """The module whose code is running, in words."""
        if self._module_names is None:
            self._module_names = {} if self.model is None else {m: name for name, m in self.model.named_modules()}
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
        kwargs = kwargs or {}
        if self.is_resting:
            return func(*args, **kwargs)
        if func is Tensor.backward and self.run_backward is not None:
            return self.run_backward(func, args, kwargs)
        if func is torch.autograd.grad:
            self._refuse_parameter_gradients(args, kwargs)
        call = make_call(func, args, kwargs, self.batch, self.find_layout, self._counted)
        # The fast path: a call like this one was seen before, and is known to do nothing else.
        known = CACHE.get(call.key)
        if known is not None and torch.is_grad_enabled():
            if known.simple is not None:
                result = func(*args, **kwargs)
                if isinstance(result, Tensor):  # not so for `x.grad` if there is none now
                    self.set_layout(result, known.simple)
                return result
            if known.use is not None and func not in _UPDATING and can_repeat(call, known.use, self):
                prepare_recomputation(self)
                result = repeat_use(call, known.use, self)
                self.set_layout(result, known.results[0])
                return result
        return self._run(self._without_unread_tensor(call))

    def _without_unread_tensor(self, call: Call) -> Call:
        """The same call without a second tensor of which only the dtype and device, or the shape, is read."""
        args: tuple[Any, ...]
        if call.func in _TYPED and len(call.tensors) > 1:
            func, args, kwargs = Tensor.to, (call.args[0], call.tensors[1].device, call.tensors[1].dtype), call.kwargs
        elif call.func in _SHAPED:
            func, args, kwargs = _SHAPED[call.func], (call.tensors[0], call.tensors[1].shape), {}
        else:
            return call
        return make_call(func, args, kwargs, self.batch, self.find_layout, self._counted)

    def _run(self, call: Call) -> Any:
        """Run an op: a rewrite, a use, an op of weights alone, or an op without weights."""
        has_samples = any(call.where)
        handler = get_handler(call.func)
        if has_samples and isinstance(handler, Rewrite):
            with self:
                result = handler.function(*call.args, **call.kwargs)
            if result is not NotImplemented:
                return result
        weights = {i: t for i, t in enumerate(call.tensors) if call.where[i] is None and self.is_weight(t)}
        if weights and has_samples and torch.is_grad_enabled():
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
        if not torch.is_grad_enabled() and (weights or any(t in self._of_hidden_weights for t in call.tensors)):
            for made in find_tensors(result):
                self._of_hidden_weights[made] = True
        if has_samples and func in _LEAVING:
            self._counted.add(result)
        elif has_samples:
            self._follow(call, result)
            if not isinstance(handler, Rewrite) and not weights and func not in _UPDATING:
                mark_simple(call, result)
        elif weights:
            for made in find_tensors(result):
                if made.requires_grad and id(made) not in self.collector.parameters:
                    self.set_layout(made, None)
        return result

    def _run_use(self, call: Call, weights: dict[int, Tensor]) -> Any:
        handler, rules = get_handler(call.func), get_rules(call.func)
        adapter = find_adapter(handler)
        if not rules and adapter is None and isinstance(call.func, FunctionType):
            with self:
                return make_inline(call.func)(*call.args, **call.kwargs)
        self._save_buffers(call)
        if adapter is not None:
            check_not_mixed(call, self)
            result = adapter(self, handler, call, weights)
            self._follow(call, result)
            return result
        prepare_recomputation(self)
        result, motion = run_use(call, weights, rules, self)
        for made, layout in zip(find_results(result, call.args), motion.results, strict=True):
            self.set_layout(made, layout)
        return result

    def _follow(self, call: Call, result: Any) -> None:
        """Find the layout of each result."""
        results = find_results(result, call.args) if result is not None or call.is_inplace else ()
        if not results or call.func in _UNCHANGING:
            return
        for made, layout in zip(results, find_motion(call, results).results, strict=True):
            if call.is_inplace and made._base is not None and layout != call.where[0]:
                self._update_base(made, layout)
            if layout is not None or made._base is not None:
                self.set_layout(made, layout)

    def _refuse_parameter_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
        if any(id(t) in self.collector.parameters for t in find_tensors(inputs)):
            raise PerSampleError(
                "autograd.grad asks for gradients of parameters inside a recording, which keeps them per sample. Call "
                "backward() and read the recorded gradients."
            )

    # ---- views ----

    def _update_base(self, view: Tensor, layout: Where | None) -> None:
        """Update the layout of a base after a write through one of its views."""
        base = view._base
        assert base is not None
        if not isinstance(layout, (Lost, Reduced)):
            with tracing.suspend():
                ids = make_strided_ids(base, (self._known.get(base) or _UNKNOWN)[0], self.batch)
                of_view = ids.as_strided(view.shape, view.stride(), view.storage_offset())
                of_view.copy_(make_sample_ids(view, layout, self.batch))
                layout = find_layout_of_ids(ids, self.batch, isinstance(layout, Layout) and layout.loose)
        self.set_layout(base, layout)

    def _find_layout_of_view(self, view: Tensor, base: Tensor, layout: Where | None) -> Where | None:
        """The layout of a view that was made before samples were written into its base."""
        if not isinstance(layout, Layout):
            return None if isinstance(layout, Lost) and layout.listing else layout
        with tracing.suspend():
            ids = make_strided_ids(base, layout, self.batch)
            return find_layout_of_ids(
                ids.as_strided(view.shape, view.stride(), view.storage_offset()), self.batch, layout.loose
            )

    # ---- buffers ----

    @cached_property
    def _buffers(self) -> dict[int, Tensor]:
        return {} if self.model is None else {id(b): b for b in self.model.buffers()}

    def _save_buffers(self, call: Call) -> None:
        """Copy the model's buffers before an op changes them, for `restore_buffers`."""
        if (call.is_inplace or call.func in _UPDATING) and self._buffers:
            for tensor in call.tensors:
                if id(tensor) in self._buffers and id(tensor) not in self._buffers_before:
                    self._buffers_before[id(tensor)] = tensor.clone()

    def restore_buffers(self) -> None:
        """Give the model's buffers the values that they had before the forward pass."""
        with torch.no_grad():
            for key, before in self._buffers_before.items():
                self._buffers[key].copy_(before)

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
                    "gradients would arrive as a sum over the batch. Use torch.utils.checkpoint, or turn it off."
                )
        elif self.collector.early:
            raise PerSampleError(
                "A reentrant checkpoint runs a backward pass of its own, in which not all uses of a weight are known. "
                "Checkpoint with use_reentrant=False, or record with keep='everything'."
            )
        self.set_layout(tensor, layout)

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
        return None

    def _find_parameters_behind(self, tensor: Tensor) -> list[Tensor]:
        return [leaf for leaf in find_leaves(tensor) if id(leaf) in self.collector.parameters]

    def _refuse_hidden_weight(self, tensor: Tensor) -> None:
        hidden = self._find_parameters_behind(tensor)
        if hidden:
            names = {} if self.model is None else {id(p): name for name, p in self.model.named_parameters()}
            raise PerSampleError(
                f"{type(tensor.grad_fn).__name__}, an autograd.Function called in {self.place()}, uses the parameter "
                f"'{names.get(id(hidden[0]), '?')}' together with samples: its gradient arrives as a sum over the "
                "batch. Write the function with torch functions, or make it a torch function (torch.overrides) and "
                "register a rule for it with persample.register_rule."
            )

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
        advice = self.advice  # not self: the hook must not keep the tracker alive

        def refuse(grad: Tensor) -> None:
            raise SamplesMixed(
                f"The loss depends on a tensor in which the samples of the batch are mixed: {cause}. {advice}"
            )

        return refuse
