"""Models for inference: a directory, a hub name, or a LoRA adapter with its base; checked first, loaded later."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from mini_trainer.data.columns.base import SEQUENCES, TOKENS
from mini_trainer.data.stores.model_files import GENERATION, find_model, find_weights, naming_config, verify_weights
from mini_trainer.data.stores.tokenizers import fingerprint_chat_template, fingerprint_tokenizer, load_tokenizer
from mini_trainer.distributed.devices import DTYPES
from mini_trainer.distributed.messages import say_note, shows_progress
from mini_trainer.model.config import load_generation_file, read_config
from mini_trainer.model.fingerprints import fingerprint_model
from mini_trainer.model.methods import adapter_files
from mini_trainer.model.stored_tensors import check_finite
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.options.reading import hash_file, read_object
from mini_trainer.options.tools import GenerateOptions, ServeOptions
from mini_trainer.run.file_names import BEST, EXPORTS_DIR, LATEST, PARAMS_FILE


@dataclass(frozen=True)
class FoundModel:
    """A model whose files have been checked, but whose weights have not been loaded."""

    name: str  # as given by the user
    base_name: str  # the model itself; differs from `name` if that is an adapter
    directory: str
    adapter: Path | None
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    trust_remote_code: bool

    @property
    def generation_dir(self) -> Path:
        """Directory whose generation_config.json applies, if it has one: the adapter's own, or the model's."""
        return adapter_files.find_beside(self.adapter, GENERATION) or Path(self.directory)

    @property
    def tokenizer_dir(self) -> Path:
        """Directory of the tokenizer and its chat template: the adapter's own, or the model's."""
        return adapter_files.find_beside(self.adapter, adapter_files.TOKENIZER_CONFIG) or Path(self.directory)

    @property
    def classifies(self) -> str | None:
        """A classifier's objective, according to its config or its adapter; None for other models."""
        if self.adapter is not None:
            task = read_object(self.adapter / adapter_files.ADAPTER_CONFIG).get("task_type")
            return {"SEQ_CLS": SEQUENCES, "TOKEN_CLS": TOKENS}.get(task)
        endings = {"ForSequenceClassification": SEQUENCES, "ForTokenClassification": TOKENS}
        found = [endings[end] for name in self.config.architectures or () for end in endings if name.endswith(end)]
        return found[0] if found else None

    def verify(self) -> None:
        """Checks its files against the hashes recorded at their export; ValueError for other weights."""
        verify_weights(self.directory)
        if self.adapter is not None:
            adapter_files.verify_adapter(self.adapter)

    def identify(self) -> dict[str, Any]:
        """Identity by content: names, and digests of config, weights, tokenizer and generation defaults."""
        generation = self.generation_dir / GENERATION
        identity = {
            "model": self.base_name,
            "fingerprint": fingerprint_model(self.directory),
            "tokenizer": fingerprint_tokenizer(self.tokenizer),
            "chat_template": fingerprint_chat_template(self.tokenizer),
            "generation_config": hash_file(generation)["sha256"] if generation.is_file() else None,
        }
        if self.adapter is not None:
            identity |= {"adapter": str(self.adapter), "adapter_sha256": adapter_files.hash_adapter(self.adapter)}
        return identity


def find_answering_model(
    name: str,
    *,
    adapter: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    flag: str = "--model",
) -> FoundModel:
    """Finds the model of `flag`, with its adapter if any. ValueError or OSError for errors that a user can fix."""
    name = find_in_run(name, flag=flag)
    base_name, adapter_dir = name, None if adapter is None else Path(adapter)
    if adapter is None and adapter_files.is_adapter(Path(name)):
        adapter_dir = Path(name)
        base_name, revision = adapter_files.find_base(adapter_dir, flag=flag)
    if adapter_dir is not None:
        adapter_flag = flag if adapter is None else "--adapter"
        adapter_files.check_readable(adapter_dir, flag=adapter_flag)
        adapter_files.check_settings(adapter_dir, flag=adapter_flag, runner="peft")
    base_flag = flag if base_name == name else f"{flag} {name}: its base model"
    directory = find_model(base_name, revision=revision, trust_remote_code=trust_remote_code, flag=base_flag)
    find_weights(base_name, directory)
    config = read_config(directory, flag=base_flag, trust_remote_code=trust_remote_code)
    tokenizer_dir = adapter_files.find_beside(adapter_dir, adapter_files.TOKENIZER_CONFIG) or directory
    tokenizer = load_tokenizer(str(tokenizer_dir), trust_remote_code=trust_remote_code, flag=flag)
    adapter_files.read_generation_config(adapter_dir)  # refused here if it cannot be used
    return FoundModel(name, base_name, directory, adapter_dir, config, tokenizer, trust_remote_code)


def find_given_model(options: GenerateOptions | ServeOptions) -> FoundModel:
    """Finds the model of a program's options, and verifies it unless they say otherwise."""
    adapter, revision, trusts = options.adapter, options.model_revision, options.trust_remote_code
    found = find_answering_model(options.model, adapter=adapter, revision=revision, trust_remote_code=trusts)
    if not options.skip_verification:
        found.verify()
    return found


def find_in_run(name: str, *, flag: str) -> str:
    """The best or else the latest export if `name` is a run's directory, otherwise `name`; ValueError without one."""
    if not Path(name, PARAMS_FILE).is_file():
        return name
    exports = [Path(name, EXPORTS_DIR, export) for export in (BEST, LATEST)]
    if (found := next((export for export in exports if export.is_dir()), None)) is None:
        raise ValueError(
            f"{flag} {name}: is a run without an export yet: mini-trainer export {name} writes one from its newest"
            " checkpoint"
        )
    say_note(f"{flag} {name}: uses {found}")
    return str(found)


def check_answering(found: FoundModel) -> None:
    if found.classifies is not None:
        raise ValueError(
            f"--model {found.name}: is a classifier ({found.classifies}), which cannot generate: use evaluate_model.py"
            " --data to measure it on a tokenized data set"
        )


def check_num_rows(found: FoundModel, num_rows: int) -> None:
    """ValueError if the tokenizer, such as an adapter's, has more entries than the model has embeddings."""
    if len(found.tokenizer) > num_rows:
        raise ValueError(
            f"--model {found.name}: the tokenizer has {len(found.tokenizer)} entries, the model {num_rows} embeddings:"
            " merge the adapter with mini-trainer merge-adapter, which adds the missing ones"
        )


def choose_dtype(config: PreTrainedConfig, given: str) -> torch.dtype:
    """The given dtype, or for "auto" the one in which the weights are stored."""
    return (config.dtype or torch.float32) if given == "auto" else DTYPES[given]


def load_answering_model(found: FoundModel, *, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Loads the model and its adapter, unmerged, onto `device`; ValueError if the files do not match the config."""
    check_answering(found)
    family = TextFamily()
    with naming_config(found.directory):
        obstacle = family.check_config(found.config, trust_remote_code=found.trust_remote_code)
    if obstacle is not None:
        raise ValueError(f"--model {found.name}: {obstacle}")
    if not shows_progress():
        transformers.utils.logging.disable_progress_bar()
    if Path(found.directory, GENERATION).is_file():
        load_generation_file(found.directory)  # refused by its name
    try:
        with naming_config(found.directory):
            model, report = family.load_model(found.directory, dtype=dtype, trust_remote_code=found.trust_remote_code)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"--model {found.name}: cannot load the weights: {error}") from None
    if problems := [f"{kind}: {report[kind]}" for kind in ("missing_keys", "mismatched_keys") if report[kind]]:
        raise ValueError(f"--model {found.name}: the weights do not fit the config: {'; '.join(problems)}")
    check_num_rows(found, model.get_input_embeddings().weight.shape[0])
    if found.adapter is not None:
        model.generation_config = adapter_files.read_generation_config(found.adapter) or model.generation_config
        try:
            model = adapter_files.add_adapter(model, found.adapter)
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            problem = f"--adapter {found.adapter}: does not fit the model: {str(error).splitlines()[0]}"
            raise ValueError(problem) from None
    for name, param in model.named_parameters():
        check_finite(param.detach(), name, where=f"--model {found.name}")
    return model.to(device).eval()
