"""What all ranks of a run must have in common, as `compare_ranks` takes it: options, code, data, the model's files.

Each rank describes what it reads itself. Weights, checkpoints and rows are not described: rank 0 reads them, or
their hashes are verified while they are read.
"""

import hashlib
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from corpus.mixture import Mixture
from corpus.reader import TokenizedData, find_recorded_file
from disk import hash_json
from lifecycle.start import RunInputs
from model.fingerprints import fingerprint_config_files, fingerprint_data, fingerprint_file, fingerprint_tokenizer_state
from options import MAY_DIFFER, TrainOptions, flag_name, flatten_options
from ranks.agreement import Groups, Items
from ranks.world import World

DIGITS = 16  # of a hash in a message
# Packages whose releases compute, tokenize or lay out data differently.
PACKAGES = (
    "torch", "transformers", "tokenizers", "datasets", "pyarrow", "numpy", "numba", "safetensors", "peft",
    "bitsandbytes", "torchao", "liger-kernel", "flash-attn", "compressed-tensors", "triton",
)  # fmt: skip
# Variables by which libraries choose how exactly they multiply.
VARIABLES = (
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "ATEN_CPU_CAPABILITY",
    "MKL_CBWR", "TORCHDYNAMO_DISABLE",
)  # fmt: skip
UNREAD_KEYS = ("versions", "sources", "options", "split", "file")  # of a sidecar: training does not depend on them


def describe_start(options: TrainOptions, world: World) -> Groups:
    """What is known before any file is read: options, code and libraries, and the kind of device."""
    values = flatten_options(options)
    compared = {flag_name(name): str(value) for name, value in values.items() if name not in MAY_DIFFER}
    compared["--resume"] = describe_resume(options.checkpoints.resume)
    return {
        "options": compared,
        "code": {"mini_trainer": fingerprint_code(), "python": platform.python_version()} | dict(list_versions()),
        "environment": {
            "device": world.device.type,
            **{name: os.environ.get(name, "not set") for name in VARIABLES},
        },
    }


def describe_resume(resume: str) -> str:
    """The value of --resume, apart from where a checkpoint lies, which may differ."""
    return resume if resume in ("auto", "strict", "none") else "a checkpoint"


def describe_inputs(inputs: RunInputs, options: TrainOptions) -> Groups:
    """The content of what every rank reads itself, by the option that names it."""
    read = inputs.method.list_read_files()
    return {
        "data": describe_sets(inputs.data, "--data-path")
        | (describe_sets(inputs.validation_data, "--validation-data-path") if inputs.validation_data else {}),
        "model": {
            "tokenizer": fingerprint_tokenizer_state(inputs.tokenizer)[:DIGITS],
            **{
                f"--model-name-or-path, {name}": digest[:DIGITS]
                for name, digest in fingerprint_config_files(
                    Path(inputs.model_dir), with_code=options.model.trust_remote_code
                ).items()
            },
        },
        "method": {flag: describe_file(path) for flag, path in read.items()},
    }


def describe_sets(data: Mixture, flag: str) -> Items:
    """The data sets, by their places among those of `flag`; their paths may differ."""
    return {
        f"{flag}, data set {i}, {name}": value
        for i, source in enumerate(data.sources, start=1)
        for name, value in describe_data(source).items()
    }


def describe_data(data: TokenizedData) -> Items:
    """A data set's samples, and its content: by the sidecar, which has all of it, and by what the file itself holds.

    The sidecar alone could lie beside another file; the sampled blocks alone would miss a change between them.
    """
    sidecar = data.sidecar or {}
    known = {key: value for key, value in sidecar.items() if key not in UNREAD_KEYS}
    found = fingerprint_data(data.path, source=None, lengths=data.lengths, kept=data.kept)
    return {
        "samples": f"{len(data.kept):,} of {len(data.lengths):,}",
        "size": f"{data.path.stat().st_size:,} bytes",
        "SHA-256 in the sidecar": str(find_recorded_file(sidecar).get("sha256", "not recorded"))[:DIGITS],
        "SHA-256 of sampled blocks": found[:DIGITS],
        "other keys of the sidecar": hash_json(known)[:DIGITS] if sidecar else "no sidecar",
    }


def describe_file(path: Path) -> str:
    return f"{path.stat().st_size:,} bytes, {fingerprint_file(path)[:DIGITS]}"


def fingerprint_code() -> str:
    """SHA-256, shortened, of this program's modules: a checkout can differ from its commit."""
    root = Path(__file__).parent.parent
    rooms = sorted(path.parent for path in root.glob("*/__init__.py"))
    digest = hashlib.sha256()
    for path in (path for folder in (root, *rooms) for path in sorted(folder.glob("*.py"))):
        digest.update(f"{path.relative_to(root)} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:DIGITS]


def list_versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"
