"""Private training: the engine of Opacus with the gradients of persample. Requires `pip install 'persample[private]'`.

Users import the names in `__all__` from here, and the integrations from `persample.private.huggingface` and
`persample.private.lightning`. Other packages use nothing from here.
"""

try:
    import cryptography
    import opacus
except ImportError as error:
    raise ImportError("persample.private needs Opacus and cryptography: pip install 'persample[private]'") from error

from persample.private.adam import AdamBC
from persample.private.adaptive import AdaptiveOptimizer
from persample.private.auditing import AuditResult, AuditRun, DirectTest, audit
from persample.private.engine import PrivacyEngine
from persample.private.optimizer import PrivateOptimizer
from persample.private.plan import PrivacyPlan
from persample.private.splitting import BatchMemoryManager
from persample.private.statement import PrivacyStatement, read_statement
from persample.private.stepping import Step
from persample.private.strategies import BandedInverse, BandedInverseRoot, BandedMatrix, Cancelling, Strategy

__all__ = [
    "AdamBC",
    "AdaptiveOptimizer",
    "AuditResult",
    "AuditRun",
    "BandedInverse",
    "BandedInverseRoot",
    "BandedMatrix",
    "BatchMemoryManager",
    "Cancelling",
    "DirectTest",
    "PrivacyEngine",
    "PrivacyPlan",
    "PrivacyStatement",
    "PrivateOptimizer",
    "Step",
    "Strategy",
    "audit",
    "read_statement",
]
