"""A step of private training that runs forward, loss, backward, clipping, noise and the update in one call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from persample._internal.rng import RngState
from persample._internal.tree import iterate_tensors, map_tensors
from persample.distributed import Processes, find_processes
from persample.gradients import StreamedClip
from persample.private.errors import PrivateTrainingError
from persample.private.optimizer import PrivateOptimizer

# Called with the model and a batch; returns the loss of each sample. Or with one sample; returns its loss.
LossFunction = Callable[[Any, Any], Tensor]

# Why no row was compared in a pass that counts as verified.
_EXCUSES = ("the forward pass draws random numbers", "gradients are not finite")


class Losses(nn.Module):
    """The losses of a batch: the model and the loss function as one module, which is recorded and verified as a whole.

    Args:
        model: the model.
        loss_fn: the loss function.
        sample_dim: if it takes single samples, the dimension of the samples in the tensors of a batch.

    >>> losses = Losses(nn.Linear(3, 1), lambda model, x: model(x).squeeze(1))
    >>> losses(torch.ones(5, 3)).shape
    torch.Size([5])
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, sample_dim: int | None = None) -> None:
        super().__init__()
        self.model, self.loss_fn, self.sample_dim = model, loss_fn, sample_dim

    def forward(self, batch: Any) -> Tensor:
        """The loss of each sample."""
        losses = self.loss_fn(self.model, batch) if self.sample_dim is None else self._call_for_each(batch)
        if not isinstance(losses, Tensor) or losses.dim() != 1:
            found = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise PrivateTrainingError(
                f"loss_fn returned {found}. It must return one loss for each sample, as a tensor of shape (B,): use "
                "reduction='none', and take the mean over all dimensions but the first."
            )
        return losses.clone()  # no hook of the user is on it: its gradient is the one that the step makes

    def _call_for_each(self, batch: Any) -> Tensor:
        count = next(t.shape[self._find_dim(t)] for t in iterate_tensors(batch) if t.dim())
        found = []
        for n in range(count):
            loss = self.loss_fn(self.model, map_tensors(partial(self._select, n), batch))
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise PrivateTrainingError("With per_sample=True, loss_fn takes one sample and returns one number.")
            found.append(loss.reshape(()))
        return torch.stack(found)

    def _find_dim(self, tensor: Tensor) -> int:
        dim = self.sample_dim or 0
        return dim if tensor.dim() > dim else 0

    def _select(self, n: int, tensor: Tensor) -> Tensor:
        return tensor.select(self._find_dim(tensor), n)


class Step:
    """A step of private training in one call: no code of the user runs between its parts.

    `step(batch)` computes the losses, runs backward, clips, adds the noise and calls the optimizer. In a loop that
    calls `backward()` itself, numbers and decisions that Python takes from samples may come back into the loss unseen.
    Here the only code of the user is `loss_fn` with the model. The two are one function of a batch, and samples are run
    alone through all of it.

    Args:
        model: the model, as it was passed to `make_private`.
        loss_fn: called with the model and a batch; returns the loss of each sample, of shape (B,).
        optimizer: the private optimizer that `make_private` returned. From now on only this step may use it.
        verify: a pass is verified again after 1 to `verify` further passes, a number that is drawn each time. 1: in
            each pass.
        per_sample: `loss_fn` takes one sample, without the dimension of the samples, and returns its loss, one number.
            It is called for each sample, so that a step takes that many forward passes.

    Formal guarantees:
        Let `sum(D)` be the sum over the samples of a batch D, before the noise, and C the bound `max_grad_norm`.

        - Add or remove: if D' has one sample less than D, then `|sum(D) - sum(D')| <= C`.
        - Zero out: if a sample of D is replaced by one that adds nothing, the change is at most C, too.
        - Replace one: if a sample of D is replaced by another, the change is at most 2 C.

        The accountant counts the first relation with Poisson batches. With `unit_ids` a sample is all examples of a
        unit; with `units=K` it is K consecutive ones. The factor of floating point is 1.0001.

        A step releases the sum plus Gaussian noise, and nothing else: the losses that it returns have no noise.

        It holds if (1) the loss of a sample is a function of that sample, the weights, and random numbers that do not
        depend on samples, and (2) so is its gradient. Both are checked. All functions of torch are followed, and what
        mixes samples is refused. In the first pass of each kind, and again as `verify` says, two samples that the
        system's generator draws run alone: their losses, and the row of one of them, must be those of the batch.
        A batch of at least two samples that was not verified is refused: nothing of it reaches the weights.

        Not covered: code outside torch that mixes samples in some passes only, until a pass of that kind is verified;
        the rows (not the losses) of models that draw random numbers, such as dropout, whose rows are not compared;
        whether a step is refused, and when, which depends on the data; the time of a step; the returned losses.

    A step that raises leaves parameters, `p.grad`, the optimizer's state and the global random numbers as before.

    >>> model = nn.Linear(3, 1)
    >>> optimizer = PrivateOptimizer(
    ...     torch.optim.SGD(model.parameters(), lr=0.1), module=model, noise_multiplier=1.0, max_grad_norm=1.0,
    ...     expected_batch_size=5)
    >>> step = Step(model, lambda model, batch: (model(batch[0]).squeeze(1) - batch[1]).square(), optimizer)
    >>> step((torch.randn(5, 3), torch.randn(5))).shape
    torch.Size([5])
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: PrivateOptimizer,
        *,
        verify: int = 100,
        per_sample: bool = False,
    ) -> None:
        _check(model, optimizer, verify)
        self.model, self.optimizer = model, optimizer
        self._losses = Losses(model, loss_fn, optimizer.batch_dim if per_sample else None)
        self._is_running = False
        self._watch = optimizer.arrivals.follow(self._losses, self._admit, verify)

    def __call__(self, batch: Any) -> Tensor:
        """Make a step with a batch of the loader: tensors with one row for each sample, in tuples, dicts and the like.

        An empty batch makes a step of noise only.

        Returns:
            The loss of each sample, without a gradient. It is private.

        Raises:
            PerSampleError: samples influence each other, the pass cannot be verified, or the budget is spent. Nothing
                of the batch reaches the weights.
        """
        return self._run(batch, with_update=True)

    def backward(self, batch: Any) -> Tensor:
        """The same without the update, for trainers that call `optimizer.step()` themselves."""
        return self._run(batch, with_update=False)

    def _run(self, batch: Any, with_update: bool) -> Tensor:
        if self._watch.is_retired:
            raise PrivateTrainingError("The optimizer of this step was released, or has another step.")
        self._check_batch(batch)
        grads, random = [p.grad for p in self.optimizer.params], RngState()
        self._is_running = True
        try:
            losses = self._differentiate(batch)
            if with_update:
                self.optimizer.step()
        except BaseException:
            random.restore()
            for p, grad in zip(self.optimizer.params, grads, strict=True):
                p.grad = grad
            raise
        finally:
            self._is_running = False
        return losses

    def _check_batch(self, batch: Any) -> None:
        """Raise if a batch is not of the loader, or has been in a step."""
        before = self.optimizer.arrivals.isolation.rows
        if not before.is_following:
            return
        number, *others = before.find_batches(iterate_tensors(batch)) or {0}
        if others or not number:
            raise PrivateTrainingError(
                "The batch has a tensor that is not of the last batch of the loader, nor made of it by functions of "
                "torch. It is not known which samples it has. Pass batches of the loader that make_private returns; "
                "prepare samples in the dataset or in loss_fn; declare other data by optimizer.add_samples(batch)."
            )
        if self.optimizer.poisson_sampling:
            self.optimizer.arrivals.handed_out.check_unused(number)

    def _differentiate(self, batch: Any) -> Tensor:
        """Hand the clipped gradients of a batch to the optimizer; return the losses."""
        self._watch.rest()  # what was computed outside is no part of this step
        self.optimizer.zero_grad()
        if _is_empty(batch, self.optimizer.batch_dim):
            return torch.zeros(0)
        self._losses.training = self.model.training
        with torch.enable_grad():
            losses = self._losses(batch)
            try:
                self._check_losses(losses)
            except PrivateTrainingError as error:
                self._watch.fail(error)
                self._watch.rest()
                raise
            (losses.sum() if self.optimizer.loss_reduction == "sum" else losses.mean()).backward()
        return losses.detach()

    def _check_losses(self, losses: Tensor) -> None:
        if not losses.requires_grad:
            raise PrivateTrainingError("The losses that loss_fn returned do not require grad: no weight was used.")
        recording = self._watch.find_recording()
        batch = None if recording is None else recording.samples.batch
        if batch is not None and len(losses) != batch:
            raise PrivateTrainingError(
                f"loss_fn returned {len(losses)} losses for a batch of {batch} samples. It must return one loss for "
                "each sample, as a tensor of shape (B,)."
            )

    def _admit(self, grads: StreamedClip) -> None:
        """Refuse a backward pass that is not of this step, or was not verified."""
        if not self._is_running:
            raise PrivateTrainingError(
                "A backward pass outside of the private step: its optimizer takes gradients from the step only. Call "
                "step(batch), or optimizer.release() to end private training."
            )
        found, row = grads.verification, grads.row_verification
        if row.startswith("no row") and not row.endswith(_EXCUSES):
            found = row
        elif found.startswith("verified") or grads.batch_size < 2:
            return
        raise PrivateTrainingError(
            f"The batch was refused, because its samples could not be run alone ({found}). A private step requires "
            "it: without it nobody knows whether samples influence each other in code that torch does not see."
        )


def _check(model: nn.Module, optimizer: PrivateOptimizer, verify: int) -> None:
    if not isinstance(optimizer, PrivateOptimizer):
        raise PrivateTrainingError(
            f"The optimizer is {type(optimizer).__name__}, and not the private one that make_private returns."
        )
    if optimizer.module is not model:
        raise PrivateTrainingError("The optimizer belongs to another model than the one of the step.")
    if type(find_processes(model)) is not Processes:
        raise PrivateTrainingError(
            "Step does not support DDP and FSDP, where samples cannot be run alone. Pass the model without a wrapper, "
            "and make_private(distributed=True)."
        )
    if isinstance(verify, bool) or not isinstance(verify, int) or verify < 1:
        raise PrivateTrainingError(f"verify must be a positive number of passes, got {verify!r}.")


def _is_empty(batch: Any, batch_dim: int) -> bool:
    """Whether a batch has tensors, and none of them has samples."""
    sizes = [t.shape[batch_dim if t.dim() > batch_dim else 0] for t in iterate_tensors(batch) if t.dim()]
    return bool(sizes) and not any(sizes)
