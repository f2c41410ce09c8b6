"""The table of the docs, made from the declarations."""

from tests.everyday import lightning_guides, post_training
from tests.everyday.habits import habits
from tests.everyday.hugging_face import tasks
from tests.everyday.loop import Loop
from tests.everyday.objectives import losses
from tests.everyday.pytorch_examples import examples
from tests.support.paths import ROOT

LOOPS: list[Loop] = [
    loop
    for origin in (examples, tasks, lightning_guides.guides, post_training.guides, losses, habits)
    for loop in origin.loops
]
PAGE = ROOT / "docs/reference/everyday.md"


def make_page() -> str:
    return ""
