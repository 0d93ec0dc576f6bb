"""Masks many kinds of chats with stock chat templates, and judges the masks without the masker's code.

    python benchmarks/chat_templates.py FOLDER ...          # *.jinja files, and templates within *.py files
    python benchmarks/chat_templates.py FOLDER --only Kimi  # templates whose path contains this

Each text is made of random words that occur nowhere else. With each template and each of three tokenizers (byte-level
BPE, unigram with word marks, byte-level BPE with merges across spaces), every chat is read and masked as by
process_data.py. The judge sees token ids and labels only:

wrong         a word of somebody else is trained; a word of the assistant is written and not trained; the answer is not
              written; the token ids are not those of `apply_chat_template`, or, where an answer would not begin
              with a token of its own, of the same text
refused       by reason; "template" where no row of any kind is accepted
stop          the row's last trained token is a special token
prompt        whether `apply_chat_template(..., add_generation_prompt=True)` of the messages before the last trained
              turn gives the row's token ids up to the first trained token of that turn; if not, why not
"""

import argparse
import ast
import copy
import itertools
import json
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import paths  # noqa: F401
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mini_trainer.data.chat.conversation import Chat, TokenizedChat
from mini_trainer.data.chat.masking import ChatMasker
from mini_trainer.data.columns.base import IGNORED
from mini_trainer.data.rows.formats import read_example

SPECIAL = re.compile(
    r"<SPECIAL_\d+>|\[\|[^\[\]|\s]{1,40}\|\]|<[|｜][^<>|｜\s]{1,40}[|｜]>"
    r"|\[/?[A-Z_]{3,25}\]|<\|[^<>|\s]{1,40}>|<[^<>|\s]{1,40}\|>"
)
KNOWN_SPECIAL = (
    "<start_of_turn>", "<end_of_turn>", "<BOS_TOKEN>", "[gMASK]", "<sop>", "<sep>", "<extra_id_0>", "<extra_id_1>",
    "<end_of_utterance>", "<seed:bos>", "<seed:eos>", "[e~[", "]~b]", "]~!b[", "<end_of_text>", "<s>", "</s>",
    "<end_of_sentence>", "<beginning_of_sentence>", "<assistant>", "</assistant>", "<user>", "</user>",
    "<unused0>", "<role>", "</role>", "<turn|>", "<|turn>",
)  # fmt: skip
NEVER_SPECIAL = re.compile(r"think|tool_call|\[(ANSWER|THINK|DONE)|image|video|audio")
STOPS = re.compile(
    r"<\|(im_end|eot_id|eot|end|return|call|endoftext|end_of_text|END_OF_TURN_TOKEN|eom_id|endofturn|eom|end_of_turn"
    r"|assistant_end|end_of_role|message_end|eos|eod|turn_end|role_end|im_sep_end|stop|hy_eos|END)\|>"
    r"|<end_of_turn>|</s>|<｜end▁of▁sentence｜>|\[e~\[|<end_of_utterance>|<seed:eos>|<turn\|>|\[EOT\]|<extra_id_1>|<end_of_text>"
    r"|<｜hy_Assistant_end｜>|</role>|</assistant>|\[\|endofturn\|\]|<end_of_sentence>|<SPECIAL_12>"
)
OBSERVERS = ("<|user|>", "<|observation|>")  # GLM's generation stops at the next turn's role
REASONING = re.compile(r"<\|?think|<\|?thought|<\|channel|\[THINK\]|<\|START_THINKING|<\|inner_prefix")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
NOBODY = -1  # says what tools are described with


@dataclass(frozen=True)
class Word:
    """A word that occurs once: who says it, and as what."""

    text: str
    message: int
    kind: str  # content, reasoning, name, argument, key


@dataclass
class Script:
    """A chat that is being written. `words`: all that is said in it, by whom."""

    draw: random.Random
    tokens: Sequence[str]  # the tokenizer's special tokens, of which the first ends a turn
    messages: list[dict[str, Any]] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    unmask: bool = False

    def word(self, kind: str = "content", message: int | None = None) -> str:
        text = "".join(self.draw.choices(LETTERS, k=9))
        self.words.append(Word(text, len(self.messages) if message is None else message, kind))
        return text

    def text(self, shape: str, kind: str = "content") -> str:
        """`shape` with a new word for each #, and a word of reasoning for each %."""
        return re.sub("[#%]", lambda sign: self.word("reasoning" if sign[0] == "%" else kind), shape)

    def add(self, role: str, shape: str | None = "# # #.", *, reasoning: str | None = None, **fields: Any) -> "Script":
        message = {"role": role}
        if shape is not None:
            message["content"] = self.text(shape)
        if reasoning is not None:
            message[reasoning] = self.text("# #, #.", "reasoning")
        self.messages.append(message | fields)
        return self

    def add_parts(self, role: str, *shapes: str) -> "Script":
        parts = [{"type": "text", "text": self.text(shape)} for shape in shapes]
        self.messages.append({"role": role, "content": parts})
        return self

    def declare(self, name: str) -> None:
        note, second = (self.word(message=NOBODY) for _ in range(2))
        terms = {"type": "string", "description": f"The {second}."}
        function = {
            "name": name,
            "description": f"Does {note}.",
            "parameters": {"type": "object", "properties": {"terms": terms}, "required": ["terms"]},
        }
        self.tools = [*(self.tools or []), {"type": "function", "function": function}]

    def call(
        self, *ids: str, arguments: str = "{'terms': '#', 'n': 7}", as_text: bool = False, declares: bool = True,
        shape: str | None = "", answers: bool = True, reasoning: str | None = None,
    ) -> "Script":  # fmt: skip
        """An assistant's message with a call for each id, and the results. F in an id is the function's name."""
        names = [self.word("name") for _ in ids]
        values = [ast.literal_eval(self.text(arguments, "argument")) for _ in ids]
        ids = [id.replace("F", name) for id, name in zip(ids, names, strict=True)]
        calls = [
            {
                "id": id,
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(value) if as_text else value},
            }
            for id, name, value in zip(ids, names, values, strict=True)
        ]
        for name in names if declares else []:
            self.declare(name)
        self.add("assistant", shape, reasoning=reasoning, tool_calls=calls)
        if shape is None:
            self.messages[-1]["content"] = None
        for id, name in zip(ids, names, strict=True) if answers else []:
            self.add("tool", '{"sum": "#"}', tool_call_id=id, name=name)
        return self

    def ask(self, shape: str = "What # #?") -> "Script":
        return self.add("user", shape)

    def reply(self, shape: str = "# # #.", **fields: Any) -> "Script":
        return self.add("assistant", shape, **fields)


def talk(script: Script, *, asked: str = "What # #?", answered: str = "# # #.", num: int = 1) -> Script:
    for _ in range(num):
        script.ask(asked).reply(answered)
    return script


IDS = itertools.count(100_000_000)


def new_id() -> str:
    """Nine letters and digits, which is what Mistral's templates accept."""
    return f"{next(IDS):x}".rjust(9, "c")[-9:]


THINK = "<think>\n% %.\n</think>\n\n# #."
KINDS: dict[str, Callable[[Script], Any]] = {
    "one turn": talk,
    "two turns": partial(talk, num=2),
    "six turns": partial(talk, num=6),
    "system": lambda s: talk(s.add("system")),
    "system, two turns": lambda s: talk(s.add("system"), num=2),
    "two systems": lambda s: talk(s.add("system").add("system")),
    "system within": lambda s: talk(talk(s).add("system")),
    "user last": lambda s: talk(s).ask(),
    "assistant first": lambda s: talk(s.reply()),
    "two users": lambda s: talk(s.ask()),
    "two users later": lambda s: talk(talk(s).ask()),
    "two assistants": lambda s: talk(s).reply(),
    "three assistants": lambda s: talk(s).reply().reply(),
    "reasoning": lambda s: s.ask().reply(reasoning="reasoning_content"),
    "reasoning twice": lambda s: s.ask().reply(reasoning="reasoning_content").ask().reply(
        reasoning="reasoning_content"
    ),
    "reasoning at last": lambda s: talk(s).ask().reply(reasoning="reasoning_content"),
    "reasoning at first": lambda s: talk(s.ask().reply(reasoning="reasoning_content")),
    "thinking": lambda s: s.ask().reply(reasoning="thinking"),
    "<think>": lambda s: s.ask().reply(THINK),
    "</think> alone": lambda s: s.ask().reply(THINK.removeprefix("<think>\n")),
    "<think> twice": lambda s: s.ask().reply(THINK).ask().reply(THINK),
    "one part": lambda s: s.add_parts("user", "What # #?").reply(),
    "parts of all": lambda s: s.add_parts("system", "# #.").add_parts("user", "What # #?").add_parts(
        "assistant", "# #."
    ),
    "two parts": lambda s: s.add_parts("user", "What # #?", " And # #?").reply(),
    "two parts of the assistant": lambda s: s.ask().add_parts("assistant", "# #.", " # #."),
    "letters and signs": partial(
        talk, asked="¿#é \U0001f469\u200d\U0001f467 #你好?", answered="\U0001f44d #é, ñ# 你好."
    ),
    "right to left": partial(talk, asked="שלום # مرحبا #?", answered="# مرحبا # שלום"),
    "decomposed letters": partial(talk, asked="e\u0301# n\u0303#?", answered="# u\u0308# ﬁ."),
    "whitespace around": partial(talk, asked="  # #? \n", answered=" \n # #. \n\n", num=2),
    "line breaks around": partial(talk, asked="\n# #?\n", answered="\n\n# #.\n", num=2),
    "whitespace within": partial(talk, asked="#\t\t #  #\n\n\n#", answered="#   #\n\t#\n \n#"),
    "CRLF": partial(talk, asked="#\r\n#\r\n", answered="#\r\n#\r\n#"),
    "long": partial(talk, asked="# " * 150 + "?", answered="# " * 300 + "."),
    "code": partial(talk, answered="```python\ndef #(#):\n    return '#' # \n```"),
    "JSON": partial(talk, asked='{"#": ["#", 1]}', answered='{"#": ["#", null, "\\n"]}'),
    "Jinja": partial(talk, asked="{{ # }} {{- # -}}", answered="{{ # }} {{- # -}}"),
    "tags": partial(talk, asked="<b>#</b> <user> #", answered="<b>#</b> </assistant> # <tool>"),
    "stop token by the user": lambda s: talk(s, asked=f"# {s.tokens[0]} # {s.tokens[0]}", num=2),
    "stop token by the assistant": lambda s: talk(s, answered=f"# {s.tokens[0]} # #", num=2),
    "special tokens by the user": lambda s: talk(s, asked="# " + " # ".join(s.tokens) + " #"),
    "special tokens by the assistant": lambda s: talk(s, answered="# " + " # ".join(s.tokens) + " #"),
    "not trained at first": lambda s: talk(s.ask().reply(train=False)),
    "not trained at last": lambda s: talk(s).ask().reply(train=False),
    "user trained": lambda s: s.add("user", train=True).reply(),
    "all trained": lambda s: talk(setattr(s, "unmask", True) or s.add("system"), num=2),
    "weights": lambda s: talk(s.ask().reply(weight=0.5).ask().reply(weight=0)),
    "call": lambda s: s.ask().call(new_id()).reply(),
    "call, arguments as text": lambda s: s.ask().call(new_id(), as_text=True).reply(),
    "call, null content": lambda s: s.ask().call(new_id(), shape=None).reply(),
    "call, content too": lambda s: s.ask().call(new_id(), shape="# #.").reply(),
    "call, reasoning too": lambda s: s.ask().call(new_id(), reasoning="reasoning_content").reply(
        reasoning="reasoning_content"
    ),
    "call at last": lambda s: s.ask().call(new_id(), answers=False),
    "two calls at once": lambda s: s.ask().call(new_id(), new_id()).reply(),
    "calls in two rounds": lambda s: talk(s.ask().call(new_id()).call(new_id()).reply()),
    "call, OpenAI's id": lambda s: s.ask().call(f"call_{new_id()}{new_id()}x").reply(),
    "call, Kimi's id": lambda s: s.ask().call("functions.F:0").reply(),
    "two calls, Kimi's ids": lambda s: s.ask().call("functions.F:0", "functions.F:1").reply(),
    "call, no tools described": lambda s: s.ask().call(new_id(), declares=False).reply(),
    "call, nested arguments": lambda s: s.ask().call(
        new_id(), arguments="{'terms': {'of': ['#', '#', True], 'no': None}, 'n': 2.5}"
    ).reply(),
    "call, system too": lambda s: s.add("system").ask().call(new_id()).reply(),
}  # fmt: skip


# Templates and tokenizers


def find_templates(places: Sequence[str]) -> dict[str, str]:
    """The templates of files and folders, each text once, by path; of *.py files the constants that are templates."""
    found: dict[str, str] = {}
    for root in map(Path, places):
        files = sorted(root.rglob("*")) if root.is_dir() else [root]
        for file in files:
            name = str(file.relative_to(root.parent))
            if file.suffix == ".jinja":
                found[name] = file.read_text(encoding="utf-8")
            elif file.suffix == ".py":
                found |= {f"{name}:{line}": text for line, text in find_constants(file)}
    known: dict[str, str] = {}
    for name, text in found.items():
        if "messages" in text:
            known.setdefault(text, name)
    return {name: text for text, name in known.items()}


def find_constants(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and "add_generation_prompt" in text and "{%" in text:
            yield node.lineno, text


def train_tokenizers() -> dict[str, str]:
    """Three styles, as JSON, each trained on the words that templates and chats here have."""
    draw = random.Random(0)
    texts = [
        "What is it? user assistant system <think> </think> tool_call function name arguments \n\n "
        + " ".join("".join(draw.choices(LETTERS, k=draw.randint(1, 9))) for _ in range(40))
        for _ in range(400)
    ]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained = {}
    for style, splits in (("bytes", True), ("across spaces", False)):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.train_from_iterator(
            texts, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
        )
        trained[style] = tokenizer.to_str()
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    learner.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=900, show_progress=False))
    scores = [("<unk>", 0.0), *((byte, -20.0) for byte in bytes_)]
    scores += [(piece, -2.0 - 1.0 / len(piece)) for piece in learner.get_vocab() if piece not in bytes_]
    marked = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    marked.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    marked.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return trained | {"word marks": marked.to_str()}


def list_special(template: str) -> list[str]:
    """The template's special tokens, by their looks; first the one that ends turns."""
    found = [*SPECIAL.findall(template), *(token for token in KNOWN_SPECIAL if token in template)]
    special = [token for token in dict.fromkeys(found) if not NEVER_SPECIAL.search(token)]
    if re.search(r"'<\|' ?\+", template):  # roles written as tokens
        special += [f"<|{role}|>" for role in ("user", "assistant", "system", "end", "tool", "observation")]
    special = list(dict.fromkeys(special))
    stops = [token for token in special if STOPS.fullmatch(token)]
    if "eos_token" in template or not stops:
        stops = [*stops, "</s>"]
    return [*dict.fromkeys([*stops, *special])]


def make_masker(template: str, style: str) -> ChatMasker:
    special = list_special(template)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(style),
        eos_token="</s>" if "</s>" in special else special[0],
        bos_token="<s>",
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.chat_template = template
    stops = [token for token in special if STOPS.fullmatch(token)]
    if "[gMASK]" in template:
        stops += [token for token in OBSERVERS if token in special]
    ids = tokenizer.convert_tokens_to_ids(stops)
    masker = ChatMasker(tokenizer, stop_token_ids=ids)
    try:
        masker.check_template()
    except ValueError as error:
        if "no end-of-turn token" not in str(error):
            raise
        masker = ChatMasker(tokenizer, stop_token_ids=ids, missing_stop_token="allow")
        masker.check_template()
    return masker


# The judge


@dataclass(frozen=True)
class Verdict:
    """What is to say of one row. `refused` or else `wrong` (empty: nothing is), `prompt`, `has_stop`, `remarks`."""

    refused: str | None = None
    wrong: tuple[str, ...] = ()
    prompt: str = ""
    has_stop: bool = False
    remarks: tuple[str, ...] = ()


def judge(script: Script, masked: TokenizedChat, tokenizer: Any) -> Verdict:
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False, skip_special_tokens=False)
    ids, labels = masked.input_ids, masked.labels
    runs = list_runs(labels)
    trained = "\x00".join(decode(ids[start:end]) for start, end in runs)
    whole = decode(ids)
    wrong, remarks = [], []
    form, is_divided = find_form(script, ids, tokenizer)
    if form is None:
        wrong.append("other token ids")
    elif form or is_divided:
        remarks.append("an answer's beginning is encoded apart" if is_divided else f"contents are given {form}")
    for word in script.words:
        is_own = word.message != NOBODY and is_trained(script, word.message)
        last = word.message == len(script.messages) - 1
        if not is_own and word.text in trained:
            wrong.append(f"{word.kind} of {name_role(script, word)} is trained")
        elif is_own and word.text not in whole:
            if word.kind == "content" and is_partly_written(script, word, whole):
                remarks.append("a part of the answer is left out by the template")
            elif word.kind == "content" and (last or script.messages[word.message]["role"] != "assistant"):
                wrong.append("the answer is not written")
            elif word.kind in ("argument", "name"):
                wrong.append(f"{word.kind} of a call is not written")
            else:
                remarks.append(f"{word.kind} is left out by the template")
        elif is_own and word.text not in trained:
            wrong.append(f"{word.kind} of {name_role(script, word)} is not trained")
    last_trained = tokenizer.added_tokens_decoder.get(ids[runs[-1][1] - 1]) if runs else None
    has_stop = last_trained is not None and last_trained.special
    prompt = compare_prompt(script, masked, runs, form, tokenizer)
    return Verdict(None, tuple(dict.fromkeys(wrong)), prompt, has_stop, tuple(dict.fromkeys(remarks)))


def is_partly_written(script: Script, word: Word, whole: str) -> bool:
    """Whether something else of the same content is there; templates cut contents at tokens that they use."""
    return any(
        other.text in whole for other in script.words if (other.message, other.kind) == (word.message, word.kind)
    )


def name_role(script: Script, word: Word) -> str:
    return "tools" if word.message == NOBODY else script.messages[word.message]["role"]


def is_trained(script: Script, message: int) -> bool:
    """Whether a message trains, as documented: by its `train` or `weight`, else by its role."""
    said = script.messages[message]
    if "train" in said:
        return said["train"]
    by_role = said["role"] == "assistant" or (script.unmask and said["role"] != "system")
    return bool(said.get("weight", by_role))


def list_runs(labels: Sequence[int]) -> list[tuple[int, int]]:
    flags = [False, *(label != IGNORED for label in labels), False]
    edges = [i for i, (a, b) in enumerate(itertools.pairwise(flags)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


# The same messages, with contents or arguments in another form.
FORMS = ("", "as_parts", "as_text", "as_json", "as_reasoning", "is_empty")


def as_given(messages: Sequence[dict[str, Any]], form: str) -> list[dict]:
    """What a user would hand to `apply_chat_template`; reasoning by all of its names."""
    given = []
    for message in copy.deepcopy(list(messages)):
        message = {key: value for key, value in message.items() if key not in ("train", "weight") and value is not None}
        thought, content = message.get("reasoning_content") or message.get("thinking"), message.get("content")
        is_text = isinstance(content, str)
        if form == "as_reasoning" and is_text and (tag := re.search(r"</think>|<channel\|>", content)):
            thought, _, content = content.removeprefix("<think>").partition(tag[0])
            message["content"], thought = content.lstrip("\n"), thought.strip("\n")
        if form == "is_empty" and message.get("tool_calls"):
            message.setdefault("content", "")
        if thought:
            message |= dict.fromkeys(("reasoning_content", "thinking", "reasoning"), thought)
        if form == "as_parts" and is_text and content:
            message["content"] = [{"type": "text", "text": content}]
        if form == "as_text" and isinstance(content, list):
            message["content"] = "".join(part["text"] for part in content)
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if form == "as_json":
                arguments = json.dumps(arguments, ensure_ascii=False)
            call["function"]["arguments"] = arguments
        given.append(message)
    return given


def apply(tokenizer: Any, script: Script, messages: Sequence[dict], form: str, **how: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(as_given(messages, form), tools=script.tools, **how)
    except Exception:  # other people's programs fail in any way
        return None


def find_form(script: Script, ids: list[int], tokenizer: Any) -> tuple[str | None, bool]:
    """The form of the messages that gives these token ids, or others of the same text; and whether they are others."""
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False, skip_special_tokens=False)
    rendered = [(form, apply(tokenizer, script, script.messages, form, return_dict=True)) for form in FORMS]
    rendered = [(form, given["input_ids"]) for form, given in rendered if given is not None]
    exact = next((form for form, given in rendered if given == ids), None)
    same = next((form for form, given in rendered if decode(given) == decode(ids)), None)
    return (same, True) if exact is None else (exact, False)


def compare_prompt(
    script: Script, masked: TokenizedChat, runs: list[tuple[int, int]], form: str | None, tokenizer: Any
) -> str:
    turns = [i for i, said in enumerate(script.messages) if said["role"] == "assistant" and is_trained(script, i)]
    if not turns or not runs:
        return "nothing of the assistant is trained"
    before = script.messages[: turns[-1]]
    if form is None:
        return "other token ids"
    prompt = apply(tokenizer, script, before, form, add_generation_prompt=True, return_dict=True)
    if prompt is None:
        return "the template refuses the prompt"
    prompt, ids, n = prompt["input_ids"], masked.input_ids, len(prompt["input_ids"])
    if ids[:n] == prompt and n < len(ids) and masked.labels[n] != IGNORED:
        is_next = n == runs[-1][0] or (n > runs[-1][0] and script.messages[turns[-1] - 1]["role"] == "assistant")
        return "exact" if is_next else "the last turn is trained from before the prompt's end"
    kwargs = {"tokenize": False}
    asked = apply(tokenizer, script, before, form, add_generation_prompt=True, **kwargs)
    plain = apply(tokenizer, script, before, form, **kwargs) or ""
    text = apply(tokenizer, script, script.messages, form, **kwargs)
    common = next((i for i, (a, b) in enumerate(zip(asked, text, strict=False)) if a != b), min(len(asked), len(text)))
    if common == len(asked):
        return "text equal, a token stands across the border"
    if REASONING.search(asked[max(0, common - 12) :]) and common >= min(len(plain), len(asked)) - 12:
        return "the prompt opens reasoning, the row has other"
    if common >= len(plain.rstrip()):
        return "the prompt ends otherwise than the row goes on"
    return "the template writes earlier turns otherwise where an answer follows"


# The table


def reason_of(error: Exception, words: Sequence[Word] = ()) -> str:
    """A refusal's reason without what is the row's own."""
    text = " ".join(str(error).split()).removeprefix("the model's chat template cannot be used: ")
    text = re.sub(r"; tried with \[.*", "", text)
    text = re.sub(r"message \d+", "message N", text)
    text = re.sub(r"\B'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", "'...'", text)
    for word in words:
        text = text.replace(word.text, "WORD")
    return text[:150]


def try_kind(kind: str, masker: ChatMasker, seed: str) -> Verdict:
    tokens = [token.content for token in masker.tokenizer.added_tokens_decoder.values() if token.special]
    script = Script(random.Random(seed), sorted(tokens, key=lambda token: (not STOPS.fullmatch(token), token))[:4])
    KINDS[kind](script)
    row = {"messages": script.messages, "tools": script.tools, "unmask": script.unmask}
    example = read_example({key: value for key, value in row.items() if value}, "messages", is_given=False)
    assert isinstance(example, Chat)
    (masked,) = masker.mask([example])
    if isinstance(masked, ValueError):
        return Verdict(refused=reason_of(masked, script.words))
    return judge(script, masked, masker.tokenizer)


@dataclass
class Table:
    by_kind: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    by_style: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    refused: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # reason -> templates
    prompts: Counter[str] = field(default_factory=Counter)
    remarks: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    templates_refused: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, style: str, kind: str, verdict: Verdict) -> None:
        if verdict.refused is not None:
            counted = ["refused"]
            self.refused[verdict.refused][f"{name} | {kind}"] += 1
        else:
            counted = ["kept", *(["wrong"] * bool(verdict.wrong)), *(["stop"] * verdict.has_stop)]
            counted += ["prompt exact"] * (verdict.prompt == "exact")
            self.prompts[verdict.prompt] += 1
            self.remarks.update(verdict.remarks)
            self.wrong += [f"{name} | {style} | {kind} | {what}" for what in verdict.wrong]
        for column in (self.by_kind[kind], self.by_style[style]):
            column.update(counted)


COLUMNS = ("kept", "refused", "wrong", "stop", "prompt exact")


def show(table: Table) -> None:
    for title, counts in (("tokenizer", table.by_style), ("kind", table.by_kind)):
        print(f"\n| {title} | " + " | ".join(COLUMNS) + " |\n|" + "---|" * (len(COLUMNS) + 1))
        for key, counter in counts.items():
            print(f"| {key} | " + " | ".join(f"{counter[column]:,}" for column in COLUMNS) + " |")
    for title, counter in (("prompts of kept rows", table.prompts), ("remarks", table.remarks)):
        print(f"\n{title}")
        for key, count in counter.most_common():
            print(f"{count:8,}  {key}")
    print("\nreasons of refusals: rows, templates")
    for reason, rows in sorted(table.refused.items(), key=lambda item: -item[1].total()):
        print(f"{rows.total():8,} {len({row.split(' | ')[0] for row in rows}):4}  {reason}")
    print(f"\ntemplates refused whole: {len(table.templates_refused)}")
    for name, reason in table.templates_refused.items():
        print(f"    {name}: {reason}")
    print(f"\nwrong: {len(table.wrong)}")
    print("\n".join(table.wrong[:200]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", help="files and folders with templates")
    parser.add_argument("--only", default="", help="templates whose path contains this")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS), help="kinds of chats to try")
    parser.add_argument("--styles", nargs="*", help="tokenizers to try (default: all three)")
    args = parser.parse_args()
    templates = {name: text for name, text in find_templates(args.paths).items() if args.only in name}
    styles = {name: text for name, text in train_tokenizers().items() if args.styles is None or name in args.styles}
    table, started = Table(), time.process_time()
    for name, template in templates.items():
        for style, trained in styles.items():
            try:
                masker = make_masker(template, trained)
            except ValueError as error:
                table.templates_refused[name] = reason_of(error)
                for kind in args.kinds:
                    table.add(name, style, kind, Verdict(refused=f"template: {reason_of(error)}"))
                continue
            for kind in args.kinds:
                table.add(name, style, kind, try_kind(kind, masker, f"{name} {style} {kind}"))
    num_rows = sum(counter["kept"] + counter["refused"] for counter in table.by_style.values())
    print(f"{len(templates)} templates x {len(styles)} tokenizers x {len(args.kinds)} kinds: {num_rows:,} rows")
    print(f"{sum(counter['kept'] for counter in table.by_style.values()):,} kept, {len(table.wrong)} wrong;", end=" ")
    print(f"{time.process_time() - started:.0f} CPU seconds")
    show(table)


if __name__ == "__main__":
    main()
