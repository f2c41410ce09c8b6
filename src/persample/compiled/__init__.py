"""Whole steps for `torch.compile`: forward, backward and an answer, as one graph.

Other packages use `compile` and `CompiledStep`.
"""

from persample.compiled.step import CompiledStep, compile

__all__ = ["CompiledStep", "compile"]
