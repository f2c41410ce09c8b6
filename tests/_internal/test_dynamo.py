"""Blocks in which nothing is compiled."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from persample._internal.dynamo import disable_compilation


def test_blocks_end_in_any_order_and_in_any_thread() -> None:
    calls = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> torch.fx.GraphModule:
        calls.append(graph)
        return graph

    compiled = torch.compile(lambda x: x.sin() + 1, backend=backend)
    first, second = disable_compilation(), disable_compilation()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    compiled(torch.ones(3))
    assert not calls
    thread = threading.Thread(target=second.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    compiled(torch.ones(3))
    assert len(calls) == 1
    with disable_compilation():  # the end in another thread counts for the thread in which the block began
        torch.compile(lambda x: x.cos() + 1, backend=backend)(torch.ones(3))
    assert len(calls) == 1


def test_a_block_inside_a_compiled_function_after_one_that_ended_elsewhere() -> None:
    first = disable_compilation()
    first.__enter__()
    thread = threading.Thread(target=first.__exit__, args=(None, None, None))
    thread.start()
    thread.join()

    @torch.compiler.disable(recursive=False)
    def run(x: Tensor) -> Tensor:
        with disable_compilation():
            return x.sin()

    compiled = torch.compile(lambda x: run(x) + 1, backend="eager")
    torch.testing.assert_close(compiled(torch.ones(3)), torch.ones(3).sin() + 1)
