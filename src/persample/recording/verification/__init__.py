"""Verify a recording with real samples: run some alone and compare their outputs with those of the batch.

This finds what the tracker cannot see: code that no mode sees, values that leave torch and come back, and errors in
declarations. It takes two forward passes of one sample, in the first recording of a model.
"""

from persample.recording.verification.one_pass import (
    Verification,
    describe_environment,
    start_verification,
)
from persample.recording.verification.rows import RowCheck
from persample.recording.verification.runs import NOT_REPEATABLE, NotVerified, describe
