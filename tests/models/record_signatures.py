"""Records the signatures of functions that only run on a GPU, and of private ones that say which types weights have,
from the releases themselves, in signatures.json.

    python tests/models/record_signatures.py

Downloads each release with pip, one at a time, reads its files without importing them, and deletes it. Of torch the
wheel for macOS: its Python files and operator schemas are those of every platform, in an eighth of the size.
"""

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

TARGET = Path(__file__).with_name("signatures.json")
RELEASES = {
    "torch": ("2.11.0", "2.12.0", "2.12.1", "2.13.0"),
    "liger-kernel": ("0.8.0", "0.8.1", "0.8.2", "0.8.3", "0.8.4", "0.8.5"),
    "flash-attn": ("2.8.0.post2", "2.8.1", "2.8.2", "2.8.3", "2.8.3.post2"),
    "torchao": ("0.18.0",),
    "bitsandbytes": ("0.48.0", "0.49.2", "0.50.2"),
    "transformers": ("5.17.0", "5.23.0"),
}
PIP = {
    "torch": ["--only-binary=:all:", "--python-version=3.12", "--platform=macosx_11_0_arm64",
              "--platform=macosx_14_0_arm64"],
    "flash-attn": ["--no-binary=:all:", "--no-build-isolation"],  # published as source only
}  # fmt: skip
# Functions and methods, by the file that defines them.
FUNCTIONS = {
    "torch/nn/attention/varlen.py": ["varlen_attn"],
    "torch/nn/attention/_registry.py": [
        "activate_flash_attention_impl", "current_flash_attention_impl", "list_flash_attention_impls",
    ],
    "torch/cuda/__init__.py": [
        "current_stream", "device_count", "get_device_capability", "get_device_name", "is_available", "set_device",
        "set_sync_debug_mode", "stream", "synchronize",
    ],
    "torch/cuda/memory.py": [
        "empty_cache", "max_memory_allocated", "mem_get_info", "memory_allocated", "memory_reserved",
        "reset_peak_memory_stats",
    ],
    "torch/cuda/random.py": ["get_rng_state"],
    "torch/cuda/streams.py": ["Stream.__new__", "Stream.record_event", "Stream.wait_event", "Stream.wait_stream"],
    "liger_kernel/ops/rms_norm.py": ["LigerRMSNormFunction.forward"],
    "liger_kernel/ops/fused_add_rms_norm.py": ["LigerFusedAddRMSNormFunction.forward"],
    "liger_kernel/ops/swiglu.py": ["LigerSiLUMulFunction.forward"],
    "liger_kernel/ops/geglu.py": ["LigerGELUMulFunction.forward"],
    "flash_attn/flash_attn_interface.py": ["flash_attn_varlen_func"],
    "torchao/float8/float8_linear_utils.py": ["convert_to_float8_training"],
    "torchao/float8/config.py": ["Float8LinearConfig.from_recipe_name"],
    "transformers/core_model_loading.py": ["build_glob_alternation"],
    "transformers/modeling_utils.py": ["PreTrainedModel._get_dtype_plan"],
    "bitsandbytes/functional.py": ["dequantize_4bit", "int8_vectorwise_dequant", "quantize_4bit"],
}  # fmt: skip
RECIPES = "Float8LinearRecipeName"  # an enumeration
OPERATORS = re.compile(r"(torch_attn::_varlen_attn|flash_attn::_flash_attn_varlen_forward)(_backward)?")
# Operators of torch, by file and by their schema's beginning.
SCHEMAS = {
    "torchgen/packaged/ATen/native/native_functions.yaml": re.compile(
        r"^- func: (addmm\.dtype_out|_flash_attention_(?:forward|backward))(\(.*\)) ->", re.MULTILINE
    ),
    "bitsandbytes/_ops.py": re.compile(
        r'define\(\s*"(bitsandbytes::(?:dequantize_4bit|dequantize_blockwise))",\s*"(\(.*?\)) ->'
    ),
}


def main() -> None:
    recorded: dict[str, dict[str, list]] = {}
    archives: dict[str, dict[str, str]] = {}
    for package, versions in RELEASES.items():
        for version in versions:
            with tempfile.TemporaryDirectory() as folder:
                archive = download(package, version, Path(folder))
                digest = hashlib.sha256(archive.read_bytes()).hexdigest()
                archives.setdefault(package, {})[version] = f"{archive.name} {digest}"
                for name, signature in read_signatures(read_files(archive)):
                    add(recorded.setdefault(package, {}).setdefault(name, []), signature, version)
    TARGET.write_text(json.dumps({"archives": archives, "signatures": recorded}, indent=1, sort_keys=True) + "\n")


def add(known: list, signature: str, version: str) -> None:
    """Adds the version to those that have this signature."""
    for entry in known:
        if entry["signature"] == signature:
            entry["releases"].append(version)
            return
    known.append({"signature": signature, "releases": [version]})


def download(package: str, version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={folder}"]
    # flash-attn's setup would look for CUDA's compiler just to state its version.
    environment = os.environ | {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    subprocess.run([*command, *PIP.get(package, []), f"{package}=={version}"], check=True, env=environment)
    (archive,) = folder.iterdir()
    return archive


def read_files(archive: Path) -> dict[str, str]:
    """The text of the files that are read, by their path in the package."""
    wanted = {*FUNCTIONS, *SCHEMAS}
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            return {name: opened.read(name).decode() for name in wanted & set(opened.namelist())}
    with tarfile.open(archive) as opened:
        names = {name: name.partition("/")[2] for name in opened.getnames()}
        return {path: opened.extractfile(name).read().decode() for name, path in names.items() if path in wanted}


def read_signatures(files: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yields each name with its signature, without annotations, as Python writes parameters."""
    for path, text in files.items():
        if path in SCHEMAS:
            yield from ((name, translate(schema)) for name, schema in SCHEMAS[path].findall(text))
        if path in FUNCTIONS:
            tree = ast.parse(text)
            functions = dict(list_functions(tree))
            module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            yield from ((f"{module}.{name}", describe(functions[name])) for name in FUNCTIONS[path])
            yield from list_operators(functions)
            yield from list_values(tree)


def list_functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields the functions of a file, and the methods of its classes as Class.method; the last definition counts."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{each.name}", each) for each in node.body if isinstance(each, ast.FunctionDef))


def describe(function: ast.FunctionDef) -> str:
    """The parameters of a function: names, kinds and defaults."""
    args = function.args
    for each in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg):
        if each is not None:
            each.annotation = None
    return f"({ast.unparse(args)})"


def list_operators(functions: dict[str, ast.FunctionDef]) -> Iterator[tuple[str, str]]:
    """Yields operators that Python functions define by a decorator custom_op, or one named after it."""
    for function in functions.values():
        for decorator in function.decorator_list:
            text = ast.unparse(decorator)
            found = OPERATORS.search(text) if "custom_op" in text else None
            if found is not None:
                yield found.group(), describe(function)


def list_values(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields torchao's names of recipes, whose signature is empty."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == RECIPES:
            yield from ((f"{RECIPES}({each.value.value})", "()") for each in node.body if isinstance(each, ast.Assign))


def translate(schema: str) -> str:
    """An operator's schema as Python writes parameters: "(Tensor self, *, Scalar beta=1)" -> "(self, *, beta=1)"."""
    parameters = [part.strip().split(" ")[-1] for part in schema.strip("()").split(",")]
    return f"({', '.join(parameters)})"


if __name__ == "__main__":
    main()
