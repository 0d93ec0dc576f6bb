"""Scores tokenized data sets with a model, for train.py: a teacher's most probable tokens.

    python -m mini_trainer score-data --model-name-or-path BIG --data-path chats.arrow --top-k 32
    torchrun --nproc-per-node=8 -m mini_trainer.tools.score_data --model-name-or-path BIG --data-path chats.arrow
    torchrun --nproc-per-node=8 train.py --data-path chats.arrow --teacher-weight 0.5 ...

Writes chats.arrow.teacher.scores and its sidecar. Packed, sharded, without gradients. A killed run resumes when the
same command is started again, on any number of processes.
"""

from pathlib import Path

from mini_trainer.distributed.process import pause_collector, resume_collector
from mini_trainer.options.command_line import parse_options
from mini_trainer.options.tools import ScoreDataOptions

if __name__ == "__main__":
    options = parse_options(ScoreDataOptions)  # before the heavy imports: --help and typos answer at once
    pause_collector()

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from mini_trainer.data.columns.base import CAUSAL_LM, IGNORED, DataTask, describe_task
from mini_trainer.data.stores.disk import hash_json, locked
from mini_trainer.data.stores.model_files import name_model
from mini_trainer.data.stores.tokenizers import fingerprint_chat_template, fingerprint_tokenizer
from mini_trainer.data.tokenized.fetched import download_data_sets
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.agreement import compare_ranks, describe_program
from mini_trainer.distributed.ending import ExitCode, RunError
from mini_trainer.distributed.messages import say, show_progress
from mini_trainer.distributed.world import World, call_on_each_node, call_on_rank0, call_with_world
from mini_trainer.model.config import check_rope
from mini_trainer.model.fingerprints import digest_data
from mini_trainer.model.scoring.data_scores import score_data
from mini_trainer.model.scoring.score_files import ScoreIdentity, ScoreWriter, locate_scores
from mini_trainer.objectives.families.family import check_positions
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.objectives.families.text_tower import count_logits
from mini_trainer.objectives.objective import PackedModel
from mini_trainer.objectives.soft_targets import TopTokens, make_record_type
from mini_trainer.options import flatten_options
from mini_trainer.use.evaluation.data_sets import build_scorer, verify_files
from mini_trainer.use.inference.loading import FoundModel, check_answering, check_num_rows, find_answering_model


def score(options: ScoreDataOptions, world: World) -> None:
    """Writes the scores of all data sets; ValueError or OSError for what cannot be done."""
    values, may_differ = flatten_options(options), ("config", "data_cache_dir")
    compare_ranks(world, lambda: describe_program(values, world, may_differ=may_differ))
    given = {"data_path": options.data_path, "teacher_data": options.teacher_data}
    options = replace(options, **download_data_sets(given, world, cache_dir=options.data_cache_dir))
    sets = [open_data(path, options) for path in options.data_path]
    read = [open_data(path, options) for path in options.teacher_data] or sets
    for data, seen in zip(sets, read, strict=True):
        call_on_rank0(world, lambda data=data, seen=seen: check_aligned(data, seen))
    scorer = Scorer(options, read, world)
    if not options.skip_verification:
        call_on_each_node(world, lambda: verify_files([scorer.found], sets + (read if options.teacher_data else [])))
    for data, seen in zip(sets, read, strict=True):
        score_set(data, seen, scorer)


def score_set(data: Mixture, seen: Mixture, scorer: "Scorer") -> None:
    """Writes a teacher's scores of one data set, or continues them."""
    (source,), options, world = data.sources, scorer.options, scorer.world
    path, teacher = locate_scores(source.path, options.name), name_model(options.model_name_or_path)
    with ExitStack() as held:
        call_on_rank0(world, lambda: hold_scores(path, held))
        identity = ScoreIdentity(
            data=digest_data(source),
            teacher_data=None if seen is data else digest_data(seen.sources[0]),
            top_k=options.top_k,
            temperature=options.temperature,
            **scorer.identity,
        )
        writer = ScoreWriter(source, path, identity, teacher=teacher)
        if writer.is_complete:
            announce(world, f"{writer.path}: there already, by the same teacher")
            return
        num_tokens, size = writer.trained.total, make_record_type(writer.identity.top_k).itemsize
        announce(
            world,
            f"{writer.path}: {len(data.lengths):,} rows, {num_tokens:,} trained tokens, {size} bytes each:"
            f" {num_tokens * size / 1e9:.3f} GB",
        )
        write_scores(writer, scorer, seen)


def hold_scores(path: Path, held: ExitStack) -> None:
    """Lets one program at a time write the scores at `path`, until `held` is left; RunError in another."""
    try:
        held.enter_context(locked(path.with_name(f".{path.name}.lock"), waits=False))
    except BlockingIOError:
        message = f"{path}: another process is writing these scores: wait for it to end, or choose another --name"
        raise RunError(ExitCode.LOCKED, message) from None


class Scorer:
    """The teacher, loaded when it is first needed."""

    def __init__(self, options: ScoreDataOptions, read: Sequence[Mixture], world: World):
        """ValueError if it cannot read the data."""
        self.options, self.world = options, world
        self.found = found = find_answering_model(
            options.model_name_or_path,
            revision=options.model_revision,
            trust_remote_code=options.trust_remote_code,
            flag="--model-name-or-path",
        )
        check_answering(found)
        if found.adapter is not None:
            check_num_rows(found, found.config.get_text_config(decoder=True).vocab_size)
        for data in read:
            check_data(data, found)
        # Rows of the head after those that stand for tokens of the tokenizer or the data are padding.
        largest = max((data.sources[0].sidecar or {}).get("max_token_id", 0) for data in read)
        num_ids = min(max(len(found.tokenizer), largest + 1), count_logits(found.config))
        if options.top_k > num_ids:
            raise ValueError(f"--top-k {options.top_k}: the tokenizer has {num_ids} tokens")
        identity = found.identify()
        teacher = identity["fingerprint"]
        if "adapter_sha256" in identity:
            teacher = hash_json([teacher, identity["adapter_sha256"]])
        tokenizer = fingerprint_tokenizer(found.tokenizer)
        self.identity = {"teacher": teacher, "tokenizer": tokenizer, "num_ids": num_ids, "dtype": options.dtype}
        family = TextFamily().complete(found.config, found.tokenizer, trust_remote_code=found.trust_remote_code)
        self.objective = TopTokens(family, top_k=options.top_k, temperature=options.temperature, num_ids=num_ids)

    @functools.cached_property
    def model(self) -> PackedModel:
        return build_scorer(self.found, self.objective, dtype=self.options.dtype, world=self.world)

    def score(self, data: Mixture, rows: np.ndarray) -> np.ndarray:
        """The records of the rows' trained tokens, on rank 0. All ranks call this."""
        check_positions(self.model.model, longest=data.longest)
        chosen, cap = data.restricted_to(rows), self.options.max_tokens_per_gpu
        scores = score_data(self.model, chosen, self.objective, cap=cap, world=self.world, progress=lambda where: None)
        return self.objective.read_predictions(scores.predictions) if self.world.rank == 0 else np.empty(0)


def open_data(path: str, options: ScoreDataOptions) -> Mixture:
    """A data set with trained tokens; ValueError for one that cannot be scored, or not as the options say."""
    data = Mixture([TokenizedData(path, cache_dir=options.data_cache_dir)])
    if data.task.objective != CAUSAL_LM:
        allowed = f"{describe_task(DataTask(CAUSAL_LM))} (a run computes its reference's log-probabilities by itself)"
        raise ValueError(f"--data-path {path} is for {describe_task(data.task)}; allowed: {allowed}")
    data.check_trained("--data-path")
    return data


def check_data(data: Mixture, found: FoundModel) -> None:
    """ValueError if the teacher's tokenizer or chat template differs from the data's."""
    (source,), name = data.sources, found.name
    sidecar = source.sidecar or {}
    if "tokenizer_fingerprint" not in sidecar:
        raise ValueError(
            f"{source.path}: nothing says which tokenizer it was made with: put {source.path.name}.meta.json, which"
            " process_data.py wrote, next to it, or tokenize the data again"
        )
    if sidecar["tokenizer_fingerprint"] != fingerprint_tokenizer(found.tokenizer):
        raise ValueError(f"{source.path}: was made with a tokenizer other than {name}'s, so its ids mean other tokens")
    templates = {sidecar.get("chat_template_fingerprint"), fingerprint_chat_template(found.tokenizer)}
    if None not in templates and len(templates) > 1:
        raise ValueError(
            f"{source.path}: was made with a chat template other than {name}'s, which does not know this format:"
            f" tokenize it with that template, or give rows for the teacher with --teacher-data"
        )
    data.vocab_size = count_logits(found.config)
    check_rope(found.config, longest=data.longest)


def check_aligned(data: Mixture, seen: Mixture) -> None:
    """ValueError unless the trained tokens of both are the same, row by row."""
    if seen is data:
        return
    ours, theirs = data.sources[0], seen.sources[0]
    if len(ours.lengths) != len(theirs.lengths):
        raise ValueError(f"{theirs.path}: has {len(theirs.lengths):,} rows, {ours.path} {len(ours.lengths):,}")
    for row in range(len(ours.lengths)):
        own, other = (one.read(row)["labels"][1:] for one in (ours, theirs))  # nothing predicts the first token
        if not np.array_equal(own[own != IGNORED], other[other != IGNORED]):
            raise ValueError(f"{theirs.path}: row {row + 1}: trains other tokens than the row of {ours.path}")


def write_scores(writer: ScoreWriter, scorer: Scorer, seen: Mixture) -> None:
    """Scores missing rows, part by part. All ranks call this."""
    world = scorer.world
    parts = call_on_rank0(world, writer.list_parts)
    for first, end in show_progress(parts, "scoring", unit="part"):
        records = scorer.score(seen, np.arange(first, end))
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
    resume_collector()
    call_with_world(lambda world: score(options, world))
