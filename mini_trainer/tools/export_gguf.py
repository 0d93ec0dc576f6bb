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

from mini_trainer.data.stores.disk import check_output
from mini_trainer.data.stores.model_files import MODEL_FLAG, verify_weights
from mini_trainer.distributed.ending import ending_with_message
from mini_trainer.distributed.messages import say
from mini_trainer.options.problems.finding import require
from mini_trainer.use.inference.loading import find_in_run


def export_gguf(options: ExportGgufOptions) -> None:
    """Writes the file; ValueError or OSError for user errors."""
    require("gguf", flag="export-gguf")
    from mini_trainer.use.exporters.gguf_file import write_gguf

    model_dir, output = Path(find_in_run(options.model_name_or_path, flag=MODEL_FLAG)), Path(options.output)
    if not model_dir.is_dir():
        raise ValueError(f"{MODEL_FLAG} {model_dir}: is not a directory; give a model's directory")
    if output.suffix != ".gguf":
        raise ValueError(f"--output {output}: must end in .gguf")
    check_output(output)
    modelfile = output.with_name("Modelfile") if options.modelfile else None
    for path in filter(None, (output, modelfile)):
        if path.exists():
            raise ValueError(f"--output {output}: {path} already exists; choose another file or folder")
    if not options.skip_verification:
        verify_weights(str(model_dir))
    num_bytes, notes = write_gguf(model_dir, output, options.dtype, modelfile=modelfile)
    for note in notes:
        say(f"note: {note}")
    say(f"wrote {output}: {num_bytes / 1e9:.3g} GB, {options.dtype}{', and its Modelfile' if modelfile else ''}")


if __name__ == "__main__":
    resume_collector()
    with ending_with_message(when_interrupted="interrupted; no output is left"):
        export_gguf(options)
