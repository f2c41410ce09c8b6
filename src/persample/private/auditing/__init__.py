"""Audits of private training: lower bounds of epsilon from what canaries leave behind.

`audit` and `AuditResult` are public as `persample.private.audit` and `persample.private.AuditResult`.

- `bounds.py`: statistics, from scores of canaries to a lower bound of epsilon
- `canaries.py`: samples and gradients that are inserted
- `run.py`: one training with canaries, and their scores
- `audit.py`: the audit, and its result
- `plot.py`: its plot
"""

from persample.private.auditing.audit import AuditResult, audit
from persample.private.auditing.run import AuditRun

__all__ = ["AuditResult", "AuditRun", "audit"]
