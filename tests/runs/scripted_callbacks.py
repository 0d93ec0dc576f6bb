"""Callbacks that write down their calls and answer by a script, for the processes of tests' runs to import."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mini_trainer import Answer, Callback, StartedRun

SCRIPT = "SCRIPT_OF_CALLBACKS"  # environment variable, JSON: what to do in a call, by its name in the file


class Scripted(Callback):
    """Adds a line per call to OUTPUT_DIR/calls_RANK.jsonl: its name, and its metrics if it has some."""

    rank, file = 0, None

    def on_start(self, run: StartedRun) -> Answer | None:
        assert isinstance(run, StartedRun) and run.options["output_dir"] and run.output_dir.is_absolute()
        self.rank, self.file = run.rank, run.output_dir / f"calls_{run.rank}.jsonl"
        return self.play(f"start {run.first_step}/{run.num_steps}")

    def on_step(self, metrics: Mapping[str, Any]) -> Answer | None:
        return self.play(f"step {metrics['step']}", metrics)

    def on_validation(self, metrics: Mapping[str, Any]) -> Answer | None:
        answer = self.play(f"validation {metrics['step']}", metrics)
        metrics["sets"].clear()  # which has to be a copy
        return answer

    def on_checkpoint(self, path: Path) -> Answer | None:
        assert (path / "manifest.json").is_file()
        return self.play(f"checkpoint {path.name}")

    def on_export(self, path: Path) -> Answer | None:
        assert (path / "config.json").is_file()
        return self.play(f"export {path.name}")

    def on_end(self, reason: str | None) -> None:
        return self.play(f"end {reason}")

    def play(self, call: str, metrics: Mapping[str, Any] | None = None) -> Answer | None:
        with self.file.open("a") as file:
            file.write(json.dumps([call, None if metrics is None else dict(metrics)]) + "\n")
        script = json.loads(os.environ.get(SCRIPT, "{}"))
        match script.get(f"{call}, rank {self.rank}", script.get(call)):
            case "raise":
                raise LookupError(f"scripted in {call}")
            case "exit":
                raise SystemExit(3)
            case "return a text":
                return "SAVE"
            case None:
                return None
            case names:
                answer = Answer.CONTINUE
                for name in names:
                    answer |= Answer[name]
                return answer


class OnAllRanks(Scripted):
    on_all_ranks = True


class Unmakeable(Scripted):
    def __init__(self):
        raise OSError("no disk")


def read_calls(output_dir: Path, *, rank: int = 0) -> list[str]:
    return [call for call, _ in map(json.loads, (output_dir / f"calls_{rank}.jsonl").read_text().splitlines())]


def read_metrics(output_dir: Path, kind: str, *, rank: int = 0) -> list[dict]:
    """The metrics that calls of this kind received."""
    calls = map(json.loads, (output_dir / f"calls_{rank}.jsonl").read_text().splitlines())
    return [metrics for call, metrics in calls if call.startswith(f"{kind} ")]
