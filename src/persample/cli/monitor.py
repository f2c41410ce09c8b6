"""`persample monitor`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from persample.cli.command import Command, format_json
from persample.cli.user_code import UsageError, join_lines
from persample.errors import PerSampleError

_DESCRIPTION = """\
Draw a training run that persample.monitor has measured: gradient norms, noise scale, layers, hardest examples.

    # in the training script
    with persample.monitor(model, every=20, out="run.jsonl"):
        ...                                               # the ordinary loop

    $ persample monitor run.jsonl                         # writes run.html, also while the run goes on
"""

_EXIT_CODES = {0: "written", 2: "wrong arguments, or no measured step in the file"}


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="file of the run, the argument `out` of persample.monitor")
    parser.add_argument("--out", metavar="FILE", help="page to write (default: FILE with the ending .html)")
    parser.add_argument("--title", metavar="TEXT", help="title of the page (default: the name of the file)")


def _run(args: Namespace) -> int:
    try:
        from persample.monitoring import read_run, write_page
    except ImportError as error:
        raise UsageError(f"the page needs {error.name}: pip install 'persample[scan]'") from error
    try:
        path = write_page(args.file, args.out, args.title)
        last = read_run(args.file)[-1]
    except (PerSampleError, OSError) as error:
        raise UsageError(join_lines(error)) from error
    print(format_json({"page": str(path), "last": last}) if args.json else f"page: {path}")
    return 0


COMMAND = Command(_DESCRIPTION, _add_arguments, _run, _EXIT_CODES)
