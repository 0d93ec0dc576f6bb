"""Scores tokenized data sets with a model: a teacher's most probable tokens at each trained token, for train.py.

    python tools/score_data.py --model-name-or-path BIG --data-path chats.arrow --top-k 32
    torchrun --nproc-per-node=8 tools/score_data.py --model-name-or-path BIG --data-path chats.arrow
    torchrun --nproc-per-node=8 train.py --data-path chats.arrow --teacher-weight 0.5 ...

Writes chats.arrow.teacher.scores and its sidecar. Packed, sharded, without gradients. A killed run resumes, on any
number of processes, when the same command is started again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # imports are looked for in the root

from command_line import parse_options
from options import ScoreDataOptions

if __name__ == "__main__":
    options = parse_options(ScoreDataOptions)  # before the heavy imports: --help and typos answer at once

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from chat.fingerprints import fingerprint_chat_template, fingerprint_tokenizer
from corpus.mixture import Mixture
from corpus.reader import TokenizedData
from evaluation.data_sets import build_scorer
from families.packed_row import check_positions
from inference.models import FoundModel, check_answering, find_answering_model
from model.config import check_rope
from objectives.columns import CAUSAL_LM
from objectives.data_kinds import describe_task
from objectives.soft_targets import make_record_type
from objectives.top_tokens import TopTokens
from ranks.agreement import compare_ranks
from ranks.messages import say
from ranks.program import describe_program
from ranks.terminal import show_progress
from ranks.world import World, call_on_rank0, call_with_world
from scoring.data_scores import score_data
from scoring.score_files import ScoreIdentity, ScoreWriter, digest_data, locate_scores

ScoreRows = Callable[[np.ndarray], np.ndarray]  # rows -> their records, on rank 0


def score(options: ScoreDataOptions, world: World) -> None:
    """Writes the scores of all data sets; ValueError or OSError for what cannot be done."""
    compare_ranks(world, lambda: describe_program(options, world, may_differ=("config",)))
    found = find_answering_model(
        options.model_name_or_path,
        revision=options.model_revision,
        trust_remote_code=options.trust_remote_code,
        flag="--model-name-or-path",
    )
    check_answering(found)
    objective, score_rows = make_objective(options, found), None
    sets = [open_data(path) for path in options.data_path]
    read = [open_data(path) for path in options.teacher_data] or sets
    for data, seen in zip(sets, read, strict=True):
        check_data(seen, found)
        call_on_rank0(world, lambda data=data, seen=seen: check_aligned(data, seen))
    for data, seen in zip(sets, read, strict=True):
        writer = open_writer(data, seen, found, objective, options)
        if writer.is_complete:
            announce(world, f"{writer.path}: there already, by the same teacher")
            continue
        announce(world, describe_size(data, writer))
        score_rows = score_rows or open_scorer(found, objective, options, world)
        write_scores(writer, lambda rows, seen=seen: score_rows(seen, rows), world)


def make_objective(options: ScoreDataOptions, found: FoundModel) -> TopTokens:
    num_ids = min(len(found.tokenizer), found.config.get_text_config(decoder=True).vocab_size)
    if options.top_k > num_ids:
        raise ValueError(f"--top-k {options.top_k}: the tokenizer has {num_ids} tokens")
    return TopTokens(top_k=options.top_k, temperature=options.temperature, num_ids=num_ids)


def open_data(path: str) -> Mixture:
    """A data set with trained tokens; ValueError for one that no teacher scores."""
    data = Mixture([TokenizedData(path)])
    if data.task.objective != CAUSAL_LM:
        raise ValueError(f"--data-path {path} is for {describe_task(data.task)}; scored is language modelling")
    data.check_trained("--data-path")
    return data


def check_data(data: Mixture, found: FoundModel) -> None:
    """ValueError if the teacher has another tokenizer or chat template than the data was made with."""
    (source,), name = data.sources, found.name
    sidecar = source.sidecar or {}
    if sidecar.get("tokenizer_fingerprint") != fingerprint_tokenizer(found.tokenizer):
        raise ValueError(f"{source.path}: was made with another tokenizer than {name}'s, whose ids mean other tokens")
    template = fingerprint_chat_template(found.tokenizer)
    if template is not None and sidecar.get("chat_template_fingerprint") != template:
        raise ValueError(
            f"{source.path}: was made with another chat template than {name}'s, which does not know its format; tokenize"
            " it with that template, or with --teacher-data the rows that the teacher is to read"
        )
    data.vocab_size = found.config.get_text_config(decoder=True).vocab_size
    check_rope(found.config, longest=data.longest)


def check_aligned(data: Mixture, seen: Mixture) -> None:
    """ValueError unless the trained tokens of both are the same, row by row."""
    if seen is data:
        return
    ours, theirs = data.sources[0], seen.sources[0]
    if len(ours.lengths) != len(theirs.lengths):
        raise ValueError(f"{theirs.path}: has {len(theirs.lengths):,} rows, {ours.path} {len(ours.lengths):,}")
    for row in range(len(ours.lengths)):
        own, other = (labels[labels >= 0] for labels in (source.read(row)["labels"][1:] for source in (ours, theirs)))
        if not np.array_equal(own, other):
            raise ValueError(f"{theirs.path}: row {row + 1}: trains other tokens than the row of {ours.path}")


def open_writer(
    data: Mixture, seen: Mixture, found: FoundModel, objective: TopTokens, options: ScoreDataOptions
) -> ScoreWriter:
    (source,), identity = data.sources, found.identify()
    scored_as = ScoreIdentity(
        data=digest_data(source),
        teacher=identity.get("adapter_sha256", "") + identity["fingerprint"],
        tokenizer=fingerprint_tokenizer(found.tokenizer),
        teacher_data=None if seen is data else digest_data(seen.sources[0]),
        top_k=options.top_k,
        temperature=options.temperature,
        num_ids=objective.num_ids,
        dtype=options.dtype,
    )
    return ScoreWriter(source, locate_scores(source.path, options.name), scored_as, teacher=found.name)


def describe_size(data: Mixture, writer: ScoreWriter) -> str:
    num_tokens, size = int(writer.before[-1]), make_record_type(writer.identity.top_k).itemsize
    return (
        f"{writer.path}: {len(data.lengths):,} rows, {num_tokens:,} trained tokens, {size} bytes each:"
        f" {num_tokens * size / 1e9:.3f} GB"
    )


def open_scorer(
    found: FoundModel, objective: TopTokens, options: ScoreDataOptions, world: World
) -> Callable[[Mixture, np.ndarray], np.ndarray]:
    """A function that scores some rows of a data set with the model, which is loaded for it."""
    family = objective.family.complete(found.config, found.tokenizer, trust_remote_code=found.trust_remote_code)
    objective = replace(objective, family=family)
    model = build_scorer(found, objective, dtype=options.dtype, world=world)

    def score_rows(data: Mixture, rows: np.ndarray) -> np.ndarray:
        check_positions(model.model, longest=data.longest)
        scores = score_data(
            model,
            data.restricted_to(rows),
            objective,
            cap=options.max_tokens_per_gpu,
            world=world,
            progress=lambda where: None,
        )
        return objective.read_predictions(scores.predictions) if world.rank == 0 else np.empty(0)

    return score_rows


def write_scores(writer: ScoreWriter, score_rows: ScoreRows, world: World) -> None:
    """Scores what is missing, part by part. All ranks call this."""
    parts = call_on_rank0(world, lambda: list(writer.list_parts()))
    for first, end in show_progress(parts, "scoring", unit="part"):
        records = score_rows(np.arange(first, end))
        call_on_rank0(world, lambda part=(first, end, records): writer.write(*part))
    sidecar = call_on_rank0(world, writer.finish)
    announce(
        world,
        f"{writer.path}: the teacher's loss is {sidecar['loss']:.4f}; its {sidecar['top_k']} most probable tokens hold"
        f" {1 - sidecar['tail']:.2%} of the probability",
    )


def announce(world: World, message: str) -> None:
    if world.rank == 0:
        say(message)


if __name__ == "__main__":
    call_with_world(lambda world: score(options, world))
