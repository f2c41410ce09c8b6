"""Watches the forward pass: follows the samples through every op, and hands each use of a weight to its rule."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from persample.checkpointing import Memory, prepare_recomputation, prepare_reentrant, remember
from persample.collector import Collector, leaves_of
from persample.detached import run_detached
from persample.errors import PerSampleError, SamplesMixed, op_name, place_in
from persample.layout import Layout, Lost, Reduced, Where
from persample.motion import Motion, Op, motion_of, results_of
from persample.rules import HANDLED_FUNCTIONS, Rewrite, Rule
from persample.tap import Tap, Use
from persample.tree import emptied, map_tensors, slots_in, tensors_in

# Ops that return their argument itself, with nothing of its entries changed.
_UNTOUCHED = {Tensor.requires_grad_, Tensor.register_hook, Tensor.retain_grad}

# Functions that write into buffers they are given.
_UPDATING = {nn.functional.batch_norm, nn.functional.instance_norm, torch.batch_norm, torch.instance_norm}

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
        self.inputs: dict[int, tuple[Tensor, Where]] = {}
        self.memory: Memory = {}
        self.buffers = {} if model is None else {id(b): b for b in model.buffers()}
        self.buffers_before: dict[int, Tensor] = {}
        self._mark = object()

    # ---- what is known of a tensor ----

    def add_input(self, tensor: Tensor, where: Where) -> None:
        """Says where the samples lie in a tensor from outside, which may be asked for again in a recomputation."""
        self.inputs[id(tensor)] = (tensor, where)

    def where(self, tensor: Tensor) -> Where | None:
        """Where the samples lie in a tensor, None where it does not depend on the batch."""
        mark = getattr(tensor, "_persample", None)
        if mark is not None and mark[0] is self._mark:
            where: Where | None = mark[1]
            if where is not None and tensor.requires_grad and not mark[2]:
                self._check_made_outside(tensor, where)
            return where
        if id(tensor) in self.inputs:
            return self.inputs[id(tensor)][1]
        if tensor.grad_fn is not None:
            return self._made_outside(tensor)
        return None

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor that does not depend on the batch is a parameter, or computed from parameters."""
        if id(tensor) in self.collector.parameters:
            return True
        mark = getattr(tensor, "_persample", None)
        return mark is not None and mark[0] is self._mark and mark[1] is None and tensor.requires_grad

    def tell(self, tensor: Tensor, where: Where | None) -> None:
        """Remembers where the samples lie in a tensor; None: nowhere, it was computed from weights."""
        if isinstance(where, (Lost, Reduced)) and not where.place:
            where = replace(where, place=self.place())
        if id(tensor) in self.inputs:
            self.inputs[id(tensor)] = (tensor, where or Lost(""))
        remember(self.memory, tensor, where)
        tensor._persample = (self._mark, where, tensor.requires_grad)  # type: ignore[attr-defined]

    def place(self) -> str:
        """The module whose code is running, in words."""
        return place_in({} if self.model is None else {m: name for name, m in self.model.named_modules()})

    # ---- each op ----

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors = tuple(tensors_in((args, kwargs)))
        where = tuple(map(self.where, tensors))
        batched = any(where)
        if batched and isinstance(handler := HANDLED_FUNCTIONS.get(func), Rewrite):
            with self:
                return handler.function(*args, **kwargs)
        if batched and func is Tensor.__iter__:
            with self:
                return iter(args[0].unbind(0))
        weights = {i: t for i, t in enumerate(tensors) if where[i] is None and self.is_weight(t)}
        op = Op(func, args, kwargs, tensors, where, self.batch)
        if weights and batched and torch.is_grad_enabled():
            return self._use(op, weights)
        self._keep_buffers(op)
        result = func(*args, **kwargs)
        if batched:
            self._follow(op, result)
        elif weights:
            for made in tensors_in(result):
                if made.requires_grad and id(made) not in self.collector.parameters:
                    self.tell(made, None)
        return result

    def _follow(self, op: Op, result: Any) -> None:
        """Finds where the samples of the result lie."""
        results = results_of(result, op.args)
        if not results or op.func in _UNTOUCHED:
            return
        for made, where in zip(results, motion_of(op, results).results, strict=True):
            if where is not None:
                self.tell(made, where)
                if op.inplace and made._base is not None and self.where(made._base) is None:
                    self.tell(
                        made._base,
                        Lost(
                            f"{op_name(op.func)} wrote samples through a view of a tensor of {tuple(made._base.shape)}"
                        ),
                    )

    def _keep_buffers(self, op: Op) -> None:
        """Copies the model's buffers before an op changes them, for `restore`."""
        if self.buffers and (op.inplace or op.func in _UPDATING):
            for tensor in op.tensors:
                if id(tensor) in self.buffers and id(tensor) not in self.buffers_before:
                    self.buffers_before[id(tensor)] = tensor.clone()

    def restore(self) -> None:
        """Gives the model's buffers the values they had before this forward pass."""
        with torch.no_grad():
            for key, before in self.buffers_before.items():
                self.buffers[key].copy_(before)

    # ---- a use of a weight ----

    def _use(self, op: Op, weights: dict[int, Tensor]) -> Any:
        handler = HANDLED_FUNCTIONS.get(op.func)
        if handler is None and isinstance(op.func, types.FunctionType):
            with self:
                return _opened(op.func)(*op.args, **op.kwargs)
        self._refuse_lost(op)
        if op.inplace and 0 in weights:
            raise PerSampleError(
                f"{op_name(op.func)}, in {self.place()}, writes samples into a tensor of {tuple(op.tensors[0].shape)} that was "
                "computed from weights. Put them together with torch.cat, torch.where or arithmetic instead."
            )
        self._keep_buffers(op)
        if isinstance(handler, type):
            result = self.legacy(self, handler, op, weights)
            self._follow(op, result)
            return result
        saved = [t.detach() if i in weights else t for i, t in enumerate(op.tensors)]
        if op.inplace:
            saved[0] = saved[0].clone()
        rng_state = torch.get_rng_state()
        whole = handler is not None and handler.whole
        result = run_detached(op, weights, whole)
        results = results_of(result, op.args)
        motion = motion_of(op, results)
        tapped = tuple(i for i, r in enumerate(results) if r.is_floating_point() or r.is_complex())
        self._refuse_mixed(op, motion, tapped)
        layouts = tuple(motion.follows(i) or (w if isinstance(w, Layout) else None) for i, w in enumerate(op.where))
        call = emptied((op.args, op.kwargs))
        rule = handler if handler and _holds(handler, call, op.tensors, layouts) else None
        if whole and rule is None:
            raise PerSampleError(f"{op_name(op.func)}, in {self.place()}, has samples where none are expected.")
        if rule is None and not torch.equal(torch.get_rng_state(), rng_state):
            raise PerSampleError(
                f"{op_name(op.func)}, in {self.place()}, draws random numbers where it uses weights, which cannot be "
                "drawn again for each sample. Draw them in a function of their own, as dropout before or after it does."
            )
        if tapped:
            where = tuple(w if isinstance(w, Layout) else None for w in motion.results)
            inputs = [i for i, t in enumerate(op.tensors) if whole and t.requires_grad and i not in weights]
            use = Use(op.func, call, layouts, where, tapped, weights, inputs, rule, self.batch, self.collector)
            result = self._tap(use, saved, op, result, results)
        for made, found in zip(results_of(result, op.args), motion.results, strict=True):
            self.tell(made, found)
        return result

    def _tap(self, use: Use, saved: Sequence[Tensor], op: Op, result: Any, results: tuple[Tensor, ...]) -> Any:
        prepare_recomputation(self)
        chosen = [results[i] for i in use.tapped]
        # A result that its own backward needs must not count as changed in place: only the rules know that it is not so.
        copy = not op.inplace and (use.rule is None or any(r._base is not None for r in chosen))
        inputs = [t for i, t in enumerate(op.tensors) if i in use.inputs]
        tapped = dict(zip(use.tapped, Tap.apply(use, saved, copy, *chosen, *inputs, self.anchor), strict=True))
        supply = iter([tapped.get(i, r) for i, r in enumerate(results)])
        return map_tensors(lambda _: next(supply), result)

    def _refuse_lost(self, op: Op) -> None:
        for where in op.where:
            if isinstance(where, (Lost, Reduced)):
                raise SamplesMixed(
                    f"{op_name(op.func)}, in {self.place()}, uses weights on a tensor in which the samples of the batch are "
                    f"not apart: {where.cause}, in {where.place}. {_REMEDY}"
                )

    def _refuse_mixed(self, op: Op, motion: Motion, tapped: Sequence[int]) -> None:
        for i in tapped:
            where = motion.results[i]
            if not isinstance(where, Layout):
                cause = where.cause if where else f"{op_name(op.func)} gives something that belongs to no sample"
                raise SamplesMixed(f"The samples of the batch are mixed in {self.place()}: {cause}. {_REMEDY}")

    # ---- what functions that no mode sees have made ----

    def _check_made_outside(self, tensor: Tensor, where: Where) -> None:
        """A tensor that was computed without grad and now has one came out of an `autograd.Function`."""
        if not prepare_reentrant(self, tensor.grad_fn):
            self._refuse_hidden_weight(tensor)
        self.tell(tensor, where)

    def _made_outside(self, tensor: Tensor) -> Where | None:
        """What to make of a tensor with a history that was not seen: computed from weights alone, or by unknown ways."""
        leaves = [leaf for leaf in leaves_of(tensor) if id(leaf) in self.collector.parameters]
        if _has_tap(tensor):
            if leaves:
                self._refuse_hidden_weight(tensor)
            name = type(tensor.grad_fn).__name__
            self.tell(
                tensor, Lost(f"{name} made a tensor of {tuple(tensor.shape)} in a way that torch functions do not show")
            )
            return self.where(tensor)
        if leaves:
            self.tell(tensor, None)
        return None

    def _refuse_hidden_weight(self, tensor: Tensor) -> None:
        hidden = [leaf for leaf in leaves_of(tensor) if id(leaf) in self.collector.parameters]
        if hidden:
            names = {} if self.model is None else {id(p): name for name, p in self.model.named_parameters()}
            raise PerSampleError(
                f"{type(tensor.grad_fn).__name__}, an autograd.Function called in {self.place()}, uses the parameter "
                f"'{names.get(id(hidden[0]), '?')}' together with samples of the batch: its gradient arrives as a sum over the batch "
                "that cannot be taken apart. Write the function with torch functions, or give it a rule with "
                "implements_per_sample_grads."
            )

    def check_outputs(self, outputs: Any) -> None:
        """Refuses gradients that come through an output in which the samples are not apart."""
        for output in tensors_in(outputs):
            where = self.where(output)
            if isinstance(where, Lost) and output.requires_grad:
                output.register_hook(_refusal(f"{where.cause}, in {where.place}"))
            elif where is None and self.is_weight(output) and not output.is_leaf:
                output.register_hook(_refusal("it was computed from weights alone"))


def _holds(rule: Rule, call: tuple[Any, Any], tensors: Sequence[Tensor], layouts: Sequence[Layout | None]) -> bool:
    """Whether a rule holds for where the samples lie in a call: in all arguments where it expects them, in no others."""
    for name, value in rule.bind(*call).items():
        for slot in slots_in(value):
            layout = layouts[slot]
            if (layout is not None) != (name in rule.batched):
                return False
            if layout is not None and not rule.accepts(tensors[slot], layout.dim):
                return False
    return True


_REMEDY = (
    "Keep the samples apart (GroupNorm or LayerNorm instead of BatchNorm, or eval() for it; statistics and attention within "
    "a sample), or tell where the batch lies with batch_size and batch_first."
)


def _refusal(cause: str) -> Callable[[Tensor], None]:
    def refuse(grad: Tensor) -> None:
        raise SamplesMixed(
            f"The loss depends on an output in which the samples of the batch are not apart: {cause}. {_REMEDY}"
        )

    return refuse


def _has_tap(tensor: Tensor) -> bool:
    assert tensor.grad_fn is not None
    seen, todo = {tensor.grad_fn}, [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if type(node).__name__ == "TapBackward":
            return True
        fresh = [child for child, _ in node.next_functions if child is not None and child not in seen]
        seen.update(fresh)
        todo.extend(fresh)
    return False


@cache
def _opened(func: types.FunctionType) -> Callable[..., Any]:
    """A function of torch that is written in Python, with its body run op by op instead of being handed over whole.

    Such a function first asks `has_torch_function` whether somebody wants to handle it, and under a mode the answer is
    always yes. In this copy of it the answer is no.
    """

    def no(*_: Any) -> bool:
        return False

    asks = [name for name in func.__globals__ if name.startswith("has_torch_function")]
    opened = types.FunctionType(
        func.__code__,
        {**func.__globals__, **dict.fromkeys(asks, no)},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened
