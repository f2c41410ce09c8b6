"""The engines that are compared, one per file."""

from benchmarks.engines.backpack import BackPACK
from benchmarks.engines.base import QUANTITIES, Engine
from benchmarks.engines.expanded import ExpandedWeights
from benchmarks.engines.functional import TorchFunc
from benchmarks.engines.loop import Loop
from benchmarks.engines.opacus import OpacusGhost, OpacusHooks
from benchmarks.engines.opake import Opake
from benchmarks.engines.ours import Ours, OursTwice
from benchmarks.engines.plain import Plain

ENGINES: dict[str, type[Engine]] = {
    engine.name: engine
    for engine in (Loop, ExpandedWeights, TorchFunc, OpacusHooks, OpacusGhost, Opake, BackPACK, Ours, OursTwice)
}

__all__ = ["ENGINES", "QUANTITIES", "Engine", "Plain"]
