"""Peers that are installed in a directory of their own, without their dependencies, so that torch stays as it is.

    pip install --no-deps --target DIRECTORY opake-base opake-engine opake-accounting opake-dpsgd optree \
        backpack-for-pytorch einops unfoldNd
"""

from __future__ import annotations

import argparse
import os
import sys


def add_peers_option(parser: argparse.ArgumentParser) -> None:
    """Add `--peers DIRECTORY`."""
    parser.add_argument("--peers", metavar="DIRECTORY", help="directory that other libraries are installed in")


def find_peers(directory: str | None) -> None:
    """Import what is not installed from a directory, also in processes that are started from now on."""
    if directory:
        sys.path.append(directory)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), directory)))
