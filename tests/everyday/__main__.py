"""`python -m tests.everyday`: print the page of the docs; `--write` writes it."""

import sys

from tests.everyday.table import PAGE, make_page

if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(make_page())
    else:
        print(make_page(), end="")
