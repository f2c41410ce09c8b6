"""Measure again what the pages show, on a quiet machine.

    python -m benchmarks.published [--minutes 15] [--peers DIRECTORY]

Each part runs in a process of its own, the most important one first, and writes its file in `benchmarks/results`, with
the processor's name. No part starts after the time is over. The parts that are left can be run by themselves.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from benchmarks.output import RESULTS
from benchmarks.peers import add_peers_option, find_peers

FAST = "Opacus hooks,Opacus ghost,torch.func,BackPACK,ExpandedWeights,Opake,ours"

# The arguments of `python -m`, in the order of their importance.
PARTS = {
    "ours": ["benchmarks", "--time", "--engines", "ours", "--quantities", "dense,norms,clip"],
    "large": ["benchmarks.large", "--rounds", "2", "--write"],
    "peers": ["benchmarks", "--time", "--engines", FAST, "--quantities", "norms,clip", "--rounds", "9"],
    "private": ["benchmarks.private", "--rounds", "20", "--json", str(RESULTS / "private.json")],
    "host": ["benchmarks.host", "--write"],
    "varied": ["benchmarks.varied", "--write"],
    "first steps": ["benchmarks.first_steps", "--write"],
}
WITH_PEERS = {"peers", "private"}


def run_part(name: str, peers: str | None) -> int:
    """Run one part; returns its exit code."""
    command = [sys.executable, "-m", *PARTS[name]]
    if name in ("ours", "peers"):  # their file has another name than the part of `python -m benchmarks`
        command += ["--output", str(RESULTS / f"measured_{name}")]
    if peers and name in WITH_PEERS:
        command += ["--peers", peers]
    code = subprocess.run(command, check=False).returncode
    written = RESULTS / f"measured_{name}" / "time.json"
    if written.exists():
        written.replace(RESULTS / f"{name}.json")
        written.parent.rmdir()
    return code


def main(arguments: list[str] | None = None) -> int:
    """Run the parts until the time is over. The result is the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15, help="start nothing new after this time (default: 15)")
    add_peers_option(parser)
    options = parser.parse_args(arguments)
    find_peers(options.peers)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}: other work makes the figures wrong", flush=True)
    end, failed = time.monotonic() + 60 * options.minutes, 0
    for name in PARTS:
        if time.monotonic() > end:
            print(f"{name}: not measured, the time is over")
            continue
        start = time.monotonic()
        code = run_part(name, options.peers)
        failed |= code != 0
        print(f"{name}: {time.monotonic() - start:.0f} s{f', failed with code {code}' if code else ''}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
