"""Private training: Opacus' engine with persample's gradients. `pip install persample[private]`."""

try:
    import opacus  # noqa: F401
except ImportError as error:
    raise ImportError("persample.private needs Opacus: pip install 'persample[private]'") from error

from opacus.utils.batch_memory_manager import BatchMemoryManager

from persample.private.engine import PrivacyEngine
from persample.private.optimizer import PrivateOptimizer

__all__ = ["BatchMemoryManager", "PrivacyEngine", "PrivateOptimizer"]
