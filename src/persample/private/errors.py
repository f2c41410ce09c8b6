"""Errors of private training. They are of the classes that callers of Opacus catch."""

from opacus.validators.errors import UnsupportableModuleError

from persample.errors import PerSampleError, SamplesMixed


class PrivateTrainingError(PerSampleError, ValueError):
    """A wrong argument or a wrong order of calls, where Opacus raises a ValueError."""


class UnsupportedModule(SamplesMixed, UnsupportableModuleError):
    """A module of a class that is known to combine samples or to keep statistics of them."""
