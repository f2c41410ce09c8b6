"""Scans: what the gradient of each example of a dataset looks like. Needs `pip install persample[scan]`.

Other packages may use the names below. Those in `_LAZY`, for the command line and the page of a monitor, are imported
when they are asked for: some need more packages.
"""

from typing import TYPE_CHECKING

try:
    import numpy
    import pyarrow
    import tqdm
except ImportError as error:
    raise ImportError(f"persample.scan needs {error.name}: pip install 'persample[scan]'") from error

from persample._internal.lazy import find_lazily
from persample.scanning.answers import Influence, Ranking
from persample.scanning.errors import BadExamples, DiskFull, NotFinite, ScanError
from persample.scanning.evaluation import Evaluation, Trained, evaluate
from persample.scanning.evidence import Evidence, score_parts, score_with_evidence
from persample.scanning.exact import score
from persample.scanning.influence import RandomScores
from persample.scanning.measure import QUANTITIES
from persample.scanning.metagradients import Replay, Smoothness, measure_smoothness, replay
from persample.scanning.rescan import rescan
from persample.scanning.results import Scan
from persample.scanning.run import scan
from persample.scanning.statistics import Estimate

if TYPE_CHECKING:
    from persample.scanning.checkpoints import load_last as load_last
    from persample.scanning.comparison import compare_scans as compare_scans
    from persample.scanning.datasets import ImageFolder as ImageFolder
    from persample.scanning.datasets import PretrainedTokenizer as PretrainedTokenizer
    from persample.scanning.datasets import TextCollator as TextCollator
    from persample.scanning.datasets import TextTable as TextTable
    from persample.scanning.datasets import load_tokenizer as load_tokenizer
    from persample.scanning.datasets import text_losses as text_losses
    from persample.scanning.datasets import wrap_tokenizer as wrap_tokenizer
    from persample.scanning.examples import say_opinion as say_opinion
    from persample.scanning.exchange import EXCHANGE_FORMATS as EXCHANGE_FORMATS
    from persample.scanning.exchange import export_suspects as export_suspects
    from persample.scanning.exchange import import_fixes as import_fixes
    from persample.scanning.feature_table import FeatureTable as FeatureTable
    from persample.scanning.fixes import apply_to_folder as apply_to_folder
    from persample.scanning.fixes import apply_to_table as apply_to_table
    from persample.scanning.fixes import read_fixes as read_fixes
    from persample.scanning.fixes import write_suspects as write_suspects
    from persample.scanning.folder import write_file as write_file
    from persample.scanning.from_run import write_columns as write_columns
    from persample.scanning.labels import find_model_classes as find_model_classes
    from persample.scanning.marked_tokens import TokenMarker as TokenMarker
    from persample.scanning.report.charts import Axis as Axis
    from persample.scanning.report.charts import choose_axis as choose_axis
    from persample.scanning.report.rendering import render as render
    from persample.scanning.report.report import make_review_server as make_review_server
    from persample.scanning.report.wording import format_number as format_number
    from persample.scanning.source import Source as Source
    from persample.scanning.transforms import ImageTransform as ImageTransform
    from persample.scanning.transforms import read_processor as read_processor

_LAZY = {
    "checkpoints": "load_last",
    "comparison": "compare_scans",
    "datasets": "ImageFolder PretrainedTokenizer TextCollator TextTable load_tokenizer text_losses wrap_tokenizer",
    "examples": "say_opinion",
    "exchange": "EXCHANGE_FORMATS export_suspects import_fixes",
    "feature_table": "FeatureTable",
    "fixes": "apply_to_folder apply_to_table read_fixes write_suspects",
    "from_run": "write_columns",
    "labels": "find_model_classes",
    "marked_tokens": "TokenMarker",
    "report.charts": "Axis choose_axis",
    "report.rendering": "render",
    "report.report": "make_review_server",
    "report.wording": "format_number",
    "source": "Source",
    "folder": "write_file",
    "transforms": "ImageTransform read_processor",
}

__getattr__ = find_lazily(__name__, _LAZY)

__all__ = [
    "QUANTITIES",
    "BadExamples",
    "DiskFull",
    "Estimate",
    "Evaluation",
    "Evidence",
    "Influence",
    "NotFinite",
    "RandomScores",
    "Ranking",
    "Replay",
    "Scan",
    "ScanError",
    "Smoothness",
    "Trained",
    "evaluate",
    "measure_smoothness",
    "replay",
    "rescan",
    "scan",
    "score",
    "score_parts",
    "score_with_evidence",
]
