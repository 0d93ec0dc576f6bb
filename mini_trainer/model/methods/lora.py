"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) with peft, on frozen weights: see docs/tasks/lora.md."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from mini_trainer.data.stores.model_files import GENERATION
from mini_trainer.data.stores.older_keys import save_tokenizer
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.model.config import ModelSource
from mini_trainer.model.fingerprints import fingerprint_model
from mini_trainer.model.method import MetaModel, Method
from mini_trainer.model.methods import adapter_files, lora_layers, nf4
from mini_trainer.model.weights import Readers, WeightGroup, gather_all, gather_parameters
from mini_trainer.objectives.families.family import Family
from mini_trainer.objectives.objective import PackedModel
from mini_trainer.options import DataOptions, LoRAOptions
from mini_trainer.options.doors import BASE_QUANTIZATIONS, LORA_EXPORTS

if TYPE_CHECKING:
    from peft import LoraConfig

ERROR_4_BITS = 2e-1  # allowed relative error of a merged model's loss, whose base is no longer in 4 bits


class LoRA(Method):
    """Trains adapters in fp32 next to frozen weights in the compute dtype. Invariant: after `prepare` or `lay_out`,
    `config` and `saved_names` describe the layers in the model; rank 0 has a `merger` after `prepare`."""

    tags = ("lora",)
    saves_frozen = False
    recomputed = frozenset({"aten::mm"})  # also of other layers; a layer's last and largest product is an addmm
    vocabulary_multiple = 1  # so that the adapter fits a model resized to the tokenizer's length

    @classmethod
    def make(cls, options: LoRAOptions, *, seed: int) -> "LoRA":
        return cls(options, seed=seed)

    def __init__(self, options: LoRAOptions, *, seed: int):
        self.options, self.seed = options, seed
        self.is_packed = BASE_QUANTIZATIONS[options.base_quantization]
        self.writes_adapter, self.merges = LORA_EXPORTS[options.lora_export]
        self.title = "QLoRA" if self.is_packed else "LoRA"
        self.takes_long = self.is_packed
        self.export_error = ERROR_4_BITS if self.is_packed else 0.0
        self.relation = "finetune" if self.merges else "adapter"
        self.path = None if options.lora_adapter is None else Path(options.lora_adapter)
        self.given: LoraConfig | None = None  # of the adapter there
        self.targets = lora_layers.TrainedModules()
        self.config: LoraConfig | None = None
        self.saved_names: dict[str, str] = {}  # of trained parameters: name in an adapter's file -> name in the model
        self.num_added = self.num_trained = self.num_by_token = 0
        self.packed = ""  # name of the 4-bit layers
        self.unpacked = ""  # description of the blocks' frozen matrices that are not in 4 bits
        self.base: dict[str, str | None] = {}  # on rank 0: the adapters' base model
        self.merger: lora_layers.Merger | None = None
        self.adapter: dict[str, Tensor] = {}  # on rank 0: tensors gathered for an export

    @classmethod
    def from_adapter(cls, directory: Path, *, flag: str) -> "LoRA":
        """Makes the method that inserts an existing adapter's layers into its model; ValueError, naming `flag`."""
        method = cls(LoRAOptions(lora=True, lora_adapter=str(directory)), seed=0)
        method.given = adapter_files.read_config(directory, flag=flag)
        return method

    def open_files(self, tokenizer: PreTrainedTokenizerBase, data_options: DataOptions) -> None:
        if self.path is not None:
            self.given = adapter_files.read_config(self.path)

    def list_data_hashes(self) -> list[str]:
        return [] if self.path is None else list(adapter_files.hash_adapter(self.path).values())

    def verify_files(self) -> None:
        if self.path is not None:
            adapter_files.verify_adapter(self.path)

    def read_generation_config(self) -> GenerationConfig | None:
        return adapter_files.read_generation_config(self.path)

    def list_read_files(self) -> dict[str, Path]:
        files = {adapter_files.ADAPTER_CONFIG: self.path, GENERATION: adapter_files.find_beside(self.path, GENERATION)}
        return {f"--lora-adapter, {name}": folder / name for name, folder in files.items() if folder is not None}

    def choose_layers(self, meta: MetaModel) -> None:
        self.targets = lora_layers.choose_targets(meta, self.options, given=self.given)
        self.config = lora_layers.make_config(meta, self.options, self.targets, given=self.given)

    def prepare(self, meta: MetaModel, readers: Readers, *, world: World, progress: Callable[[str], None]) -> None:
        stored = dict(readers)  # the base as stored on disk, for exports
        shapes = {name: param.shape for name, param in meta.model.named_parameters()}
        layers, renamed = self.replace_layers(meta)
        if lora_layers.shares_inputs(world.device) and not meta.compiled:
            lora_layers.share_inputs(meta.model.modules(), adapter=lora_layers.ADAPTER)

        def prepare_readers() -> None:
            self.base = meta.source.describe() | {"fingerprint": fingerprint_model(meta.source.directory)}
            self.merger = lora_layers.Merger(meta.model, layers, renamed, stored, shapes=shapes)
            initial = lora_layers.make_initial(layers, self.merger.read_base, seed=self.seed)
            if self.path is not None:
                adapter_files.check_base(self.path, self.given, self.base)
                initial |= adapter_files.read_adapter(
                    self.path, meta, self.saved_names, new=self.targets.new, ties=self.given.ensure_weight_tying
                )
            for name, own_name in renamed.items():
                if own_name in readers:
                    readers[name] = readers.pop(own_name)
            readers.update(initial)

        call_on_rank0(world, prepare_readers)

    def lay_out(self, meta: MetaModel) -> None:
        self.replace_layers(meta)

    def replace_layers(self, meta: MetaModel) -> tuple[dict[str, nn.Module], dict[str, str]]:
        """Freezes the model, adds adapters to its layers, and packs the layers to quantize.
        Returns peft's layers before packing, by name, and the original name of each base parameter."""
        model = meta.model
        own_names = {id(param): name for name, param in model.named_parameters()}
        before = sum(param.numel() for param in model.parameters())
        model.requires_grad_(False)
        for param in model.parameters():
            if param not in meta.kept:
                param.data = param.data.to(meta.compute_dtype)
        injected = lora_layers.inject(model, self.config, self.targets)
        layers = {name: copy.deepcopy(layer) for name, layer in injected.items()}
        renamed = {name: own_names[id(p)] for name, p in model.named_parameters() if id(p) in own_names}
        self.saved_names = lora_layers.find_saved_names(model)
        if self.is_packed:
            nf4.pack_layers(meta.blocks, compute_dtype=meta.compute_dtype, kept=meta.kept)
            has_experts = nf4.pack_experts(meta.blocks, compute_dtype=meta.compute_dtype, kept=meta.kept)
            self.packed = "linear layers and experts" if has_experts else "linear layers"
            self.unpacked = describe_unpacked(meta.blocks)
        lora_layers.speed_up(model.modules(), adapter=lora_layers.ADAPTER, kept=meta.kept)
        nf4.adapt_experts(model.modules(), adapter=lora_layers.ADAPTER)
        params = list(model.parameters())
        self.num_added = sum(param.numel() for param in params) - before
        self.num_trained = sum(param.numel() for param in params if param.requires_grad)
        by_token = (model.get_input_embeddings(), model.get_output_embeddings())
        trained = {param for module in by_token if module is not None for param in module.parameters()}
        self.num_by_token = sum(param.numel() for param in trained if param.requires_grad and meta.source.new_tokens)
        return layers, renamed

    def fill(self, module: nn.Module, name: str, readers: Readers, *, world: World) -> None:
        if isinstance(module, nf4.NF4Weight) and module.packed.is_meta:
            nf4.fill_packed(module, name, readers, world=world)

    def count_added(self) -> int:
        return self.num_added

    def count_export_bytes(self, model_bytes: int) -> int:
        return 4 * self.num_trained * self.writes_adapter + model_bytes * self.merges

    def describe(self) -> str:
        num_layers = len(self.targets.layers) + len(self.targets.experts)
        in_full = f" and {', '.join(self.targets.in_full)}" if self.targets.in_full else ""
        quantized = f", the blocks' {self.packed} are in NF4{self.unpacked}" if self.is_packed else ""
        numbers = f"{self.num_trained:,} trainable parameters{quantized}"
        if self.num_by_token:
            numbers += (
                f", {self.num_by_token:,} of them for added tokens ({16 * self.num_by_token / 1e9:.1f} GB in all)"
            )
        return f"{self.title} of rank {self.config.r} on {num_layers} layers{in_full}: {numbers}"

    def gather_weights(self, packed_model: PackedModel, dtype: torch.dtype, *, world: World) -> list[WeightGroup]:
        """The merged model, if requested; the adapters are gathered immediately in any case, for `write_extras`."""
        model = packed_model.model
        trained = set(self.saved_names.values())
        frozen = {name for name, _ in (*model.named_parameters(), *model.named_buffers())} - trained
        gathered = gather_all(gather_parameters(model, torch.float32, world=world, leave_out=frozen))
        if world.rank != 0:
            return []
        self.adapter = gathered
        return self.merger.list_groups(gathered, dtype) if self.merges else []

    def write_extras(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        if self.writes_adapter and self.merges:
            merged, directory = directory, directory / "adapter"
            save_tokenizer(tokenizer, directory)
            if (merged / GENERATION).is_file():
                shutil.copyfile(merged / GENERATION, directory / GENERATION)
        if self.writes_adapter:
            tensors = {saved: self.adapter[name] for saved, name in self.saved_names.items()}
            adapter_files.write_adapter(directory, self.config, tensors, self.base)
        self.adapter = {}

    def load_export(self, directory: Path, source: ModelSource, family: Family) -> PreTrainedModel:
        """Loads the merged model, or merges the exported adapter into its base model."""
        if self.merges:
            return super().load_export(directory, source, family)
        trust = source.trust_remote_code
        model, _ = family.load_model(source.directory, dtype=torch.float32, trust_remote_code=trust)
        return adapter_files.add_adapter(model, directory).merge_and_unload()


def describe_unpacked(blocks: nn.ModuleList) -> str:
    """Names and size of the frozen matrices that are not linear layers, such as fused experts."""
    found = {name: param for name, param in blocks.named_parameters() if param.ndim > 1 and not param.requires_grad}
    if not found:
        return ""
    num_bytes = sum(param.nbytes for param in found.values())
    largest_first = sorted(found, key=lambda name: found[name].nbytes, reverse=True)
    kinds = lora_layers.list_kinds((name.replace(".base_layer", "") for name in largest_first), 2)
    dtype = str(found[largest_first[0]].dtype).removeprefix("torch.")
    return f", except for {num_bytes:,} bytes ({num_bytes / 1e9:,.2f} GB) in {dtype}: {', '.join(kinds)}"
