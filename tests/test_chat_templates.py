"""Stock chat templates of model families: what is trained of each kind of conversation, written by hand.

Templates named `trl:` are read from the package trl, which ships them as files (tests skip them without it); the
others lie in tests/rows/chat_templates. Each family gets a small tokenizer of its style with its special tokens.
"""

import re
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from breadth import thin
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from make_tiny_model import CHATML_TEMPLATE
from mask_oracle import list_trained_texts
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mini_trainer.data.chat.conversation import Chat
from mini_trainer.data.chat.masking import ChatMasker
from mini_trainer.data.chat.normalizing import separate_reasoning
from mini_trainer.data.chat.tokens import split_by_training

HERE = Path(__file__).parent / "rows" / "chat_templates"
TRL = find_spec("trl")


def user(content: str = "How many?") -> dict:
    return {"role": "user", "content": content}


def assistant(content: str = "Five.", **fields) -> dict:
    return {"role": "assistant", "content": content, **fields}


def calling(arguments: dict | str) -> dict:
    call = {"id": "abc123def", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return assistant("", tool_calls=[call])


SYSTEM = {"role": "system", "content": "Be brief."}
RESULT = {"role": "tool", "content": '{"sum": 5}', "tool_call_id": "abc123def", "name": "add"}
PARAMETERS = {"type": "object", "properties": {"terms": {"type": "string", "description": "Which."}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
TURNS = [user(), assistant(), user("And now?"), assistant("Six.")]
COUNT, MORE = "<think>\nCount.\n</think>\n\nFive.", "<think>\nMore.\n</think>\n\nSix."
CASES = {
    "one turn": [user(), assistant()],
    "several": TURNS,
    "system": [SYSTEM, *TURNS],
    "spaces": [user(" a "), assistant(" \n Five. \n")],
    "reasoning": [
        user(), assistant(reasoning_content="Count."), user(), assistant("Six.", reasoning_content="More.")
    ],
    "<think>": [user(), assistant(COUNT), user(), assistant(MORE)],
    "tools": [user(), calling({"terms": "2, 3", "n": 2}), RESULT, assistant(), *TURNS[2:]],
    "consecutive": [user(), assistant(), assistant("Six.")],
    "user last": [user(), assistant(), user("And now?")],
}  # fmt: skip


@dataclass(frozen=True)
class Refused:
    """The reason that a row's refusal has to give."""

    reason: str


NOT_KNOWN = {  # what templates do with what they do not know
    "tools": Refused("row's tools"),
    "alternate": Refused("roles must alternate"),
    "no stop": Refused("end-of-turn"),
}


@dataclass(frozen=True)
class Family:
    """A template with its tokenizer's style and special tokens, and the text of each trained run in each case."""

    template: str  # trl:NAME, or the name of a file in tests/rows/chat_templates
    eos: str
    trained: dict[str, list[str] | Refused]
    special: tuple[str, ...] = ()
    bos: str | None = None
    stops: tuple[str, ...] = ()  # generation_config.json's eos_token_id
    metaspace: bool = False
    before: str = ""  # of the template: variables that are set


def plain(
    stop: str, *, before: str = "", after: str = "", trims: bool = False, last: tuple[str, str] | None = None,
    call: str | None = None, thoughts: list[str] | None = None, **others,
) -> dict:  # fmt: skip
    """What is trained where the template writes contents as they are, or trimmed, and nothing else. `last`: the text
    before and after a conversation's last turn if that differs; `call`: the trained call if tools are written;
    `thoughts`: what is trained of reasoning, whether it has a key or tags, if it is written."""
    around = before, after + stop

    def turns(*contents: str, is_last: bool = True) -> list[str]:
        ends = [around] * (len(contents) - 1) + [last if last is not None and is_last else around]
        return [begin + content + end for content, (begin, end) in zip(contents, ends, strict=True)]

    return {
        "one turn": turns("Five."),
        "several": turns("Five.", "Six."),
        "system": turns("Five.", "Six."),
        "spaces": turns("Five." if trims else " \n Five. \n"),
        "reasoning": turns("Five.", "Six.") if thoughts is None else thoughts,
        "<think>": turns(COUNT, MORE) if thoughts is None else thoughts,
        "tools": NOT_KNOWN["tools"] if call is None else [call, *turns("Five.", "Six.")],
        "consecutive": turns("Five.", "Six."),
        "user last": turns("Five.", is_last=False),
    } | {key.replace("_", " "): value for key, value in others.items()}


NO = NOT_KNOWN["alternate"]
ONLY_CHATS = {"tools": NO, "consecutive": NO}
IM_END, EOT, END = "<|im_end|>", "<|eot_id|>", "<|end|>"
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"terms": "2, 3", "n": 2}}\n</tool_call><|im_end|>'
XML_CALL = (
    "<tool_call>\n<function=add>\n<parameter=terms>\n2, 3\n</parameter>\n<parameter=n>\n2\n</parameter>\n</function>\n"
    "</tool_call>"
)
LLAMA_CALL = '{"name": "add", "parameters": {"terms": "2, 3", "n": 2}}<|eot_id|>'
MISTRAL_CALL = '[{"name": "add", "arguments": {"terms": "2, 3", "n": 2}, "id": "abc123def"}]</s>'
GLM_CALL = (
    "\n<think></think>\n<tool_call>add\n<arg_key>terms</arg_key>\n<arg_value>2, 3</arg_value>\n<arg_key>n</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call><|observation|>"
)
OSS_CALL = ' to=functions.add<|channel|>commentary json<|message|>{"terms": "2, 3", "n": 2}<|call|>'
FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"

CHATML = {"eos": IM_END, "special": ("<|im_start|>", "<|endoftext|>")}
LLAMA3 = {"eos": EOT, "bos": "<|begin_of_text|>",
          "special": ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>")}  # fmt: skip
LLAMA2 = {"eos": "</s>", "bos": "<s>", "metaspace": True}
MISTRAL = {"eos": "</s>", "bos": "<s>",
           "special": ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
                       "[/TOOL_RESULTS]")}  # fmt: skip
GEMMA = {"eos": "<eos>", "bos": "<bos>", "special": ("<start_of_turn>", "<end_of_turn>"),
         "stops": ("<eos>", "<end_of_turn>"), "metaspace": True}  # fmt: skip
PHI3 = {"eos": "<|endoftext|>", "special": (END, "<|user|>", "<|assistant|>", "<|system|>"),
        "stops": ("<|endoftext|>", "<|assistant|>", END)}  # fmt: skip
DEEPSEEK_END = "<｜end▁of▁sentence｜>"
DEEPSEEK = {"eos": DEEPSEEK_END, "bos": "<｜begin▁of▁sentence｜>", "special": ("<｜User｜>", "<｜Assistant｜>")}
GLM = {"eos": "<|endoftext|>", "stops": ("<|endoftext|>", "<|user|>", "<|observation|>"),
       "special": ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")}  # fmt: skip
COHERE_END = "<|END_OF_TURN_TOKEN|>"
COHERE = {"eos": COHERE_END, "bos": "<BOS_TOKEN>",
          "special": ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>",
                      "<|START_RESPONSE|>", "<|END_RESPONSE|>")}  # fmt: skip
OSS = {"eos": "<|return|>", "stops": ("<|return|>", "<|endoftext|>", "<|call|>"),
       "special": ("<|start|>", END, "<|message|>", "<|channel|>", "<|call|>", "<|endoftext|>")}  # fmt: skip

QWEN3_EMPTY = "<think>\n\n</think>\n\n"
QWEN3 = plain(
    IM_END, last=(QWEN3_EMPTY, IM_END), call=QWEN_CALL, thoughts=[f"Five.{IM_END}", MORE + IM_END]
)  # fmt: skip
MORE_AFTER_OPENING = f"\nMore.\n</think>\n\nSix.{IM_END}"
QWEN3_OFF = plain(IM_END, thoughts=[f"Five.{IM_END}", MORE_AFTER_OPENING], call=QWEN_CALL)
QWEN35_EMPTY = "\n</think>\n\n"  # the prompt has opened the block
QWEN35 = plain(
    IM_END, last=(QWEN35_EMPTY, IM_END), trims=True,
    thoughts=[f"Five.{IM_END}", f"More.\n</think>\n\nSix.{IM_END}"],
    call=f"{XML_CALL}{IM_END}", consecutive=[f"{QWEN35_EMPTY}Five.{IM_END}", f"{QWEN35_EMPTY}Six.{IM_END}"],
)  # fmt: skip
NANO = plain(
    IM_END, before="</think>", spaces=[f"</think> \n Five.{IM_END}"],
    thoughts=[f"</think>\nFive.{IM_END}", f"More.\n</think>\nSix.{IM_END}"],
    call=f"</think>\n{XML_CALL}\n{IM_END}",
)  # fmt: skip
GLM_FIVE, GLM_SIX = "\n<think></think>\nFive.", "\n<think></think>\nSix."
GLM_MOE = plain(  # the last turn has no stop token: the next turn's role is the stop token
    "<|user|>", before="\n<think></think>\n", last=("\n<think></think>\n", ""), trims=True,
    thoughts=[f"{GLM_FIVE}<|user|>", "\n<think>More.</think>\nSix."], call=GLM_CALL,
    consecutive=[GLM_FIVE, GLM_SIX],
)  # fmt: skip
GLM_MARKED = plain("<|user|>", before="\n<think></think>\n", trims=True, call=GLM_CALL,
                   thoughts=[f"{GLM_FIVE}<|user|>", "\n<think>More.</think>\nSix.<|user|>"])  # fmt: skip
GLM_9B = plain("<|user|>", last=("", ""), consecutive=["Five.", "Six."])
OSS_FIVE, OSS_SIX = f"{FINAL}Five.{END}", f"{FINAL}Six.<|return|>"
GPT_OSS = plain(
    END, before=FINAL, last=(FINAL, "<|return|>"), call=OSS_CALL,
    thoughts=[OSS_FIVE, f"{ANALYSIS}More.{END}<|start|>assistant{OSS_SIX}"],
)  # fmt: skip
LFM_CALL = f"<|tool_call_start|>[add(terms='2, 3', n=2)]<|tool_call_end|>{IM_END}"
QWEN3_MARKED = plain(IM_END, before=QWEN3_EMPTY, call=QWEN3_EMPTY + QWEN_CALL, thoughts=[COUNT + IM_END, MORE + IM_END])
NO_TURNS = {case: NOT_KNOWN["no stop"] for case in CASES if case != "tools"} | {"tools": Refused("row's tools")}
CALLS_LOST = Refused("tool calls of message 2 (assistant) 0 times")
SYSTEM_LOST = Refused("content of message 1 (system) 0 times")
MISTRAL_V3 = plain("</s>", before=" ", trims=True, system=SYSTEM_LOST, consecutive=NO,
                   call=f"[TOOL_CALLS] {MISTRAL_CALL}")  # fmt: skip
MISTRAL_V7 = plain("</s>", before=" ", tools=Refused("Only user, system and assistant"),
                   consecutive=[" Five.</s> Six.</s>"])  # fmt: skip
TEKKEN = plain("</s>", system=SYSTEM_LOST, call=f"[TOOL_CALLS]{MISTRAL_CALL}", consecutive=NO)
GEMMA_2 = plain("<end_of_turn>", trims=True, system=Refused("System role not supported"), **ONLY_CHATS)
LFM = plain(IM_END, reasoning=[f"Five.{IM_END}", f"<think>More.</think>Six.{IM_END}"], call=LFM_CALL)
QWEN_2, LLAMA_3_1 = plain(IM_END, call=QWEN_CALL), plain(EOT, trims=True, call=LLAMA_CALL)
GRANITE = {"eos": "<|end_of_text|>", "special": ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")}
WITHOUT_THINKING = "{%- set enable_thinking = false %}"
R1 = plain(DEEPSEEK_END) | {"<think>": [f"\n\nFive.{DEEPSEEK_END}", f"\n\nSix.{DEEPSEEK_END}"]}
SUPER = plain(EOT, trims=True) | {"<think>": [f"Five.{EOT}", f"Six.{EOT}"]}

FAMILIES = {
    "ChatML": Family("chatml", trained=plain(IM_END), **CHATML),
    "Qwen 2.5": Family("trl:qwen2_5", trained=QWEN_2, **CHATML),
    "Qwen 3": Family("trl:qwen3", trained=QWEN3, **CHATML),
    "Qwen 3, no thinking": Family("trl:qwen3", trained=QWEN3_OFF, before=WITHOUT_THINKING, **CHATML),
    "Qwen 3 2507": Family("trl:qwen3_instruct_2507", trained=QWEN_2, **CHATML),
    "Qwen 3.5": Family("trl:qwen3_5_think", trained=QWEN35, **CHATML),
    "Llama 2": Family("llama2", trained=plain(" </s>", before=" ", trims=True, **ONLY_CHATS), **LLAMA2),
    "Llama 3": Family("trl:llama3", trained=plain(EOT, trims=True), **LLAMA3),
    "Llama 3.1": Family("trl:llama3_1", trained=LLAMA_3_1, **LLAMA3),
    "Llama 3.2": Family("trl:llama3_2", trained=LLAMA_3_1, **LLAMA3),
    "Mistral v1": Family("mistral_v1", trained=plain("</s>", before=" ", **ONLY_CHATS), **LLAMA2),
    "Mistral v3": Family("mistral_v3", trained=MISTRAL_V3, metaspace=True, **MISTRAL),
    "Mistral v7": Family("mistral_v7", trained=MISTRAL_V7, metaspace=True, **MISTRAL),
    "Mistral Tekken": Family("mistral_tekken", trained=TEKKEN, **MISTRAL),
    "Gemma 1, 2": Family("trl:gemma", trained=GEMMA_2, **GEMMA),
    "Gemma 3": Family("trl:gemma3", trained=plain("<end_of_turn>", trims=True, **ONLY_CHATS), **GEMMA),
    "Phi 3": Family("trl:phi3", trained=plain(END), metaspace=True, **PHI3),
    "Phi 3 medium": Family("phi3_medium", trained=plain(END, system=SYSTEM_LOST), metaspace=True, **PHI3),
    "Phi 3.5": Family("trl:phi3_5", trained=plain(END), metaspace=True, **PHI3),
    "Phi 4": Family("phi4", trained=plain(IM_END), eos=IM_END, special=("<|im_start|>", "<|im_sep|>")),
    "Phi 4 mini": Family("phi4_mini", trained=plain(END), **PHI3),
    "DeepSeek V2": Family("deepseek_v2", trained=plain(DEEPSEEK_END, before=" "), **DEEPSEEK),
    "DeepSeek V3": Family("trl:deepseekv3", trained=R1 | {"tools": Refused("row's tools")}, **DEEPSEEK),
    "DeepSeek R1 distill": Family("trl:deepseek_r1_distill", trained=R1, **DEEPSEEK),
    "GLM 4 9B": Family("glm4_9b", trained=GLM_9B, **GLM),
    "GLM 4 MoE": Family("trl:glm4moe", trained=GLM_MOE, **GLM),
    "gpt-oss": Family("trl:gptoss", trained=GPT_OSS, **OSS),
    "Command R": Family("command_r", trained=plain(COHERE_END, trims=True, **ONLY_CHATS), **COHERE),
    "Aya": Family("trl:cohere", trained=plain(COHERE_END, trims=True, **ONLY_CHATS), **COHERE),
    "Cohere 2": Family("trl:cohere2", trained=plain(f"<|END_RESPONSE|>{COHERE_END}", **ONLY_CHATS), **COHERE),
    "Granite 3": Family("granite3", trained=plain("<|end_of_text|>", tools=CALLS_LOST), **GRANITE),
    "OLMo": Family("olmo", trained=plain("<|endoftext|>", system=SYSTEM_LOST), eos="<|endoftext|>"),
    "OLMo 2": Family("olmo2", trained=plain("<|endoftext|>"), eos="<|endoftext|>", bos="<|endoftext|>"),
    "SmolLM 2": Family("smollm2", trained=plain(IM_END), **CHATML),
    "SmolLM 3": Family("smollm3", trained=plain(IM_END), **CHATML),
    "Nemotron Mini": Family("nemotron_mini", trained=NO_TURNS | {"tools": CALLS_LOST}, **LLAMA2),
    "Nemotron Super 49B": Family("nemotron_super_49b", trained=SUPER, **LLAMA3),
    "Nemotron 3 Nano": Family("trl:nemotron_3_nano", trained=NANO, **CHATML),
    "Falcon 7B": Family("falcon_7b", trained=NO_TURNS, eos="<|endoftext|>"),
    "Falcon 3": Family("falcon3", trained=plain("<|endoftext|>"), eos="<|endoftext|>"),
    "Zephyr": Family("zephyr", trained=plain("</s>"), **LLAMA2),
    "Vicuna": Family("vicuna", trained=plain("</s>", before=" ", trims=True), **LLAMA2),
    "Qwen 3, marked": Family("trl:qwen3_training", trained=QWEN3_MARKED, **CHATML),
    "gpt-oss, marked": Family("trl:gptoss_training", trained=GPT_OSS, **OSS),
    "GLM 4 MoE, marked": Family("trl:glm4moe_training", trained=GLM_MARKED, **GLM),
    "Nemotron 3 Nano, marked": Family("trl:nemotron_3_nano_training", trained=NANO, **CHATML),
    "LFM 2.5, marked": Family("trl:lfm2_2_5", trained=LFM | {"<think>": LFM["reasoning"]}, **CHATML),
}
REFUSED_TEMPLATES = ("Nemotron Mini", "Falcon 7B")
AVAILABLE = [name for name, family in FAMILIES.items() if TRL or not family.template.startswith("trl:")]
USABLE = [name for name in AVAILABLE if name not in REFUSED_TEMPLATES]


def read_template(name: str) -> str:
    if name == "chatml":
        return CHATML_TEMPLATE
    if name.startswith("trl:"):
        return (Path(TRL.origin).parent / "chat_templates" / f"{name[4:]}.jinja").read_text()
    return (HERE / f"{name}.jinja").read_text()


def make_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """Byte-level BPE, or SentencePiece's style: a mark for each space and one where a text begins, bytes as tokens."""
    texts = [
        "How many? Five. Be brief. And now? Six. Count. More. assistant user system sum: 5 \n\n USER ASSISTANT"
    ] * 20
    if family.metaspace:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        tokens, alphabet = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))], []
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokens, alphabet = [], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=tokens, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=family.eos, bos_token=family.bos)
    wrapped.add_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    wrapped.chat_template = family.before + read_template(family.template)
    return wrapped


@cache
def find_tokenizer(name: str) -> PreTrainedTokenizerFast:
    return make_tokenizer(FAMILIES[name])


def make_new_masker(name: str) -> ChatMasker:
    """One that has not seen any conversation yet."""
    tokenizer = find_tokenizer(name)
    return ChatMasker(tokenizer, stop_token_ids=tokenizer.convert_tokens_to_ids(list(FAMILIES[name].stops)))


make_masker = cache(make_new_masker)


def trained_texts(masker: ChatMasker, messages: list[dict], *, tools: list[dict] | None = None) -> list[str]:
    (masked,) = masker.mask([Chat(messages, tools=tools)])
    if isinstance(masked, ValueError):
        raise masked
    # Older versions of transformers do not name it twice by themselves.
    messages = separate_reasoning(masker.tokenizer, Chat(messages)).messages
    named = [{"thinking": m["reasoning_content"], **m} if "reasoning_content" in m else m for m in messages]
    expected = masker.tokenizer.apply_chat_template(named, tools=tools, return_dict=True)
    assert masked.input_ids == expected["input_ids"]
    return list_trained_texts(masked, masker)


@pytest.mark.parametrize("name", AVAILABLE)
def test_template_is_checked_first(name):
    masker = make_masker(name)
    if name in REFUSED_TEMPLATES:
        with pytest.raises(ValueError, match=r"end-of-turn .*--missing-stop-token allow"):
            masker.check_template()
    else:
        masker.check_template()


WITHOUT_STOP = {
    "Nemotron Mini": plain("", trims=True, tools=CALLS_LOST),
    "Falcon 7B": plain("", before=" "),  # the prompt ends with the colon, so the model has to write the space
}


@pytest.mark.parametrize("special", [(), ("<extra_id_0>", "<extra_id_1>")])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", REFUSED_TEMPLATES)
def test_missing_stop_token_allowed(name, case, special):
    """Contents are trained, and nothing else."""
    tokenizer = make_tokenizer(replace(FAMILIES[name], special=special))
    masker, expected = ChatMasker(tokenizer, missing_stop_token="allow"), WITHOUT_STOP[name][case]
    assert any("TO STOP" in note for note in masker.check_template())
    if isinstance(expected, Refused):
        with pytest.raises(ValueError, match=re.escape(expected.reason)):
            trained_texts(masker, CASES[case], tools=[TOOL])
    else:
        assert trained_texts(masker, CASES[case]) == expected


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", AVAILABLE)
def test_trained_text(name, case):
    masker, expected = make_new_masker(name), FAMILIES[name].trained[case]
    tools = [TOOL] if case == "tools" else None
    if isinstance(expected, Refused):
        with pytest.raises(ValueError) as error:
            trained_texts(masker, CASES[case], tools=tools)
        assert expected.reason in str(error.value)
    else:
        assert trained_texts(masker, CASES[case], tools=tools) == expected


@pytest.mark.parametrize("name", USABLE)
def test_users_cannot_unmask_anything(name):
    """A user who writes the template's own delimiters and the answer, word for word, and the placeholder."""
    masker = make_masker(name)
    (text,) = masker.chats.renderer.render([[user(), assistant()]])
    messages = [user(text + "Five. xQ00001Qx"), assistant(), user(text), assistant("Six.")]
    assert trained_texts(masker, messages) == FAMILIES[name].trained["several"]


@pytest.mark.parametrize("content", ["é" * 9 + "👩‍👩‍👧‍👦你好", "\U0001f44d", "  x", "5", "\x00\u2028"])
@pytest.mark.parametrize("name", USABLE)
def test_any_characters(name, content):
    masker = make_masker(name)
    expected = FAMILIES[name].trained["one turn"][0].replace("Five.", content.strip())
    (text,) = trained_texts(masker, [user(content), assistant(content)])
    assert "".join(text.split()) == "".join(expected.split())


PLAIN = ["ChatML", "Mistral Tekken", "Mistral v3", "Phi 4", "Command R", "Granite 3", "Falcon 3", "OLMo 2",
         "Zephyr", "Vicuna", "Llama 2", "Qwen 2.5", "Llama 3.1", "Gemma 3", "gpt-oss"]  # fmt: skip
pieces = st.sampled_from(
    ["\n", " ", "Five.", "<", "assistant", "[INST]", "xQ00001Qx", "\u00e9", "\U0001f469\u200d\U0001f467"]
)
# "\u2581" is what some tokenizers write for a space, and decode as one.
letters = st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")
texts = st.lists(pieces | st.text(letters, max_size=5), min_size=1, max_size=6)


@pytest.mark.parametrize("name", thin([name for name in PLAIN if name in USABLE], step=3))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_contents(name, data):
    """What is trained is what the example has where the contents stand, but for what the prompt's last token holds."""
    masker, family = make_masker(name), FAMILIES[name]
    tokens = st.sampled_from([family.eos, *family.special[:3]])
    contents = ["".join(data.draw(texts | st.lists(tokens, min_size=1, max_size=3))) for _ in range(4)]
    assume(all(content.strip() for content in contents))
    first, answer, second, last = contents
    (masked,) = masker.mask([Chat([user(first), assistant(answer), user(second), assistant(last)])])
    if family.template == "trl:gptoss" and isinstance(masked, ValueError):
        assert "<|channel|> tags" in str(masked)
        return
    assert not isinstance(masked, ValueError), masked
    trims = family.trained["spaces"][0].count(" \n Five") == 0
    expected = [
        text.replace(old, content.strip() if trims else content)
        for text, old, content in zip(family.trained["several"], ("Five.", "Six."), (answer, last), strict=True)
    ]
    runs = split_by_training(masked.input_ids, masked.labels)
    decode = masker.tokenizer.decode
    for (prompt, _), (ids, is_trained), text in zip(runs[::2], runs[1::2], expected, strict=False):
        assert is_trained and len(runs) // 2 == len(expected)
        assert decode(ids) == text or (text.endswith(decode(ids)) and text in decode([*prompt[-1:], *ids]))


def step(i: int, thought: str, **fields) -> list[dict]:
    """A call with its reasoning, and its result."""
    message = calling({"terms": f"{i}", "n": i})
    message["tool_calls"][0]["id"] = f"abc{i:06}"
    return [{**message, "reasoning_content": thought, **fields}, {**RESULT, "tool_call_id": f"abc{i:06}"}]


def xml_call(i: int) -> str:
    return XML_CALL.replace("2, 3", f"{i}").replace("\n2\n", f"\n{i}\n") + IM_END


AGENT = [user(), *step(1, "A."), *step(2, "B."), assistant(reasoning_content="C.")]
CALLS_OF_AGENT = {
    "Qwen 3.5": [
        f"A.\n</think>\n\n{xml_call(1)}", f"B.\n</think>\n\n{xml_call(2)}", f"C.\n</think>\n\nFive.{IM_END}"
    ],
    "gpt-oss": [  # the reasoning of earlier steps is left out where an answer follows
        *(OSS_CALL.replace("2, 3", f"{i}").replace('"n": 2', f'"n": {i}') for i in (1, 2)),
        f"{ANALYSIS}C.{END}<|start|>assistant{FINAL}Five.<|return|>",
    ],
    "GLM 4 MoE": [
        *(GLM_CALL.replace("2, 3", f"{i}").replace("<arg_value>2<", f"<arg_value>{i}<")
          .replace("<think>", f"<think>{thought}") for i, thought in ((1, "A."), (2, "B."))),
        "\n<think>C.</think>\nFive.",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CALLS_OF_AGENT if name in USABLE])
def test_agents(name):
    assert trained_texts(make_masker(name), AGENT, tools=[TOOL]) == CALLS_OF_AGENT[name]


@pytest.mark.parametrize(
    "name", [name for name in ("Qwen 2.5", "Mistral Tekken", "gpt-oss", "GLM 4 MoE") if name in USABLE]
)
def test_calls_without_arguments(name):
    """No text of the row stands in such a turn."""
    family = FAMILIES[name]
    call = family.trained["tools"][0].replace('"terms": "2, 3", "n": 2', "")
    if name.startswith("GLM"):
        call = "\n<think></think>\n<tool_call>add\n</tool_call><|observation|>"
    messages = [user(), calling({}), RESULT, assistant(), *TURNS[2:]]
    assert trained_texts(make_masker(name), messages, tools=[TOOL]) == [call, *family.trained["tools"][1:]]


@pytest.mark.parametrize("name", [name for name in AVAILABLE if name == "DeepSeek V3"])
def test_deepseek_writes_arguments_that_are_text(name):
    masker = make_masker(name)
    call = (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"terms": "2, 3"}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
    )
    messages = [user(), calling('{"terms": "2, 3"}'), RESULT, assistant()]
    assert trained_texts(masker, messages) == [call, f"Five.{DEEPSEEK_END}"]
