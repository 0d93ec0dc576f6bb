"""Serves a live table of all runs in a directory, and their curves, to browsers on this machine.

    python -m mini_trainer board runs

The table shows each run's state, step, loss, speed, time left and last error; selected runs are compared as curves
(docs/tasks/curves.md). Runs, finished or not, are only read.
"""

from pathlib import Path

from mini_trainer.options.command_line import parse_options
from mini_trainer.options.tools import BoardOptions

if __name__ == "__main__":
    options = parse_options(BoardOptions)  # before the slow imports: --help and typos answer at once

from mini_trainer.distributed.ending import ending_with_message
from mini_trainer.use.plots.board import BoardServer

if __name__ == "__main__":
    with (
        ending_with_message(when_interrupted="interrupted"),
        BoardServer(Path(options.folder[0]), port=options.port) as server,
    ):
        server.serve()
