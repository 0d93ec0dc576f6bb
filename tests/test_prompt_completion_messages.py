"""Lists of messages under prompt and completion, TRL's form: only the completion's messages are trained.

The oracle is TRL's rule, computed with transformers: the completion is what follows the ids of the prompt, which is
rendered with the generation prompt.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
from stock_templates import TEMPLATES, make_tokenizer
from tiny_data import write_jsonl

from mini_trainer.data.chat.conversation import Chat, Completion
from mini_trainer.data.chat.masking import ChatMasker
from mini_trainer.data.columns.base import IGNORED
from mini_trainer.data.rows.column_names import RefusedColumn
from mini_trainer.data.rows.formats import OWN_NAMES, FieldPaths, read_example, read_fields
from mini_trainer.data.rows.prompts import read_prompts

PROMPT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": "Five of them."},
    {"role": "user", "content": "And now?"},
]
COMPLETION = [{"role": "assistant", "content": "Six of us."}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def read(row: dict, paths: FieldPaths = OWN_NAMES) -> Chat | Completion:
    return read_example(read_fields(row, "completion", paths=paths, tally=Counter()), "completion", is_given=False)


@pytest.mark.parametrize("name", [name for name in ("olmo2", "phi4", "trl:qwen2_5", "zephyr") if name in TEMPLATES])
def test_what_trl_trains(name):
    template, stops = TEMPLATES[name]
    tokenizer = make_tokenizer(template, stops)
    masker = ChatMasker(tokenizer, stop_token_ids=tokenizer.convert_tokens_to_ids(list(stops)))
    (masked,) = masker.mask([read({"prompt": PROMPT, "completion": COMPLETION})])
    prompt, whole = (
        tokenizer.apply_chat_template(messages, add_generation_prompt=prompts, return_dict=True)["input_ids"]
        for messages, prompts in ((PROMPT, True), (PROMPT + COMPLETION, False))
    )
    assert masked.input_ids == whole and whole[: len(prompt)] == prompt
    trained = [label for label in masked.labels if label != IGNORED]
    assert masked.labels[: len(prompt)] == [IGNORED] * len(prompt)
    rest = whole[len(prompt) :]
    assert rest[: len(trained)] == trained and tokenizer.decode(rest[len(trained) :]).strip() == ""


def test_forms_that_mean_the_same():
    expected = read({"prompt": PROMPT, "completion": COMPLETION})
    assert [message.get("train") for message in expected.messages] == [False] * 4 + [None]
    as_text = {"prompt": json.dumps(PROMPT), "completion": json.dumps(COMPLETION)}
    assert read(as_text) == read({"prompt": PROMPT, "generation": COMPLETION}) == expected
    named = read({"a": {"b": PROMPT}, "c": COMPLETION}, FieldPaths(prompt="a.b", completion="c"))
    assert named == expected
    with_tools = read({"prompt": PROMPT, "completion": COMPLETION, "tools": json.dumps(TOOLS)})
    assert (with_tools.messages, with_tools.tools) == (expected.messages, TOOLS)
    beside = {"system": "Be brief.", "unmask": True, "chat_template_kwargs": {"enable_thinking": False}}
    chat = read({"prompt": PROMPT[1:], "completion": COMPLETION} | beside)
    assert (chat.messages, chat.unmask, chat.template_args) == (expected.messages, True, {"enable_thinking": False})
    assert read({"prompt": "How many? ", "completion": "Five"}) == Completion("How many? ", "Five")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": PROMPT, "completion": "Six"}, "'prompt' is .* expected text"),
        ({"prompt": "How many?", "completion": COMPLETION}, "'completion' is .* expected text"),
        ({"prompt": [], "completion": COMPLETION}, "'prompt' must be a list of at least one message"),
        ({"prompt": PROMPT, "completion": []}, "'completion' must be a list of at least one message"),
        ({"prompt": PROMPT[:3], "completion": COMPLETION}, "the prompt ends with an assistant's message"),
        ({"prompt": PROMPT, "completion": [{"role": "cat"}]}, "message 5 has the role 'cat'"),
        ({"prompt": [PROMPT[1] | {"train": True}], "completion": COMPLETION}, "has 'train': true in a message of the"),
    ],
)
def test_what_is_refused(row, reason):
    with pytest.raises(ValueError, match=reason):
        read(row)


def test_columns_and_keys_that_change_the_training_signal():
    row = {"prompt": PROMPT, "completion": [COMPLETION[0] | {"score": 0.5}]}
    with pytest.raises(RefusedColumn, match=r"completion\.score"):
        read(row)
    assert read(row, FieldPaths(ignored=("completion.score",))) == read({"prompt": PROMPT, "completion": COMPLETION})
    with pytest.raises(RefusedColumn, match="mask"):
        read({"prompt": PROMPT, "completion": COMPLETION, "assistant_masks": [1]})
    with pytest.raises(RefusedColumn, match="tools"):
        read({"prompt": "How many?", "completion": "Five", "tools": TOOLS})


def test_prompts_and_references_are_those_of_the_row(tmp_path: Path):
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": PROMPT, "completion": COMPLETION}])
    (prompt,) = read_prompts([str(path)], None)
    assert (prompt.messages, prompt.references) == (PROMPT, ("Six of us.",))
