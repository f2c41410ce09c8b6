"""Audits of private training: direct tests of its claims, and lower bounds of epsilon from canaries.

`audit` and `AuditResult` are public as `persample.private.audit` and `persample.private.AuditResult`.

- `bounds.py`: statistics, from scores of canaries to a lower bound of epsilon
- `canaries.py`: samples and gradients that are inserted
- `run.py`: one training with canaries, and their scores
- `noise_tests.py`, `clipping_tests.py`, `sampling_tests.py`, `accounting_tests.py`: direct tests, by their statistics
- `direct.py`: the result of a direct test, and releases of steps that are not counted
- `watching.py`: watches the steps of a training for the tests
- `audit.py`, `result.py`: the audit, and its result
- `plot.py`: its plot
"""

from persample.private.auditing.audit import audit
from persample.private.auditing.direct import DirectTest
from persample.private.auditing.result import AuditResult
from persample.private.auditing.run import AuditRun

__all__ = ["AuditResult", "AuditRun", "DirectTest", "audit"]
