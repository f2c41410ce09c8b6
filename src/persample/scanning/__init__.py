"""Scans: what the gradient of each example of a dataset looks like. Needs `pip install persample[scan]`.

Other packages may use the names in `__all__`, `report.write_report`, and for the command line the modules `datasets`
and `errors`.
"""

try:
    import numpy  # noqa: F401
    import pyarrow  # noqa: F401
    import tqdm  # noqa: F401
except ImportError as error:
    raise ImportError(f"persample.scan needs {error.name}: pip install 'persample[scan]'") from error

from persample.scanning.errors import BadExamples, DiskFull, NotFinite, ScanError
from persample.scanning.evaluation import Evaluation, Trained, evaluate
from persample.scanning.influence import Influence, RandomScores
from persample.scanning.measure import QUANTITIES
from persample.scanning.queries import Ranking
from persample.scanning.rescan import rescan
from persample.scanning.results import Scan
from persample.scanning.run import scan
from persample.scanning.statistics import Estimate

__all__ = [
    "QUANTITIES",
    "BadExamples",
    "DiskFull",
    "Estimate",
    "Evaluation",
    "Influence",
    "NotFinite",
    "RandomScores",
    "Ranking",
    "Scan",
    "ScanError",
    "Trained",
    "evaluate",
    "rescan",
    "scan",
]
