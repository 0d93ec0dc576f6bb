"""Batch generation to an answer file, to which answers are appended as they arrive, so that a killed run can resume.

Every line holds the row, the answer, and the settings that produced it. Until the run is complete, answers are in
OUTPUT.part0, .part1, one file per process.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from mini_trainer.data.rows.prompts import Prompt, as_json
from mini_trainer.data.stores.disk import naming_failed_writes, write_text
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.messages import show_progress
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.options.reading import open_own, read_bytes
from mini_trainer.options.tools import SamplingOptions
from mini_trainer.use.inference.engine import REFUSED, Answer, Engine, Key, Request

Line = dict[str, Any]
FINGERPRINT = "system_fingerprint"  # of a server's software and settings
NUM_PLACES_SHOWN = 5


def describe_making(engine: dict[str, Any], sampling: SamplingOptions) -> dict[str, Any]:
    """Everything needed to reproduce an answer: the engine's description and the sampling options."""
    return {**engine, "sampling": {key: value for key, value in asdict(sampling).items() if key != "num_samples"}}


def make_line(request: Request, answer: Answer, made_by: dict[str, Any]) -> Line:
    optional = {"reason": answer.reason, "message": answer.message, "served_by": answer.served_by}
    return {
        "index": request.index,
        "sample": request.sample,
        "place": request.prompt.place,
        "row": request.prompt.row,
        "answer": answer.text,
        "finish_reason": answer.finish_reason,
        "num_prompt_tokens": answer.num_prompt_tokens,
        "num_tokens": answer.num_tokens,
        **{name: value for name, value in optional.items() if value is not None},
        "made_by": made_by,
    }


def is_refused(line: Line) -> bool:
    """Whether the prompt was too long for the model."""
    return line["finish_reason"] == REFUSED


def is_cut(line: Line) -> bool:
    """Whether the answer has reached a limit."""
    return line["finish_reason"] == "length"


def is_cut_by_context(line: Line) -> bool:
    """Whether that limit is the end of the model's context, which came before --max-new-tokens."""
    num_tokens = line["num_tokens"]
    return is_cut(line) and num_tokens is not None and num_tokens < line["made_by"]["sampling"]["max_new_tokens"]


def dump(line: Line) -> str:
    return json.dumps(line, ensure_ascii=False, default=as_json) + "\n"


class AnswerFile:
    """The answers to `prompts`, in the final file or in parts. Invariant: after `collect`, part 0 has every complete
    line of all parts, and all of them were produced by `made_by` from these prompts."""

    def __init__(self, path: Path, prompts: Sequence[Prompt], made_by: dict[str, Any], *, num_samples: int):
        self.path, self.prompts, self.num_samples = path, prompts, num_samples
        self.made_by = json.loads(json.dumps(made_by, default=as_json))
        self.wanted = {(i, k) for i in range(len(prompts)) for k in range(num_samples)}
        self.served_by: dict[str, Any] = {}  # the self-description of the server of the answers so far

    def part(self, rank: int) -> Path:
        return self.path.with_name(f"{self.path.name}.part{rank}")

    @contextlib.contextmanager
    def open_part(self, rank: int) -> Iterator[TextIO]:
        """A process's answers, to append to; without any, no file is left."""
        path = self.part(rank)
        try:
            with naming_failed_writes(path, parts=[path]), open_own(path, "a") as part:
                yield part
        finally:
            if not path.stat().st_size:
                path.unlink()

    @property
    def parts(self) -> list[Path]:
        return sorted(self.path.parent.glob(f"{self.path.name}.part[0-9]*"))

    def collect(self) -> dict[Key, Line]:
        """Merges and returns existing lines. ValueError if they are for other prompts or from other settings."""
        if self.path.is_file():
            lines = self.read(self.path)
            if lines.keys() != self.wanted:
                raise ValueError(
                    f"{self.path}: holds {len(lines):,} answers, expected {len(self.wanted):,}: choose another file,"
                    " or remove it"
                )
            for part in self.parts:  # a kill came between the last two steps of `finish`
                part.unlink()
            return lines
        lines = self.read_parts()
        if self.parts:
            write_text(self.part(0), "".join(map(dump, lines.values())))
            for part in self.parts:
                if part != self.part(0):
                    part.unlink()
        return lines

    def read_parts(self) -> dict[Key, Line]:
        return {key: line for part in self.parts for key, line in self.read(part).items()}

    def read(self, path: Path) -> dict[Key, Line]:
        """Reads a file's complete lines; a line cut short by a kill is dropped."""
        lines: dict[Key, Line] = {}
        for number, text in enumerate(read_bytes(path).split(b"\n")[:-1], start=1):
            try:
                line = json.loads(text)
                key = (line["index"], line["sample"])
                problem = self.find_difference(line)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise ValueError(f"{path}:{number}: not an answer of this program: choose another file") from None
            if problem is not None:
                raise ValueError(f"{path}:{number}: {problem}: choose another --output, or remove it")
            lines[key] = line
            self.served_by = line.get("served_by", {}) | self.served_by
        return lines

    def check_server(self, served_by: dict[str, Any] | None) -> None:
        """ValueError if the server or its settings have changed since the earlier answers. Only a note if its
        fingerprint alone differs, which services change with every release."""
        before, now = flatten(self.served_by), flatten(served_by or {})
        changed = sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
        self.served_by = (served_by or {}) | self.served_by
        if not changed:
            return
        shown = ", ".join(f"{name} {before[name]!r}, now {now[name]!r}" for name in changed)
        if changed == [FINGERPRINT]:
            self.served_by |= served_by
            log.warning(f"warning: {self.path}: the server has changed between answers ({shown})")
            return
        raise ValueError(
            f"{self.path}: earlier answers are from another server, or it has other settings ({shown}): start that one"
            " again, choose another output, or remove the file"
        )

    def find_difference(self, line: Line) -> str | None:
        """Why a line cannot be one of these answers; None if it can."""
        if (line["index"], line["sample"]) not in self.wanted:
            return f"answers prompt {line['index']}, sample {line['sample']}, which was not requested"
        row = self.prompts[line["index"]].row
        if line["row"] != json.loads(json.dumps(row, default=as_json)):
            return "answers a different row than this prompt's"
        old, new = flatten(line["made_by"]), flatten(self.made_by)
        if changed := sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name)):
            shown = ", ".join(f"{name} {old.get(name)}, now {new.get(name)}" for name in changed)
            return f"was made with other settings ({shown})"
        return None

    def finish(self) -> None:
        """Merges all parts, in the order of the prompts, and removes them."""
        lines = self.read_parts()
        missing = self.wanted - lines.keys()
        assert not missing, f"{len(missing)} answers are missing, such as {min(missing)}"
        write_text(self.path, "".join(dump(lines[key]) for key in sorted(lines)))
        for part in self.parts:
            part.unlink()


def flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens a nested object to values by dotted names."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= flatten(item, f"{prefix}{key}.") if isinstance(item, dict) else {f"{prefix}{key}": item}
    return flat


def answer_all(engine: Engine, file: AnswerFile, world: World) -> list[Line] | None:
    """Writes the answer file; returns its lines in prompt order on rank 0, None elsewhere. All ranks call this."""
    done = call_on_rank0(world, lambda: set(file.collect()))
    requests = [Request(index, sample, file.prompts[index]) for index, sample in sorted(file.wanted)]
    num_missing = len(file.wanted) - len(done)
    if done:
        log.warning(f"note: {file.path}: resuming with {len(done):,} of {len(file.wanted):,} answers")
    start, num_tokens, num_answers = time.perf_counter(), 0, 0
    if num_missing:
        with file.open_part(world.rank) as part:
            answers = engine.answer(requests, done=done, rank=world.rank, world_size=world.world_size)
            with show_progress(None, "answers", unit="answer") as bar:
                bar.total = -(-num_missing // world.world_size)
                for request, answer in answers:
                    file.check_server(answer.served_by)
                    part.write(dump(make_line(request, answer, file.made_by)))
                    part.flush()  # so that a kill loses no finished answer
                    num_tokens, num_answers = num_tokens + (answer.num_tokens or 0), num_answers + 1
                    bar.update()
        dist.barrier(group=world.control)
    seconds = time.perf_counter() - start
    if num_missing and world.rank == 0:
        ranks = f" on rank 0 of {world.world_size}" if world.world_size > 1 else ""
        speed = f"{num_tokens / seconds:,.0f} per second"
        log.warning(f"{num_answers:,} answers{ranks}, {num_tokens:,} tokens in {seconds:.1f} s ({speed})")
    call_on_rank0(world, lambda: None if file.path.is_file() else file.finish())
    if world.rank != 0:
        return None
    lines = list(file.read(file.path).values())
    report_problems(lines, file)
    return lines


def report_problems(lines: Sequence[Line], file: AnswerFile) -> None:
    """Logs the prompts that are too long for the model, and the numbers of answers that its context cut, and of those
    without content, which may have reasoning instead."""
    if refused := [line for line in lines if is_refused(line)]:
        places = list(dict.fromkeys(line["place"] for line in refused))
        shown = ", ".join(places[:NUM_PLACES_SHOWN]) + (", ..." if len(places) > NUM_PLACES_SHOWN else "")
        log.warning(
            f"warning: {file.path}: {len(refused):,} of {len(lines):,} answers are missing, because their prompts are"
            f" too long for the model ({shown}): {refused[0].get('reason', '')}"
        )
    if num_cut := sum(map(is_cut_by_context, lines)):
        log.warning(
            f"warning: {file.path}: {num_cut:,} of {len(lines):,} answers end at the end of the model's context, before"
            " --max-new-tokens"
        )
    silent = [line for line in lines if not (line["answer"].strip() or line.get("message", {}).get("tool_calls"))]
    if empty := [line for line in silent if not is_refused(line)]:
        num_reasoning = sum("reasoning_content" in line.get("message", {}) for line in empty)
        why = "" if num_reasoning == 0 else f"; {num_reasoning:,} of them have only reasoning (under `message`)"
        log.warning(f"warning: {file.path}: {len(empty):,} of {len(lines):,} answers are empty{why}")
