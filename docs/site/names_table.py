"""The table of names in docs/tasks/coming_from.md, from options/foreign_names.py.

python docs/site/names_table.py   # writes it into the page
"""

from pathlib import Path

from mini_trainer.options.foreign_names import TABLE

PAGE = Path(__file__).resolve().parents[1] / "tasks/coming_from.md"
HEAD = "| TRL, Axolotl, LLaMA-Factory | here |\n| --- | --- |\n"
MOST_NAMES = 3  # of one meaning
# Our options that the page lists with their names there; all other names are answered where they are typed.
SHOWN = (
    *("model_name_or_path", "input_dataset", "chat_template", "max_sample_num_tokens", "max_epochs"),
    *("num_warmup_steps", "lr_scheduler", "min_lr_ratio", "optimizer"),
    *("label_smoothing", "loss_weighting", "objective", "preference_loss"),
    *("preference_beta", "preference_gamma", "preference_nll_weight", "kto_weight_ratio"),
    *("reference_model", "reward_centering", "lora", "lora_rank", "lora_target_modules", "lora_modules_to_save"),
    *("base_quantization", "activation_checkpointing", "kernels", "compile", "context_parallel"),
    *("validation_share", "validate_every_steps", "checkpoint_every_steps", "track"),
    "push_to_hub",
)


def describe_option(option: str) -> str:
    """The names of an option there, and the option."""
    rows = [row for row in TABLE if option in row.options.split()]
    names = [name for row in rows for name in row.list_names() if name != option and "*" not in name]
    return f"| {', '.join(f'`{name}`' for name in names[:MOST_NAMES])} | `{option}` |\n"


def replace_table(text: str) -> str:
    before, _, rest = text.partition(HEAD)
    _, _, after = rest.partition("\n\n")
    return f"{before}{HEAD}{''.join(map(describe_option, SHOWN))}\n{after}"


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
