"""A script's options, code, libraries and environment, in the form that `compare_ranks` takes."""

import hashlib
import os
import platform
from collections.abc import Collection, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mini_trainer
from mini_trainer.distributed.agreement import DIGITS, Groups
from mini_trainer.distributed.world import World
from mini_trainer.options import flag_name, flatten_options
from mini_trainer.root_files import NAMES, ROOT, is_checkout

# Packages whose releases compute, tokenize or lay out data differently.
PACKAGES = (
    "torch", "transformers", "tokenizers", "datasets", "pyarrow", "numpy", "numba", "safetensors", "peft",
    "bitsandbytes", "torchao", "liger-kernel", "flash-attn", "compressed-tensors", "triton",
)  # fmt: skip
# Variables that set the precision or the order of sums in libraries' matrix products.
VARIABLES = (
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "ATEN_CPU_CAPABILITY",
    "MKL_CBWR", "TORCHDYNAMO_DISABLE",
)  # fmt: skip


def describe_program(options: Any, world: World, *, may_differ: Collection[str]) -> Groups:
    """A script's options (except `may_differ`), code, library versions, device type and environment variables."""
    values = flatten_options(options)
    return {
        "options": {flag_name(name): str(value) for name, value in values.items() if name not in may_differ},
        "code": {"mini_trainer": fingerprint_code(), "python": platform.python_version()} | dict(list_versions()),
        "environment": {
            "device": world.device.type,
            **{name: os.environ.get(name, "not set") for name in VARIABLES},
        },
    }


def fingerprint_code() -> str:
    """Shortened SHA-256 of this program's modules: a checkout can differ from its commit."""
    package = Path(mini_trainer.__file__).parent
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    if is_checkout(ROOT):
        files |= {f"{name}.py": ROOT / f"{name}.py" for name in NAMES}
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(f"{name} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:DIGITS]


def list_versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"
