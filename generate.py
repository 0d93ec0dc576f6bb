"""Generates from a model: prompts from files, or a chat in the terminal.

    python generate.py --model runs/qwen/hf_format/samples_7473 --prompts questions.jsonl --output answers.jsonl
    python generate.py --model runs/qwen/hf_format/samples_7473
    torchrun --nproc-per-node=8 generate.py --model M --prompts questions.jsonl --output answers.jsonl

Greedy unless a temperature is given. Several processes share the prompts. A run that was killed resumes when the
same command is started again.
"""

from mini_trainer.distributed.process import pause_collector, resume_collector
from mini_trainer.options.command_line import parse_options
from mini_trainer.options.tools import GenerateOptions

if __name__ == "__main__":
    options = parse_options(GenerateOptions)  # before the heavy imports: --help and typos answer at once
    pause_collector()

from pathlib import Path

from mini_trainer.data.rows.prompts import read_prompts
from mini_trainer.data.stores.disk import check_output, make_parent
from mini_trainer.distributed.agreement import compare_ranks, describe_program
from mini_trainer.distributed.messages import say, say_note
from mini_trainer.distributed.world import World, call_with_world
from mini_trainer.options import flatten_options
from mini_trainer.options.problems.finding import require
from mini_trainer.use.inference import answers
from mini_trainer.use.inference.engine import Engine, open_engine
from mini_trainer.use.inference.loading import find_given_model
from mini_trainer.use.inference.terminal import chat


def generate(options: GenerateOptions, world: World) -> None:
    """Writes the answers, or chats; ValueError or OSError for user errors."""
    if world.world_size > 1 and options.engines.engine != "hf":
        raise ValueError(f"--engine {options.engines.engine}: runs in one process, and torchrun has started several")
    compare_ranks(world, lambda: describe_program(flatten_options(options), world, may_differ=("config", "output")))
    if not options.prompts:
        if options.browser:
            require("gradio", flag="--browser")
            from mini_trainer.use.inference.browser import serve_chat
        say_note(f"loading {options.model}")
        engine = open_model(options, world)
        return serve_chat(engine, title=options.model, port=options.port) if options.browser else chat(engine)
    output = Path(options.output)
    check_output(output)
    prompts = read_prompts(options.prompts, options.format)
    engine = open_model(options, world)
    made_by = answers.describe_making(engine.describe(), options.sampling)
    make_parent(output)
    file = answers.AnswerFile(output, prompts, made_by, num_samples=options.sampling.num_samples)
    lines = answers.answer_all(engine, file, world)
    if lines is not None:
        num_cut = sum(answers.is_cut(line) and not answers.is_cut_by_context(line) for line in lines)
        cut = f"; {num_cut:,} of them cut at --max-new-tokens {options.sampling.max_new_tokens}" if num_cut else ""
        num_refused = sum(map(answers.is_refused, lines))
        refused = f"; prompts refused: {num_refused:,}" if num_refused else ""
        say(f"wrote {len(lines) - num_refused:,} answers to {output}{cut}{refused}")


def open_model(options: GenerateOptions, world: World) -> Engine:
    found = None if options.engines.engine == "openai" else find_given_model(options)
    return open_engine(found, options.model, options.engines, options.sampling, device=world.device)


if __name__ == "__main__":
    resume_collector()
    call_with_world(lambda world: generate(options, world))
