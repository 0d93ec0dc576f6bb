"""The tasks' data: tokenized sets, files to measure on under the tasks' names, rows as questions, and which of them
are held out of replay.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from mini_trainer.continual.settings import ContinualSettings, SetSettings, Task, splits_off
from mini_trainer.data.chat.conversation import ASSISTANT, Chat, Completion, Example
from mini_trainer.data.columns.base import CAUSAL_LM, IGNORED
from mini_trainer.data.rows.chat_rows import TEMPLATE_ARGS
from mini_trainer.data.rows.files import find_sources
from mini_trainer.data.rows.formats import PATHS, FieldPaths, read_text_row
from mini_trainer.data.rows.prompts import Prompt, encode_prompt, read_prompts, split_chat
from mini_trainer.data.rows.rows import read_formatted_chunks, read_rows
from mini_trainer.data.rows.split import falls_into_validation
from mini_trainer.data.stores.disk import write_text, written_aside
from mini_trainer.data.stores.model_files import find_model
from mini_trainer.data.stores.tokenizers import load_tokenizer
from mini_trainer.data.tokenized.outputs import DataSetFiles, Outputs
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.options.fields import parse_column
from mini_trainer.options.reading import read_object
from mini_trainer.run.stages import Runner, Stage

# Options of process-data about reading rows, not about processing them.
OF_ROWS = {"format", "columns", "ignore_columns", "validation_share", "max_sample_num_tokens", "skip_invalid"}


@dataclass(frozen=True, kw_only=True)
class PreparedFiles:
    """A task or probe's files."""

    train: Path | None = None
    validation: Path | None = None
    held_out: Path | None = None  # NAME_held_out.ENDING
    test: Path | None = None  # NAME.ENDING


Prepared = dict[str, PreparedFiles]  # by task or probe


def prepare(one: SetSettings, settings: ContinualSettings, folder: Path, runner: Runner) -> PreparedFiles:
    """Tokenizes the set's rows in `folder`."""
    held_out = None if one.held_out is None else open_set(one, "held_out", one.held_out, settings, folder, runner)
    test = None if one.test is None else link(Path(one.test), folder / "test", name=one.name)
    if not isinstance(one, Task):
        return PreparedFiles(held_out=held_out, test=test)
    validation = (
        None if one.validation is None else open_set(one, "validation", one.validation, settings, folder, runner)
    )
    if one.data_path is not None:
        return PreparedFiles(train=Path(one.data_path).absolute(), validation=validation, held_out=held_out, test=test)
    options = settings.process_data | one.process_data
    train = tokenize(list(one.input_file), options, settings, folder / "train", name=one.name, runner=runner)
    if splits_off(one, settings):
        held_out = link_set(Outputs(train, None, True).validation, folder / "held_out", name=f"{one.name}_held_out")
    return PreparedFiles(train=train, validation=validation, held_out=held_out, test=test)


def prepare_known(settings: ContinualSettings, runner: Runner) -> Path | None:
    """The data set of what the start model knows, which is replayed with every task."""
    if settings.replay is None or settings.replay.known is None:
        return None
    return open_set(SetSettings(name="replayed"), "known", settings.replay.known, settings, settings.root, runner)


def open_set(one: SetSettings, kind: str, path: str, settings: ContinualSettings, folder: Path, runner: Runner) -> Path:
    """A data set of process-data under the set's name, from such a set or from rows."""
    files = DataSetFiles(Path(path).absolute())
    if files.sidecar.is_file():
        objective = read_object(files.sidecar).get("objective", CAUSAL_LM)
        if objective != CAUSAL_LM:
            raise ValueError(f"{one.name}: {kind} {path} is for {objective}; allowed: data of language models")
        return link_set(files, folder / kind, name=f"{one.name}_{kind}")
    options = settings.process_data | (one.process_data if isinstance(one, Task) else {})
    options = {name: value for name, value in options.items() if name != "validation_share"}
    return tokenize([path], options, settings, folder / kind, name=f"{one.name}_{kind}", runner=runner)


def tokenize(
    rows: list[str], options: dict[str, Any], settings: ContinualSettings, folder: Path, *, name: str, runner: Runner
) -> Path:
    """Makes a data set of rows by process-data; returns its path."""
    output = folder / f"{name}.arrow"
    given = {"input_file": rows, "output_file": str(output), "model_name_or_path": settings.model}
    runner.run(Stage(program="process-data", folder=folder, options=options | given))
    return output


def link(target: Path, folder: Path, *, name: str) -> Path:
    """A link in `folder` to a file, whose name there begins with `name`, as that of its measurements does."""
    if not target.exists():
        raise ValueError(f"{target}: does not exist")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}{''.join(target.suffixes)}"
    if not path.is_symlink():
        with written_aside(path) as (aside,):
            os.symlink(target.absolute(), aside)
    return path


def link_set(files: DataSetFiles, folder: Path, *, name: str) -> Path:
    """Links to a data set and its sidecar; returns that to the data set."""
    link(files.sidecar, folder, name=name)
    return link(files.data, folder, name=name)


def read_questions(task: Task, settings: ContinualSettings) -> Iterator[Prompt]:
    """The task's rows as prompts with one reference each, without those that process-data splits off. ValueError for a
    row that is neither a chat nor a completion."""
    options = settings.process_data | task.process_data
    columns = dict(map(parse_column, options.get("columns", ())))
    paths = FieldPaths(**{name: columns.get(name) for name in PATHS}, ignored=options.get("ignore_columns", ()))
    given, share = options.get("format"), options.get("validation_share")
    read = partial(read_text_row, is_given=given is not None, paths=paths)
    for chunk in read_formatted_chunks(find_sources(list(task.input_file)), given, paths):
        for row, example in read_rows(chunk, read, Counter()):
            if example is None or isinstance(example, ValueError):
                continue  # process-data has counted or refused it
            if share is None or not falls_into_validation(example, share):
                yield as_question(example, place=f"{chunk.file}:{row.place}")


def as_question(example: Example, *, place: str) -> Prompt:
    if isinstance(example, Completion):
        return Prompt(place=place, row={}, text=example.prompt, references=(example.completion,))
    if isinstance(example, Chat) and example.messages[-1]["role"] == ASSISTANT:
        return split_chat(example, {})
    raise ValueError(f"{place}: has no answer at its end: prompts are read from chats and completions")


def as_row(prompt: Prompt, answer: str) -> dict[str, Any]:
    """A row for process-data, in which only the answer is trained on."""
    if prompt.messages is None:
        return {"prompt": prompt.text, "completion": answer}
    earlier = [message | ({"train": False} if message["role"] == ASSISTANT else {}) for message in prompt.messages]
    row = {"messages": [*earlier, {"role": ASSISTANT, "content": answer}]}
    own = {"tools": prompt.tools, TEMPLATE_ARGS: prompt.template_args}
    return row | {key: value for key, value in own.items() if value is not None}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


class HeldOut:
    """The prompts of all tests and held-out sets, which are read when they are first needed."""

    def __init__(self, prepared: Iterable[PreparedFiles], settings: ContinualSettings):
        self.prepared, self.settings = list(prepared), settings
        self.counts: dict[Path, int] = {}  # of `count_rows`

    @cached_property
    def tokenizer(self) -> Any:
        """The data's tokenizer: next to the data if process-data has changed the model's."""
        beside = [DataSetFiles(one.train).tokenizer for one in self.prepared if one.train is not None]
        changed = [path for path in beside if path.is_dir()]
        found = changed[0] if changed else find_model(self.settings.model, revision=None, trust_remote_code=False)
        return load_tokenizer(str(found))

    @cached_property
    def digests(self) -> set[bytes]:
        """Digests of the prompts' tokens; those of a chat of several turns end before its last answer."""
        data_format = self.settings.evaluate.get("format")
        found = set()
        for one in self.prepared:
            if one.test is not None:
                prompts = read_prompts([str(one.test)], data_format, flag="test:")
                found |= {digest(encode_prompt(prompt, self.tokenizer)) for prompt in prompts}
            if one.held_out is not None:
                found |= {list(row)[-1] for row in iterate_digests(one.held_out)}
        return found

    def list_free(self, task: Task) -> list[Prompt]:
        """The task's questions that no test or held-out set has."""
        questions = read_questions(task, self.settings)
        return [one for one in questions if digest(encode_prompt(one, self.tokenizer)) not in self.digests]

    def count_rows(self, data: Path) -> int:
        """Rows of a data set that contain one of the prompts."""
        if data not in self.counts:
            self.counts[data] = sum(not self.digests.isdisjoint(row) for row in iterate_digests(data))
        return self.counts[data]


def iterate_digests(data: Path) -> Iterator[list[bytes]]:
    """Yields each row's digests of the tokens before each of its trained parts."""
    samples = TokenizedData(data)
    for row in range(len(samples.lengths)):
        sample = samples.read(row)
        is_trained = np.asarray(sample["labels"]) != IGNORED
        starts = np.flatnonzero(is_trained & ~np.concatenate([[False], is_trained[:-1]]))
        yield [digest(sample["input_ids"][:start]) for start in starts]


def digest(ids: Any) -> bytes:
    return hashlib.sha256(np.asarray(ids, np.int64).tobytes()).digest()
