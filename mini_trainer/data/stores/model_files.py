"""Finding and checking a model's files. None is trusted: names are checked before anything is loaded.

Anything in a model directory that could run code, links outside it, or is not safetensors is refused by name. So are
values in its JSON files that no model can be made of, before memory is taken: transformers checks the types of most
keys, and few ranges.
"""

import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mini_trainer.data.stores.contents import verify_model
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.messages import one_line
from mini_trainer.options.reading import open_regular, open_tensors, read_object

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
# Sizes by their keys, also in the configs of towers: the least, and the most, which is far above those of any model.
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "head_dim"), (1, 1 << 20)),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), (1, 1 << 14)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads"), (1, 1 << 20)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "n_inner", "ffn_dim"), (0, 1 << 26)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), (0, 1 << 20)),
    "vocab_size": (1, 1 << 28),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (1, 1 << 40)),
}
NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "max_length", "max_new_tokens",
    "min_length", "min_new_tokens", "num_beams", "no_repeat_ngram_size",
)  # fmt: skip
DROPOUTS = ("dropout", "_pdrop")  # ends of keys
TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")
MOST_TOKEN = 1 << 28
# Errors that code raises on unexpected values.
ODD_VALUE = (TypeError, KeyError, IndexError, AttributeError, ArithmeticError, AssertionError)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
READ_FILES = ("config.json", "tokenizer_config.json", "generation_config.json", "processor_config.json")
CARD_FILE = "README.md"
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", CARD_FILE]  # config, tokenizer, model card
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".gguf")
COMMIT = re.compile("[0-9a-f]{40}")
UNUSED, UNUSED_OR_HEAD = re.compile(r"(^|\.)mtp\."), re.compile(r"(^|\.)mtp\.|lm_head\.")
TOWERS = re.compile("vision|visual|audio|projector")  # in names of tensors outside of the language model
MODEL_FLAG = "--model-name-or-path"  # for messages, unless a script uses another option


def check_values(config: dict[str, Any], path: Path) -> None:
    """ValueError for the first value of the JSON file `path` that is out of range, with its key."""
    for key, value in config.items():
        if (allowed := find_allowed(key, value, path.name)) is not None:
            raise ValueError(f"{path}: {key} is {json.dumps(value):.60}, but must be {allowed}")
        if isinstance(value, dict):
            check_values(value, path)


def find_allowed(key: str, value: Any, file: str) -> str | None:
    """The allowed values of a key that has another one; None for a good value, and for keys without a check."""
    items = value if isinstance(value, list) else [value]  # such as the sizes of layers, or several tokens
    if value is None:
        return None
    is_numeric = key in NUMBERS if file == GENERATION else (file, key) == (TOKENIZER, "model_max_length")
    if is_numeric and not is_number(value):
        return "a number or null"
    if file == GENERATION and key in TOKENS and not all(is_whole(item, -1, MOST_TOKEN) for item in items):
        return "a token id, a list of those, or null"
    if file == CONFIG and key in SIZES and not all(item is None or is_whole(item, *SIZES[key]) for item in items):
        return "an integer from {} to {:,}".format(*SIZES[key])
    if file == CONFIG and key == "architectures" and not all(isinstance(item, str) for item in items):
        return "a list of names"
    if file == CONFIG and key.endswith(DROPOUTS) and is_number(value) and not 0 <= value <= 1:
        return "a number from 0 to 1"
    return None


def is_whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@contextmanager
def naming_config(directory: str | Path, *, file: str = CONFIG) -> Iterator[None]:
    """Turns an error of code that cannot work with a model's config into a ValueError that names the file."""
    try:
        yield
    except ODD_VALUE as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{Path(directory) / file}: cannot be used: {type(error).__name__}: {reason:.300}") from None


def find_model(
    model_name_or_path: str, *, revision: str | None, trust_remote_code: bool, flag: str = MODEL_FLAG
) -> str:
    """Returns the model's directory, checked (see `check_model_dir`); downloads a hub model except for its weights.
    ValueError for errors that a user can fix."""
    check_model_path(model_name_or_path, flag=flag)
    if Path(model_name_or_path).is_dir():
        if revision is not None:
            raise ValueError(f"--model-revision {revision} has no effect: {model_name_or_path} is a directory")
        path = Path(model_name_or_path)
    else:
        if trust_remote_code and not COMMIT.fullmatch(revision or ""):
            raise ValueError(
                f"--trust-remote-code needs --model-revision with a commit's 40 hexadecimal digits, not {revision}: a"
                " branch or tag can move to code that you have not read"
            )
        patterns = [*SMALL_FILES, "*.py"] if trust_remote_code else SMALL_FILES
        path = download(model_name_or_path, revision=revision, patterns=patterns, flag=flag)
    if code := check_model_dir(path, trust_remote_code=trust_remote_code):
        log.warning(f"warning: --trust-remote-code: {path} runs its own code: {', '.join(code)}")
    elif trust_remote_code:
        raise ValueError(f"--trust-remote-code has no effect: {path} has no code to run")
    return str(path)


def name_model(model_name_or_path: str) -> str:
    """The model's name without its directories, which are private; a hub's name unchanged."""
    path = Path(model_name_or_path)
    return path.absolute().name if path.exists() else model_name_or_path


def find_weights(model_name_or_path: str, model_dir: str) -> None:
    """Downloads a hub model's weights to the directory from `find_model`; checks them (`check_weights`)."""
    path = Path(model_dir)
    if not Path(model_name_or_path).is_dir():
        download(model_name_or_path, revision=path.name, patterns=["model*.safetensors"], flag=MODEL_FLAG)
    check_model_links(path)
    check_weights(path)


def verify_weights(model_dir: str) -> None:
    """Checks a model's files against the hashes of its export (`verify_model`)."""
    path = Path(model_dir)
    names = list_weights(path)
    verify_model(path, names if names == [WEIGHTS] else [INDEX, *names])


def check_model_dir(path: Path, *, trust_remote_code: bool) -> list[str]:
    """Reads configs only, and returns the entries that name code to run, allowed with `trust_remote_code`. ValueError
    for such entries otherwise, for links out of the directory, for an adapter, and for values out of range."""
    check_model_links(path)
    if (path / "adapter_config.json").exists():
        raise ValueError(
            f"{path / 'adapter_config.json'}: an adapter, not a model: merge it with its base first: mini-trainer"
            f" merge-adapter --adapter {path} --output-dir DIRECTORY"
        )
    code = []
    for name in READ_FILES:
        if (path / name).exists():
            config = read_object(path / name)
            check_values(config, path / name)
            found = [f"{name} ({reference})" for reference in find_code(config, path / name)]
            if found and not trust_remote_code and has_stock_class(config, name):
                log.warning(f"warning: {path}: {', '.join(found)}: not run; transformers has its own class for it")
                continue
            code += found
    if (path / "custom_generate").exists():
        code.append("custom_generate")
    if code and not trust_remote_code:
        raise ValueError(
            f"{path}: needs its own code, which was not run: {', '.join(code)}. Read that code, and add"
            " --trust-remote-code (and for a model on the hub its --model-revision) if you trust it"
        )
    return code


def has_stock_class(config: dict[str, Any], name: str) -> bool:
    """Whether transformers can load what the file `name` configures without the code in its auto_map. Models that
    became part of transformers still have that entry: Phi 3, DeepSeek V3, Falcon."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    if name == "config.json":
        names = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
        return any(config.get("model_type") in known for known in names)
    own = config.get("tokenizer_class")
    return name == TOKENIZER and isinstance(own, str) and tokenizer_class_from_name(own) is not None


def check_model_links(path: Path) -> None:
    """ValueError for an entry that is not a regular file, or is a link to another directory."""
    root = path.resolve()
    if root.parent.name == "snapshots":  # in the hub's cache, files are links into the repository's blobs
        root = root.parent.parent
    for file in sorted(path.iterdir()):
        if file.is_dir():
            continue
        if not file.is_file() or not file.resolve().is_relative_to(root):
            raise ValueError(f"{file}: is not a regular file in its directory (links must not lead out of it)")


def find_code(value: Any, file: Path) -> Iterator[str]:
    """Yields a config's entries that name classes to run (auto_map). ValueError for those that cannot be pinned: other
    repositories' code, kernels from the hub, and named weight files."""
    if isinstance(value, list):
        for item in value:
            yield from find_code(item, file)
    if not isinstance(value, dict):
        return
    for key, entry in value.items():
        texts = ", ".join(iterate_texts(entry))
        if key in ("auto_map", "custom_pipelines") and entry:
            if "--" in texts:
                raise ValueError(f"{file}: {key} names another repository's code ({texts}): copy it here")
            yield f"{key}: {texts}"
        elif "_implementation" in key and "/" in texts:
            raise ValueError(f"{file}: {key} names a compiled kernel of the hub ({texts}): remove it")
        elif key == "transformers_weights" and entry:
            raise ValueError(f"{file}: {key} names {texts} as weights: rename these {WEIGHTS}, and remove it")
        else:
            yield from find_code(entry, file)


def iterate_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from iterate_texts(item)


def check_weights(path: Path) -> None:
    """ValueError unless the weights are complete safetensors files in the directory itself."""
    from safetensors import SafetensorError

    if not (names := list_weights(path)):
        others = sorted(file.name for file in path.iterdir() if file.suffix in OTHER_WEIGHTS)
        raise ValueError(
            f"{path}: no weights: there is neither {WEIGHTS} nor {INDEX}"
            + (f", only {', '.join(others)}. Pickles can run code when loaded, so only safetensors are accepted: if you"
               " trust it, convert it (AutoModelForCausalLM.from_pretrained(...).save_pretrained(...))"
               if others else "")
        )  # fmt: skip
    for name in names:
        if (path / name).exists() and not os.access(path / name, os.R_OK):
            raise ValueError(f"{path / name}: cannot be read: permission denied")  # safetensors says that it is missing
        try:
            with open_tensors(path / name, "numpy"):  # reads the header and checks it against the file's size
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path / name}: damaged, or not a safetensors file: {error}") from None


def list_weights(path: Path) -> list[str]:
    """Names of a model's weight files; empty if there are none (see `read_index`)."""
    if (path / WEIGHTS).exists():
        return [WEIGHTS]
    return read_index(path / INDEX) if (path / INDEX).exists() else []


def count_values(path: Path, *, has_head: bool) -> tuple[int, int]:
    """Numbers in a model's weight files, by their headers, and how many of them are of its language model. Of a
    quantized model those that are stored; without its predictions of several tokens, and without a head that is tied
    to the embedding, or not used."""
    total, of_text = 0, 0
    left_out = UNUSED if has_head and not read_object(path / CONFIG).get("tie_word_embeddings") else UNUSED_OR_HEAD
    for name in list_weights(path):
        with open_regular(path / name) as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for tensor, layout in header.items():
            if tensor != "__metadata__" and not left_out.search(tensor):
                total += (count := math.prod(layout["shape"]))
                of_text += 0 if TOWERS.search(tensor) else count
    return total, of_text


def read_index(index: Path) -> list[str]:
    """Names of the files in a weight index; ValueError unless they are in the same directory."""
    content = read_object(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(content.get("metadata"), dict):
        raise ValueError(f"{index}: not a weight index: it has no weight_map or no metadata")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{index}: names {name!r}, which is not a safetensors file in its directory")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index}: names {name}, which is missing")
    return names


def check_model_path(path: str, *, flag: str) -> None:
    """Refuses a path that is not a model's directory, so that it is not taken for a name on the hub."""
    is_path = path.startswith(("/", "./", "../", "~")) or os.path.isfile(path)
    if is_path and not os.path.isdir(path):
        kind = "is a file" if os.path.isfile(path) else "there is no such directory"
        raise ValueError(f"{flag} {path}: {kind}; give a model's directory, or its name on the hub")
    found = [] if Path(path, "config.json").exists() else sorted(map(str, Path(path).glob("hf_format/[!.]*")))
    if found:
        raise ValueError(f"{flag} {path}: a run's directory, not a model; give one of its exports: {', '.join(found)}")


def download(repo: str, *, revision: str | None, patterns: list[str], flag: str) -> Path:
    """Downloads the repository's files matching `patterns` to the hub's cache; without network, finds them there."""
    from huggingface_hub import snapshot_download  # takes as long as all checks of a local model

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except Exception as error:  # errors of the network, the hub and the disk
        from mini_trainer.data.stores.remote import make_error  # which no run with local files needs

        raise make_error(
            error,
            f"{flag} {repo}: there is no such directory, and it cannot be downloaded from the hub"
            f"{f' at --model-revision {revision}' if revision else ''}: {one_line(error) or type(error).__name__}",
        ) from None
