"""Several processes that share a batch: what stands for a parameter in the forward pass, and how sums go over them.

Under DistributedDataParallel and FSDP2 (`fully_shard`) each process has samples of its own, and all use the same
parameters, which each has whole or a shard of. The rows of a recording are those of the process's own samples, and need
no other process. Sums over the samples are over those of all processes: all have to ask for them, as all have to call
backward. Every process then takes part in the same collectives in the same order, whatever its samples are, and if it
has none.
"""

from persample.distributed.base import Processes
from persample.distributed.find import processes_of

__all__ = ["Processes", "processes_of"]
