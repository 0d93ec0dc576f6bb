"""Serves a live table of all runs in a directory, and their curves, to browsers on this machine.

    python tools/board.py runs

The table shows each run's state, step, loss, speed, time left and last error; selected runs are compared as curves
(docs/curves.md). Runs, finished or not, are only read.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # imports are relative to the root

from command_line import parse_options
from options import BoardOptions

if __name__ == "__main__":
    options = parse_options(BoardOptions)  # before the slow imports: --help and typos answer at once

from plots.board import BoardServer
from ranks.ending import ending_with_message

if __name__ == "__main__":
    with (
        ending_with_message(when_interrupted="interrupted"),
        BoardServer(Path(options.folder[0]), port=options.port) as server,
    ):
        server.serve("board")
