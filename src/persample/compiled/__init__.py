"""`persample.compile`: a whole step (forward, backward, a function of the gradients) as one graph of `torch.compile`.

Other packages use `compile` and `CompiledStep`.
"""

from persample.compiled.step import CompiledStep, compile

__all__ = ["CompiledStep", "compile"]
