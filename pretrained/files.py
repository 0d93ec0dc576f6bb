"""Where a model's files are, and that none of them is trusted: nothing is loaded before their names have been read.

A model directory is someone else's. What could run code, leads out of it, or is no safetensors is refused by name.
"""

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from disk import read_object
from ranks.ending import log

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
READ_FILES = ("config.json", "tokenizer_config.json", "generation_config.json", "processor_config.json")
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]  # config and tokenizer of a repository
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".gguf")
COMMIT = re.compile("[0-9a-f]{40}")
MODEL_FLAG = "--model-name-or-path"  # as messages call it, where a script has no other name for it


def find_model(
    model_name_or_path: str, *, revision: str | None, trust_remote_code: bool, flag: str = MODEL_FLAG
) -> str:
    """The model's directory, checked (see `check_model_dir`); of a model on the hub, all but the weights is downloaded.

    Raises ValueError for errors that a user can fix.
    """
    check_model_path(model_name_or_path, flag=flag)
    if Path(model_name_or_path).is_dir():
        if revision is not None:
            raise ValueError(f"--model-revision {revision} has no effect: {model_name_or_path} is a directory")
        path = Path(model_name_or_path)
    else:
        if trust_remote_code and not COMMIT.fullmatch(revision or ""):
            raise ValueError(
                f"--trust-remote-code needs --model-revision with a commit's 40 hexadecimal digits, not {revision}: a"
                " branch or a tag can move to other code than what you have read"
            )
        patterns = [*SMALL_FILES, "*.py"] if trust_remote_code else SMALL_FILES
        path = download(model_name_or_path, revision=revision, patterns=patterns, flag=flag)
    code = check_model_dir(path, trust_remote_code=trust_remote_code)
    if code:
        log.warning(f"warning: --trust-remote-code: {path} runs code of its own: {', '.join(code)}")
    elif trust_remote_code:
        raise ValueError(f"--trust-remote-code has no effect: nothing in {path} asks to run code of its own")
    return str(path)


def name_model(model_name_or_path: str) -> str:
    """The model's name without its directories, which are nobody else's; a hub's name as it is."""
    path = Path(model_name_or_path)
    return path.absolute().name if path.exists() else model_name_or_path


def find_weights(model_name_or_path: str, model_dir: str) -> None:
    """Downloads the weights of a model on the hub beside what `find_model` found; checks them (`check_weights`)."""
    path = Path(model_dir)
    if not Path(model_name_or_path).is_dir():
        download(model_name_or_path, revision=path.name, patterns=["model*.safetensors"])
    check_model_links(path)
    check_weights(path)


def download(repo: str, *, revision: str | None, patterns: list[str], flag: str = MODEL_FLAG) -> Path:
    """The repository's files of these patterns, in the hub's cache; from the cache alone where there is no network."""
    from huggingface_hub import snapshot_download

    find = functools.partial(snapshot_download, repo, revision=revision, allow_patterns=patterns)
    try:
        return Path(find())
    except Exception as error:  # of the network, the hub and the disk
        reason = " ".join(str(error).split()) or type(error).__name__
    try:  # huggingface-hub 1 does not do so by itself where a commit is given
        path = Path(find(local_files_only=True))
    except Exception:
        raise ValueError(
            f"{flag} {repo}: there is no such directory, and it cannot be had from the hub"
            f"{f' at --model-revision {revision}' if revision else ''}: {reason}"
        ) from None
    log.warning(f"warning: {repo} is read from the cache alone: {reason}")
    return path


def check_model_dir(path: Path, *, trust_remote_code: bool) -> list[str]:
    """Reads names only, and returns what asks for code to be run, which is allowed with `trust_remote_code`.

    ValueError for that, for files that lead out of the directory, and for an adapter.
    """
    check_model_links(path)
    if (path / "adapter_config.json").exists():
        raise ValueError(f"{path / 'adapter_config.json'}: an adapter is no model: merge it with its base model first")
    code = []
    for name in READ_FILES:
        if (path / name).exists():
            config = read_object(path / name)
            found = [f"{name} ({reference})" for reference in find_code(config, path / name)]
            if found and not trust_remote_code and has_stock_class(config, name):
                log.warning(f"warning: {path}: {', '.join(found)}: not run; transformers has the class itself")
                continue
            code += found
    if (path / "custom_generate").exists():
        code.append("custom_generate")
    if code and not trust_remote_code:
        raise ValueError(
            f"{path}: asks to run code of its own, which has not been done: {', '.join(code)}. Read that code, and add"
            " --trust-remote-code (and for a model on the hub its --model-revision) if you trust it"
        )
    return code


def has_stock_class(config: dict[str, Any], name: str) -> bool:
    """Whether transformers loads what the file `name` configures without the code that its auto_map names.

    Models that became part of transformers still carry that entry: Phi 3, DeepSeek V3, Falcon.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    if name == "config.json":
        names = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
        return any(config.get("model_type") in known for known in names)
    tokenizer_class = config.get("tokenizer_class")
    is_known = isinstance(tokenizer_class, str) and tokenizer_class_from_name(tokenizer_class) is not None
    return name == "tokenizer_config.json" and is_known


def check_model_links(path: Path) -> None:
    """ValueError for a file that is none, or lies elsewhere."""
    root = path.resolve()
    if root.parent.name == "snapshots":  # of the hub's cache, whose files are links into the repository's blobs
        root = root.parent.parent
    for file in sorted(path.iterdir()):
        if file.is_dir():
            continue
        if not file.is_file() or not file.resolve().is_relative_to(root):
            raise ValueError(f"{file}: is no regular file of its directory (links must not lead out of it)")


def find_code(value: Any, file: Path) -> Iterator[str]:
    """Entries of a config that name code: classes (auto_map), and kernels of the hub as attention or experts.

    ValueError for those that cannot be pinned: other repositories' code, and files of weights chosen by name.
    """
    if isinstance(value, list):
        for item in value:
            yield from find_code(item, file)
    if not isinstance(value, dict):
        return
    for key, entry in value.items():
        texts = list(iterate_texts(entry))
        if key in ("auto_map", "custom_pipelines") and entry:
            if any("--" in text for text in texts):
                raise ValueError(f"{file}: {key} names another repository's code ({', '.join(texts)}): copy it here")
            yield f"{key}: {', '.join(texts)}"
        elif "_implementation" in key and any("/" in text for text in texts):
            raise ValueError(f"{file}: {key} names a compiled kernel of the hub ({', '.join(texts)}): remove it")
        elif key == "transformers_weights" and entry:
            raise ValueError(f"{file}: {key} names {', '.join(texts)} as weights: call them {WEIGHTS}, and remove it")
        else:
            yield from find_code(entry, file)


def iterate_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from iterate_texts(item)


def check_weights(path: Path) -> None:
    """ValueError unless the weights are whole safetensors files of the directory itself."""
    from safetensors import SafetensorError, safe_open

    names = list_weights(path)
    if not names:
        others = sorted(file.name for file in path.iterdir() if file.suffix in OTHER_WEIGHTS)
        raise ValueError(
            f"{path}: no weights: there is neither {WEIGHTS} nor {INDEX}"
            + (f", only {', '.join(others)}. Pickles can run code when they are loaded, so only safetensors are: where"
               " you trust it, convert it (AutoModelForCausalLM.from_pretrained(...).save_pretrained(...))"
               if others else "")
        )  # fmt: skip
    for name in names:
        try:
            with safe_open(path / name, framework="numpy"):  # reads the header, and compares it with the file's size
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path / name}: damaged, or no safetensors file: {error}") from None


def list_weights(path: Path) -> list[str]:
    """The names of the files that hold a model's weights; none if there are none (see `read_index`)."""
    if (path / WEIGHTS).exists():
        return [WEIGHTS]
    return read_index(path / INDEX) if (path / INDEX).exists() else []


def read_index(index: Path) -> list[str]:
    """The files that an index of weights names; ValueError unless they are beside it."""
    content = read_object(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(content.get("metadata"), dict):
        raise ValueError(f"{index}: no index of weights: it has no weight_map or no metadata")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{index}: names {name!r}, which is no safetensors file of its own directory")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index}: names {name}, which is missing")
    return names


def check_model_path(path: str, *, flag: str) -> None:
    """Refuses what can only be a path, and leads to no directory, before it is taken for a name on the hub."""
    is_path = path.startswith(("/", "./", "../", "~")) or os.path.isfile(path)
    if is_path and not os.path.isdir(path):
        kind = "is a file" if os.path.isfile(path) else "there is no such directory"
        raise ValueError(f"{flag} {path}: {kind}; give a model's directory, or its name on the hub")
