"""Private training: the engine of Opacus with the gradients of persample. Requires `pip install 'persample[private]'`.

Users import `PrivacyEngine`, `PrivateOptimizer` and `BatchMemoryManager` from here, and the integrations from
`persample.private.huggingface` and `persample.private.lightning`. Other packages use nothing from here.
"""

try:
    import opacus  # noqa: F401
except ImportError as error:
    raise ImportError("persample.private needs Opacus: pip install 'persample[private]'") from error

from opacus.utils.batch_memory_manager import BatchMemoryManager

from persample.private.engine import PrivacyEngine
from persample.private.optimizer import PrivateOptimizer

__all__ = ["BatchMemoryManager", "PrivacyEngine", "PrivateOptimizer"]
