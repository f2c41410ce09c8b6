"""Private training: the engine of Opacus with the gradients of persample. Requires `pip install 'persample[private]'`.

Users import the names in `__all__ = [
    "AdaptiveOptimizer",
    "AuditResult",
    "AuditRun",
    "BatchMemoryManager",
    "PrivacyEngine",
    "PrivateOptimizer",
    "audit",
]
