"""Which multi-modal models train exactly on text: every type of transformers, tiny; the others: architectures.py.

    OMP_NUM_THREADS=1 nice python benchmarks/architectures_multimodal.py
    OMP_NUM_THREADS=1 nice python benchmarks/architectures_multimodal.py --types qwen2_5_vl gemma3

writes results/architectures_multimodal.txt. Of each type a random model of the whole class is saved, built as
train.py builds it, checked, and compared over a packed row with the whole class's own forward and backward over one
sequence at a time, in fp32: the loss, and the gradient of every parameter of the text tower. Then it is exported as a
run does it: the export has to load in the same class, with the same keys, and all tensors have to be those that it was
made from, byte by byte. With `--types` nothing is written.
"""

from pathlib import Path
from typing import Any

import architectures
import numpy as np
import torch
from architectures import LENGTHS, SIZE_OF, Result, compare, describe
from harness import describe_versions, read_stored
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from mini_trainer.distributed.world import World, init_world
from mini_trainer.model.config import ModelSource, load_config, load_generation_config
from mini_trainer.model.method import Full
from mini_trainer.objectives.families.family import Family
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.objectives.families.text_tower import find_placeholders
from mini_trainer.objectives.objective import PackedModel
from mini_trainer.run.export import ExportParts, export_model

# Sizes of towers that do not run, by more names than a language model's.
SIZES = {
    "embed_dim": 64, "layers": 4, "base_channels": 32, "num_patches": 16, "codebook_size": 64, "hidden_dim": 64,
    "num_embeddings": 64,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4}
# What else some types' configs need.
CHANGES: dict[str, dict[str, Any]] = {
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": ROPE}}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense"] * 4}},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 96}},
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {"mrope_section": [3, 3, 2]}}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "glm5_next": {"text_config": {"index_kpool": 4}},
    "granite4_vision": {"deepstack_layer_map": [[1, 1]], "downsample_rate": "1/2"},
    "granite_docling": {"vision_config": {"out_hidden_size": 64}},
    "inkling2": {"vision_config": {"text_hidden_size": 64}},
}


def make_texts(path: Path) -> list[np.ndarray]:
    """Sequences of random tokens, none of which stands for an image or a sound."""
    config = AutoConfig.from_pretrained(path)
    texts = np.setdiff1d(np.arange(3, SIZE_OF["vocab_size"]), list(find_placeholders(config)))
    random = np.random.default_rng(0)
    return [texts[random.integers(0, len(texts), length)] for length in LENGTHS]


def export(
    packed_model: PackedModel, source: ModelSource, family: Family, tokenizer: Any, export_dir: Path, world: World
) -> None:
    generation_config = load_generation_config(source.directory, source.config)
    parts = ExportParts(family, Full(), generation_config, tokenizer, torch.float32, source)
    export_model(packed_model, export_dir, parts, world=world)


def find_fault(path: Path, export_dir: Path) -> str | None:
    """What of an export is not as the model was that it was made from, untrained; None if all is."""
    before, after = read_stored(path), read_stored(export_dir)
    if different := sorted(before.keys() ^ after.keys()):
        return f"{len(different)} keys differ, such as {different[0]}"
    for name, tensor in before.items():
        if tensor != after[name]:
            return f"{name} is not as it was"
    loaded, report = AutoModelForMultimodalLM.from_pretrained(export_dir, output_loading_info=True)
    own = AutoModelForMultimodalLM.from_pretrained(path)
    wrong = [f"{kind}: {sorted(report[kind])[:2]}" for kind in ("missing_keys", "unexpected_keys") if report[kind]]
    if type(loaded) is not type(own):
        wrong.append(f"loads as {type(loaded).__name__}")
    own_tensors = own.state_dict()
    wrong += [name for name, tensor in loaded.state_dict().items() if not torch.equal(tensor, own_tensors[name])][:1]
    return "; ".join(wrong) or None


def judge(model_type: str, path: Path) -> Result:
    """Makes the type's model, runs it both ways, exports it, and says what became of it."""
    model_dir, own_error = path / "model", None
    try:
        changes = CHANGES.get(model_type)
        architectures.save_tiny_model(model_type, model_dir, AutoModelForMultimodalLM, sizes=SIZES, changes=changes)
        sequences = make_texts(model_dir)
    except Exception as error:  # other people's models and configs may raise anything
        return Result("not built", describe(error))
    try:
        own_model = AutoModelForMultimodalLM.from_pretrained(
            model_dir, attn_implementation="eager", dtype=torch.float32
        )
        # In eval mode, since some classes ask for more than text while they train; nothing is dropped in either.
        expected_loss, expected = architectures.run_reference(own_model.eval(), sequences)
    except Exception as error:
        own_error = Result("not built", f"fails by itself: {describe(error)}")
    world = init_world()
    try:
        packed_model, loss, gradients = architectures.run_packed(
            model_dir, sequences, world, activation_checkpointing="none"
        )
        if own_error is not None:
            return own_error
        result = compare(loss, expected_loss, gradients, expected)
        if result.outcome == "exact":
            words = {f"w{i}": i for i in range(SIZE_OF["vocab_size"])}
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "w0")))
            source = ModelSource(str(model_dir), load_config(str(model_dir), TextFamily()))
            export(packed_model, source, TextFamily(), tokenizer, path / "export", world)
            if (fault := find_fault(model_dir, path / "export")) is not None:
                return Result("wrong", f"export: {fault}")
        return result
    except Exception as error:
        result = architectures.explain(error, model_dir)
        return own_error or result if result.outcome == "crashed" else result


def main() -> None:
    parser = architectures.make_parser(__doc__, seconds=180.0)
    args = parser.parse_args()
    known = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    model_types = architectures.choose_types(parser, args, known, AutoModelForMultimodalLM)
    title = (
        f"Multi-modal types of transformers on text, {describe_versions('transformers', 'torch')}, CPU, fp32: a packed"
        f" row of {', '.join(map(str, LENGTHS))} tokens, and an export"
    )
    architectures.judge_all(model_types, judge, args, title, "architectures_multimodal.txt")


if __name__ == "__main__":
    main()
