"""A run's options, code, data and model files, in the form that `compare_ranks` takes: all ranks must have the same.

Each rank describes the files that it reads. Weights, checkpoints and rows to tokenize are not described: only rank 0
reads them, or their hashes are verified on reading.
"""

from pathlib import Path

from mini_trainer.data.stores.contents import hash_once
from mini_trainer.data.stores.disk import hash_json
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData, find_recorded_file
from mini_trainer.distributed.agreement import DIGITS, Groups, Items
from mini_trainer.distributed.program import describe_program
from mini_trainer.distributed.world import World
from mini_trainer.model.fingerprints import fingerprint_config_files, fingerprint_data, fingerprint_tokenizer_state
from mini_trainer.options import MAY_DIFFER, TrainOptions
from mini_trainer.run.inputs import RunInputs

# Keys of a sidecar that training does not read.
UNREAD_KEYS = ("versions", "sources", "options", "split", "file", "sha256")


def describe_start(options: TrainOptions, world: World) -> Groups:
    """Everything to compare before files are read: options, code, libraries, device type, environment variables."""
    groups = describe_program(options, world, may_differ=MAY_DIFFER)
    asked = options.checkpoints
    own = {
        "--resume": describe_resume(asked.resume),
        "--continue-from": "no" if asked.continue_from is None else "a checkpoint",
    }
    return groups | {"options": groups["options"] | own}


def describe_resume(resume: str) -> str:
    """The value of --resume, without a checkpoint's path, which can differ between ranks."""
    return resume if resume in ("auto", "strict", "none") else "a checkpoint"


def describe_inputs(inputs: RunInputs, options: TrainOptions) -> Groups:
    """Digests of the files that every rank reads, by the options that name them."""
    read, with_code = inputs.method.list_read_files(), options.model.trust_remote_code
    models = {"--model-name-or-path": inputs.model_dir}
    models |= {flag: other.directory for flag, other in inputs.other_models.items()}
    return {
        "data": {
            name: items
            for option, data in inputs.data_sets.items()
            for name, items in describe_sets(data, option, is_verified=not options.skip_verification).items()
        },
        "model": {
            "tokenizer": fingerprint_tokenizer_state(inputs.tokenizer)[:DIGITS],
            **{
                f"{flag}, {name}": digest[:DIGITS]
                for flag, model_dir in models.items()
                for name, digest in fingerprint_config_files(Path(model_dir), with_code=with_code).items()
            },
        },
        "method": {flag: describe_file(path) for flag, path in read.items()},
        "teacher": {"--teacher-scores": str(inputs.teacher)[:DIGITS]},
    }


def describe_sets(data: Mixture, flag: str, *, is_verified: bool) -> Items:
    """Descriptions of data sets by their position in `flag`, since their paths can differ between ranks."""
    return {
        f"{flag}, data set {i}, {name}": value
        for i, source in enumerate(data.sources, start=1)
        for name, value in describe_data(source, is_verified=is_verified).items()
    }


def describe_data(data: TokenizedData, *, is_verified: bool) -> Items:
    """A data set's samples and content, as this node reads it: the whole file unless its verification is skipped."""
    sidecar = data.sidecar or {}
    known = {key: value for key, value in sidecar.items() if key not in UNREAD_KEYS}
    known["tokenizer_dir"] = sidecar.get("tokenizer_dir") is not None  # its name follows the data set's
    found = fingerprint_data(data.path, source=None, lengths=data.lengths, kept=data.kept)
    return {
        "samples": f"{len(data.kept):,} of {len(data.lengths):,}",
        "size": f"{data.path.stat().st_size:,} bytes",
        "SHA-256": hash_once(data.path)[:DIGITS] if is_verified else "skipped",
        "SHA-256 in the sidecar": str(find_recorded_file(sidecar).get("sha256", "not recorded"))[:DIGITS],
        "SHA-256 of sampled blocks": found[:DIGITS],
        "other keys of the sidecar": hash_json(known)[:DIGITS] if sidecar else "no sidecar",
    }


def describe_file(path: Path) -> str:
    return f"{path.stat().st_size:,} bytes, {hash_once(path)[:DIGITS]}"
