"""Writes a model as one GGUF file, which llama.cpp, Ollama and LM Studio run.

    python -m mini_trainer export-gguf --model-name-or-path runs/chats/hf_format/best --output chats.gguf --dtype q8_0

Llama, Mistral, Qwen 2, Qwen 3 (also with experts), SmolLM3 and Gemma 3 (text), with tokenizer, chat template and stop
tokens. Tensor by tensor, on the CPU. Needs the package gguf.
"""

from pathlib import Path

from mini_trainer.distributed.process import pause_collector, resume_collector
from mini_trainer.options.command_line import parse_options
from mini_trainer.options.tools import ExportGgufOptions

if __name__ == "__main__":
    options = parse_options(ExportGgufOptions)  # before the slow imports: --help and typos answer at once
    pause_collector()

from mini_trainer.data.stores.disk import check_output, write_text
from mini_trainer.data.stores.model_files import MODEL_FLAG, verify_weights
from mini_trainer.distributed.ending import ending_with_message
from mini_trainer.distributed.messages import say, say_note


def export_gguf(options: ExportGgufOptions) -> None:
    """Writes the file; ValueError or OSError for user errors."""
    try:
        from mini_trainer.use.exporters.gguf_file import write_gguf
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        raise ValueError(
            "GGUF files are written by the package gguf, which is not installed: pip install gguf"
        ) from None
    model_dir, output = Path(options.model_name_or_path), Path(options.output)
    if not model_dir.is_dir():
        raise ValueError(f"{MODEL_FLAG} {model_dir}: is not a directory; give a model's directory")
    if output.suffix != ".gguf":
        raise ValueError(f"--output {output}: must end in .gguf")
    check_output(output)
    modelfile = [output.with_name("Modelfile")] if options.modelfile else []
    for path in (output, *modelfile):
        if path.exists():
            raise ValueError(f"--output {output}: {path} already exists; choose another file or folder")
    if not options.skip_verification:
        verify_weights(str(model_dir), say_note)
    num_bytes, notes = write_gguf(model_dir, output, options.dtype)
    for note in notes:
        say(f"note: {note}")
    if modelfile:
        write_modelfile(model_dir, output)
    say(f"wrote {output}: {num_bytes / 1e9:.3g} GB, {options.dtype}{', and its Modelfile' * len(modelfile)}")


def write_modelfile(model_dir: Path, gguf: Path) -> None:
    """Writes a Modelfile beside a GGUF file: Ollama reads neither stop tokens nor sampling defaults from that."""
    from mini_trainer.data.stores.tokenizers import load_tokenizer
    from mini_trainer.model.config import list_stops, load_config, load_generation_config
    from mini_trainer.objectives.families.text import TextFamily

    tokenizer, config = load_tokenizer(str(model_dir)), load_config(str(model_dir), TextFamily())
    generation = load_generation_config(str(model_dir), config)
    stops = [f'stop "{token}"' for token in tokenizer.convert_ids_to_tokens(list_stops(generation, tokenizer))]
    sampling = [(name, getattr(generation, name, None)) for name in ("temperature", "top_k", "top_p")]
    given = [*stops, *(f"{name} {value}" for name, value in sampling if value is not None)]
    lines = [f"FROM ./{gguf.name}", *(f"PARAMETER {line}" for line in given)]
    write_text(gguf.with_name("Modelfile"), "\n".join(lines) + "\n")


if __name__ == "__main__":
    resume_collector()
    with ending_with_message(when_interrupted="interrupted; no output is left"):
        export_gguf(options)
