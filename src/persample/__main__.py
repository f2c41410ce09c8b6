"""`python -m persample`."""

import sys

from persample.cli import main

if __name__ == "__main__":
    sys.exit(main())
