"""Scanning a dataset: what each example does to the model. `pip install persample[scan]`."""

try:
    import numpy  # noqa: F401
    import pyarrow  # noqa: F401
    import tqdm  # noqa: F401
except ImportError as error:
    raise ImportError(f"persample.scan needs {error.name}: pip install 'persample[scan]'") from error

from persample.scanning.errors import NoRoom, NotFinite, ScanError
from persample.scanning.measure import QUANTITIES
from persample.scanning.queries import Found
from persample.scanning.results import Influence, Scan
from persample.scanning.run import scan

__all__ = ["QUANTITIES", "Found", "Influence", "NoRoom", "NotFinite", "Scan", "ScanError", "scan"]
