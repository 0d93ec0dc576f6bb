"""Batch generation: computes the missing answers to a file of prompts, in one process or several."""

import time
from collections.abc import Sequence

import torch.distributed as dist

from mini_trainer.distributed.ending import log
from mini_trainer.distributed.messages import show_progress
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.use.inference.answers import (
    AnswerFile,
    Line,
    dump,
    is_cut_by_context,
    is_empty,
    is_refused,
    make_line,
)
from mini_trainer.use.inference.engine import Engine, Request

NUM_PLACES_SHOWN = 5


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
        log.warning(describe_speed(num_answers, num_tokens, seconds, world_size=world.world_size))
    call_on_rank0(world, lambda: None if file.path.is_file() else file.finish())
    if world.rank != 0:
        return None
    lines = list(file.read(file.path).values())
    report_refused(lines, file)
    report_empty(lines, file)
    return lines


def report_refused(lines: Sequence[Line], file: AnswerFile) -> None:
    """Logs the prompts that are too long for the model, and the number of answers that its context cut."""
    refused = [line for line in lines if is_refused(line)]
    if refused:
        places = list(dict.fromkeys(line["place"] for line in refused))
        shown = ", ".join(places[:NUM_PLACES_SHOWN]) + (", ..." if len(places) > NUM_PLACES_SHOWN else "")
        log.warning(
            f"warning: {file.path}: {len(refused):,} of {len(lines):,} answers are missing, because their prompts are"
            f" too long for the model ({shown}): {refused[0].get('reason', '')}"
        )
    num_cut = sum(map(is_cut_by_context, lines))
    if num_cut:
        log.warning(
            f"warning: {file.path}: {num_cut:,} of {len(lines):,} answers end at the end of the model's context, before"
            " --max-new-tokens"
        )


def report_empty(lines: Sequence[Line], file: AnswerFile) -> None:
    """Logs the number of answers without content, and of those that have reasoning instead."""
    empty = [line for line in lines if is_empty(line) and not is_refused(line)]
    if empty:
        num_reasoning = sum("reasoning_content" in line.get("message", {}) for line in empty)
        why = "" if num_reasoning == 0 else f"; {num_reasoning:,} of them have only reasoning (under `message`)"
        log.warning(f"warning: {file.path}: {len(empty):,} of {len(lines):,} answers are empty{why}")


def describe_speed(num_answers: int, num_tokens: int, seconds: float, *, world_size: int) -> str:
    ranks = f" on rank 0 of {world_size}" if world_size > 1 else ""
    speed = f"{num_tokens / seconds:,.0f} per second"
    return f"{num_answers:,} answers{ranks}, {num_tokens:,} tokens in {seconds:.1f} s ({speed})"
