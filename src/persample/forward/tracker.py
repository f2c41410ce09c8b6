"""Watches the forward pass: follows the samples through every op, and finds each use of a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
from persample.distributed import Processes
from persample.errors import ELSEWHERE, PerSampleError, SamplesMixed, place_in
from persample.forward.checkpointing import Memory, prepare_recomputation, prepare_reentrant, remember
from persample.forward.fastpath import WholeModules
from persample.forward.inline import opened
from persample.forward.known_tensors import TensorMap
from persample.forward.use import REMEDY, can_repeat, check_apart, repeat_use, run_use
from persample.layouts import CACHE, CountedSizes, Motion, Op, call_simple, motion_of, op_of
from persample.layouts.functions import MOVES
from persample.layouts.layout import Layout, Lost, Reduced, Where, from_ids, laid_out_ids, sample_ids
from persample.rules import Rewrite, get_handler, get_rules

# Ops that return their argument itself, with nothing of its entries changed.
_UNTOUCHED = {
    Tensor.requires_grad_, Tensor.register_hook, Tensor.retain_grad, Tensor.backward, torch.autograd.backward,
    torch.autograd.grad,
}  # fmt: skip

# Ops that take a tensor for its type, or for its shape.
_TYPED = {Tensor.type_as, Tensor.to}
_SHAPED: dict[Any, Any] = {
    Tensor.expand_as: Tensor.expand, Tensor.view_as: Tensor.view, Tensor.reshape_as: Tensor.reshape,
}  # fmt: skip

# Functions that give numbers of Python's.
_LEAVING = {Tensor.tolist, Tensor.item, Tensor.__int__, Tensor.__index__}

# Functions that write into buffers they are given.
_UPDATING = {nn.functional.batch_norm, nn.functional.instance_norm, torch.batch_norm, torch.instance_norm}

_UNKNOWN = (Lost("nothing is known of it"), False)

Legacy = Callable[["Tracker", Any, Op, Mapping[int, Tensor]], Any]


class Tracker(TorchFunctionMode):
    """While it is entered, each tensor that depends on the batch is known with its layout.

    A *use* is an op with a weight on one side (a parameter, or what was computed from parameters alone) and samples on
    the other. It runs as it always does, with the weight detached; a `Tap` on its result finds the terms in backward.
    Ops of weights alone are ordinary autograd, through which the collector pulls their result's gradients back.
    """

    def __init__(self, batch: int, collector: Collector, model: nn.Module | None, legacy: Legacy) -> None:
        super().__init__()
        self.batch = batch
        self.collector = collector
        self.model = model
        self.legacy = legacy
        self.anchor = torch.empty(0, requires_grad=True)
        self.anchor_node = get_gradient_edge(self.anchor).node
        self.on_backward: Callable[..., Any] | None = None
        self.over = Processes()
        self.has_inputs = False
        self.inside = True  # the model's forward is running, as far as is known
        self.rests = False  # it has seen all that it will see
        self.memory: Memory = {}
        self.buffers_before: dict[int, Tensor] = {}
        self._counted = CountedSizes()
        self._names: dict[nn.Module, str] | None = None
        self._depth = 0
        self._whole_modules: WholeModules | None = None
        self._of_hidden_weights: TensorMap[bool] = TensorMap()  # computed from weights and samples without grad
        # where a tensor's samples lie, and whether it required grad when that was found
        self._known: TensorMap[tuple[Where | None, bool]] = TensorMap()

    def start(self) -> None:
        """Prepares the model, and torch, for being followed."""
        if self._depth == 0:
            self._uncompiled = disable_compilation()
            self._uncompiled.__enter__()
            if self.model is not None:
                self._whole_modules = WholeModules(self)
        self._depth += 1

    def stop(self) -> None:
        """The opposite of `start`."""
        self._depth -= 1
        if self._depth == 0:
            if self._whole_modules is not None:
                self._whole_modules.remove()
                self._whole_modules = None  # which knows the tracker: neither is to wait for the garbage collector
            self._uncompiled.__exit__(None, None, None)

    def __enter__(self) -> Any:
        self.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.stop()

    # ---- what is known of a tensor ----

    def add_input(self, tensor: Tensor, where: Where) -> None:
        """Says where the samples lie in a tensor from outside; what is known of one from within stays."""
        self.has_inputs = True
        if tensor not in self._known:
            self._known[tensor] = (where, tensor.requires_grad)

    def where(self, tensor: Tensor) -> Where | None:
        """Where the samples lie in a tensor, None where it does not depend on the batch."""
        known = self._known.get(tensor)
        if known is None:
            base = tensor._base
            if base is not None and (of_base := self._known.get(base)) is not None:
                return self._seen_through(tensor, base, of_base[0])
            return None if tensor.grad_fn is None else self._came_from_nowhere(tensor)
        where, had_grad = known
        if not had_grad and where is not None and tensor.grad_fn is not None:
            self._came_out_of_a_function(tensor, where)
        return where

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor that does not depend on the batch is a parameter, or computed from parameters."""
        if id(tensor) in self.collector.parameters:
            return True
        return tensor.requires_grad and (self._known.get(tensor) or _UNKNOWN)[0] is None

    def tell(self, tensor: Tensor, where: Where | None) -> None:
        """Remembers where the samples lie in a tensor; None: nowhere, it was computed from weights."""
        if isinstance(where, (Lost, Reduced)) and not where.place:
            # A loss, outside of the model, is in none of its modules: that is not looked for in each step.
            within = self.inside or isinstance(where, Lost)
            where = replace(where, place=self.place() if within else ELSEWHERE)
        if isinstance(where, Lost) and tensor.grad_fn is not None:
            tensor.register_hook(_refusal(f"{where.cause}, in {where.place}"))
        remember(self.memory, tensor, where)
        self._known[tensor] = (where, tensor.requires_grad)

    def place(self) -> str:
        """The module whose code is running, in words."""
        if self._names is None:
            self._names = {} if self.model is None else {m: name for name, m in self.model.named_modules()}
        return place_in(self._names)

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
        if self.rests:
            return func(*args, **kwargs)
        if func is Tensor.backward and self.on_backward is not None:
            return self.on_backward(func, args, kwargs)
        if func is torch.autograd.grad:
            self._refuse_ordinary_gradients(args, kwargs)
        op = op_of(func, args, kwargs, self.batch, self.where, self._counted)
        before = CACHE.get(op.kind)
        if before is not None and torch.is_grad_enabled():
            if before.simple is not None:
                result = func(*args, **kwargs)
                if isinstance(result, Tensor):  # not so `x.grad`, now that there is none
                    self.tell(result, before.simple)
                return result
            if before.use is not None and func not in _UPDATING and can_repeat(op, before.use, self):
                prepare_recomputation(self)
                result = repeat_use(op, before.use, self)
                self.tell(result, before.results[0])
                return result
        if func in _TYPED and len(op.tensors) > 1:  # nothing is read of the second but its type
            func, args = Tensor.to, (args[0], op.tensors[1].device, op.tensors[1].dtype)
            op = op_of(func, args, kwargs, self.batch, self.where, self._counted)
        elif func in _SHAPED:
            func, args, kwargs = _SHAPED[func], (op.tensors[0], op.tensors[1].shape), {}
            op = op_of(func, args, kwargs, self.batch, self.where, self._counted)
        tensors, where = op.tensors, op.where
        batched = any(where)
        handler = get_handler(func)
        if batched and isinstance(handler, Rewrite):
            with self:
                result = handler.function(*args, **kwargs)
            if result is not NotImplemented:
                return result
        weights = {i: t for i, t in enumerate(tensors) if where[i] is None and self.is_weight(t)}
        if weights and batched and torch.is_grad_enabled():
            return self._use(op, weights)
        self._keep_buffers(op)
        if func in MOVES and op.inplace:  # then its argument has another shape afterwards
            unchanged = tensors[0].detach()
            op = replace(op, args=(unchanged, *args[1:]), tensors=(unchanged, *tensors[1:]))
        if weights and not batched:
            with self.over.saving_weights():
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if not torch.is_grad_enabled() and (weights or any(t in self._of_hidden_weights for t in tensors)):
            for made in find_tensors(result):
                self._of_hidden_weights[made] = True
        if batched and func in _LEAVING:
            self._counted.add(result)
        elif batched:
            self._follow(op, result)
            if not isinstance(handler, Rewrite) and not weights and func not in _UPDATING:
                call_simple(op, result)
        elif weights:
            for made in find_tensors(result):
                if made.requires_grad and id(made) not in self.collector.parameters:
                    self.tell(made, None)
        return result

    def _refuse_ordinary_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
        if any(id(t) in self.collector.parameters for t in find_tensors(inputs)):
            raise PerSampleError(
                "autograd.grad asks for the gradients of parameters in a recording, where they are kept for each "
                "sample. Call backward(), and read the recording."
            )

    def _use(self, op: Op, weights: dict[int, Tensor]) -> Any:
        handler, rules = get_handler(op.func), get_rules(op.func)
        if not rules and not isinstance(handler, type) and isinstance(op.func, FunctionType):
            with self:
                return opened(op.func)(*op.args, **op.kwargs)
        self._keep_buffers(op)
        if isinstance(handler, type):
            check_apart(op, self)
            result = self.legacy(self, handler, op, weights)
            self._follow(op, result)
            return result
        prepare_recomputation(self)
        result, motion = run_use(op, weights, rules, self)
        for made, where in zip(find_results(result, op.args), motion.results, strict=True):
            self.tell(made, where)
        return result

    def _follow(self, op: Op, result: Any) -> None:
        """Finds where the samples of the result lie."""
        results = find_results(result, op.args) if result is not None or op.inplace else ()
        if not results or op.func in _UNTOUCHED:
            return
        for made, where in zip(results, motion_of(op, results).results, strict=True):
            if op.inplace and made._base is not None and where != op.where[0]:
                self._wrote_through(made, where)
            if where is not None or made._base is not None:
                self.tell(made, where)

    def _wrote_through(self, view: Tensor, where: Where | None) -> None:
        """Notes that the entries of a view, which are some of its base's, now belong to others."""
        base = view._base
        assert base is not None
        if not isinstance(where, (Lost, Reduced)):
            with tracing.suspend():
                ids = laid_out_ids(base, (self._known.get(base) or _UNKNOWN)[0], self.batch)
                of_view = ids.as_strided(view.shape, view.stride(), view.storage_offset())
                of_view.copy_(sample_ids(view, where, self.batch))
                where = from_ids(ids, self.batch, isinstance(where, Layout) and where.loose)
        self.tell(base, where)

    def _seen_through(self, view: Tensor, base: Tensor, where: Where | None) -> Where | None:
        """Where the samples lie in a view that was made before they were written into its base."""
        if not isinstance(where, Layout):
            return None if isinstance(where, Lost) and where.listed else where
        with tracing.suspend():
            ids = laid_out_ids(base, where, self.batch)
            return from_ids(ids.as_strided(view.shape, view.stride(), view.storage_offset()), self.batch, where.loose)

    @cached_property
    def buffers(self) -> dict[int, Tensor]:
        """The model's buffers."""
        return {} if self.model is None else {id(b): b for b in self.model.buffers()}

    def _keep_buffers(self, op: Op) -> None:
        """Copies the model's buffers before an op changes them, for `restore`."""
        if (op.inplace or op.func in _UPDATING) and self.buffers:
            for tensor in op.tensors:
                if id(tensor) in self.buffers and id(tensor) not in self.buffers_before:
                    self.buffers_before[id(tensor)] = tensor.clone()

    def restore(self) -> None:
        """Gives the model's buffers the values they had before this forward pass."""
        with torch.no_grad():
            for key, before in self.buffers_before.items():
                self.buffers[key].copy_(before)

    # ---- what was made where no mode sees it ----

    def _came_out_of_a_function(self, tensor: Tensor, where: Where) -> None:
        """A tensor that was computed without grad and now has one: an `autograd.Function` has returned it."""
        if not prepare_reentrant(self, tensor.grad_fn):
            self._refuse_hidden_weight(tensor)
            if tensor in self._of_hidden_weights:
                raise PerSampleError(
                    f"{type(tensor.grad_fn).__name__}, an autograd.Function called in {self.place()}, uses weights "
                    "without recording them (a reversible layer, or a checkpoint of its own): their gradients would "
                    "arrive as a sum over the batch. Use torch.utils.checkpoint, or turn it off."
                )
        elif self.collector.early:
            raise PerSampleError(
                "A reentrant checkpoint runs a backward pass of its own, in which not all uses of a weight are known: "
                "checkpoint with use_reentrant=False, or record with keep='everything'."
            )
        self.tell(tensor, where)

    def _came_from_nowhere(self, tensor: Tensor) -> Where | None:
        """A tensor with a history that was not seen: of weights alone, of neither side, or of both in unknown ways."""
        if any(type(node).__name__ == "TapBackward" for node in find_nodes(tensor)):
            self._refuse_hidden_weight(tensor)
            name = type(tensor.grad_fn).__name__
            lost = Lost(f"{name} made a tensor of {tuple(tensor.shape)} in a way that torch functions do not show")
            self.tell(tensor, lost)
            return lost
        if self._parameters_behind(tensor):
            self.over.check_saved(tensor)
            self.tell(tensor, None)
        return None

    def _parameters_behind(self, tensor: Tensor) -> list[Tensor]:
        return [leaf for leaf in find_leaves(tensor) if id(leaf) in self.collector.parameters]

    def _refuse_hidden_weight(self, tensor: Tensor) -> None:
        hidden = self._parameters_behind(tensor)
        if hidden:
            names = {} if self.model is None else {id(p): name for name, p in self.model.named_parameters()}
            raise PerSampleError(
                f"{type(tensor.grad_fn).__name__}, an autograd.Function called in {self.place()}, uses the parameter "
                f"'{names.get(id(hidden[0]), '?')}' together with samples of the batch: its gradient arrives as a sum "
                "over the batch that cannot be taken apart. Write the function with torch functions, or as a torch "
                "function of its own (torch.overrides) with a rule from implements_per_sample_grads."
            )

    def guarded(self, output: Tensor) -> Tensor:
        """An output that refuses gradients if it belongs to no sample."""
        where = self.where(output)
        if isinstance(where, Reduced) and output.dim() and output.grad_fn is not None:
            output.register_hook(_refusal(f"{where.cause}, in {where.place}"))
        if where is None and self.is_weight(output):
            if output.dim() and output.shape[0] == self.batch > 1 and output.stride(0) == 0:
                return self._given_to_each(output)
            output = output.view_as(output) if output.is_leaf else output
            output.register_hook(_refusal("it was computed from weights alone"))
        return output

    def _given_to_each(self, output: Tensor) -> Tensor:
        """Something of the weights that was expanded to the batch, as each sample's own."""
        op = Op(Tensor.clone, (output,), {}, (output,), (None,), self.batch)
        each = Motion((Layout(0),))
        return run_use(op, {0: output}, (), self, each)[0]


def _refusal(cause: str) -> Callable[[Tensor], None]:
    def refuse(grad: Tensor) -> None:
        raise SamplesMixed(
            f"The loss depends on a tensor in which the samples of the batch are not apart: {cause}. {REMEDY}"
        )

    return refuse
