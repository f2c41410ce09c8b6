"""The everyday suite: training loops as people write them, each through the front ends that fit.

`loop.py` says what a loop is, `oracle.py` what its rows are, `front_ends.py` how it is run. The other modules contain
the loops, by origin. `python -m tests.everyday --write` writes the table of the docs.
"""
