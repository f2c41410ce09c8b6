"""Recording under DistributedDataParallel and FSDP2 (`fully_shard`).

Each process has its own samples, and all use the same parameters, whole or sharded. The rows of a recording are those
of the process's own samples and need no communication. Sums over the samples are over all processes: every process
takes part in the same collectives in the same order, even if it has no samples.

Other packages use `find_processes` and `Processes`.
"""

from persample.distributed.base import Processes
from persample.distributed.find import find_processes
