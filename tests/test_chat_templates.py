"""Stock chat templates of model families: what is trained of what kind of conversation, written by hand.

    python -m pytest tests/test_chat_templates.py -s -k table     # prints the table of families and properties

Templates named `trl:` are read from the package trl, which ships them as files (tests skip them without it); the
others lie in tests/chat_templates. Each family gets a small tokenizer of its style with its special tokens.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
from dataclasses import dataclass, field
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from chat_masking import Chat, ChatMasker, split_runs

HERE = Path(__file__).parent / "chat_templates"


def user(content="How many?"):
    return {"role": "user", "content": content}


def assistant(content="Five.", **fields):
    return {"role": "assistant", "content": content, **fields}


SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"id": "abc123def", "type": "function", "function": {"name": "add", "arguments": {"terms": "2, 3", "n": 2}}}
RESULT = {"role": "tool", "content": '{"sum": 5}', "tool_call_id": "abc123def", "name": "add"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"terms": {"type": "string", "description": "Which."}}},
    },
}
CASES = {
    "single": [user(), assistant()],
    "multi": [user(), assistant(), user("And now?"), assistant("Six.")],
    "system": [SYSTEM, user(), assistant(), user("And now?"), assistant("Six.")],
    "spaces": [user(" a "), assistant(" \n Five. \n")],
    "reasoning": [user(), assistant("Five.", reasoning_content="Count."), user(), assistant("Six.", reasoning_content="More.")],
    "think": [user(), assistant("<think>\nCount.\n</think>\n\nFive."), user(), assistant("<think>\nMore.\n</think>\n\nSix.")],
    "tools": [user(), assistant("", tool_calls=[CALL]), RESULT, assistant(), user("And now?"), assistant("Six.")],
    "consecutive": [user(), assistant(), assistant("Six.")],
    "user last": [user(), assistant(), user("And now?")],
}


@dataclass(frozen=True)
class Family:
    template: str
    eos: str
    special: list = field(default_factory=list)
    bos: str | None = None
    stops: list = field(default_factory=list)
    metaspace: bool = False
    before: str = ""


CHATML = dict(eos="<|im_end|>", special=["<|im_start|>", "<|endoftext|>"])
LLAMA3 = dict(eos="<|eot_id|>", bos="<|begin_of_text|>", special=["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"])
MISTRAL = dict(eos="</s>", bos="<s>", special=["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"])
PHI3 = dict(eos="<|endoftext|>", special=["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"])
GEMMA = dict(eos="<eos>", bos="<bos>", special=["<start_of_turn>", "<end_of_turn>"], stops=["<eos>", "<end_of_turn>"], metaspace=True)
DEEPSEEK = dict(eos="<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>", special=["<｜User｜>", "<｜Assistant｜>"])
GLM = dict(eos="<|endoftext|>", stops=["<|endoftext|>", "<|user|>", "<|observation|>"], special=["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"])
COHERE = dict(eos="<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>", special=["<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"])
GPTOSS = dict(eos="<|return|>", stops=["<|return|>", "<|endoftext|>", "<|call|>"], special=["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|endoftext|>"])

FAMILIES = {
    "ChatML": Family("chatml", **CHATML),
    "Qwen 2.5": Family("trl:qwen2_5", **CHATML),
    "Qwen 3": Family("trl:qwen3", **CHATML),
    "Qwen 3, thinking off": Family("trl:qwen3", before="{%- set enable_thinking = false %}", **CHATML),
    "Qwen 3 2507": Family("trl:qwen3_instruct_2507", **CHATML),
    "Qwen 3.5": Family("trl:qwen3_5_think", **CHATML),
    "Llama 2": Family("llama2", eos="</s>", bos="<s>", metaspace=True),
    "Llama 3": Family("trl:llama3", **LLAMA3),
    "Llama 3.1": Family("trl:llama3_1", **LLAMA3),
    "Llama 3.2": Family("trl:llama3_2", **LLAMA3),
    "Mistral v1": Family("mistral_v1", eos="</s>", bos="<s>", metaspace=True),
    "Mistral v3": Family("mistral_v3", metaspace=True, **MISTRAL),
    "Mistral v7": Family("mistral_v7", metaspace=True, **MISTRAL),
    "Mistral Tekken": Family("mistral_tekken", **MISTRAL),
    "Gemma 1, 2": Family("trl:gemma", **GEMMA),
    "Gemma 3": Family("trl:gemma3", **GEMMA),
    "Phi 3": Family("trl:phi3", metaspace=True, **PHI3),
    "Phi 3 medium": Family("phi3_medium", metaspace=True, **PHI3),
    "Phi 3.5": Family("trl:phi3_5", metaspace=True, **PHI3),
    "Phi 4": Family("phi4", eos="<|im_end|>", special=["<|im_start|>", "<|im_sep|>"]),
    "Phi 4 mini": Family("phi4_mini", **PHI3),
    "DeepSeek V2": Family("deepseek_v2", **DEEPSEEK),
    "DeepSeek V3": Family("trl:deepseekv3", **DEEPSEEK),
    "DeepSeek R1 distill": Family("trl:deepseek_r1_distill", **DEEPSEEK),
    "GLM 4 9B": Family("glm4_9b", **GLM),
    "GLM 4 MoE": Family("trl:glm4moe", **GLM),
    "gpt-oss": Family("trl:gptoss", **GPTOSS),
    "Command R": Family("command_r", **COHERE),
    "Aya": Family("trl:cohere", **COHERE),
    "Cohere 2": Family("trl:cohere2", **COHERE),
    "Granite 3": Family("granite3", eos="<|end_of_text|>", special=["<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"]),
    "OLMo": Family("olmo", eos="<|endoftext|>"),
    "OLMo 2": Family("olmo2", eos="<|endoftext|>", bos="<|endoftext|>"),
    "SmolLM 2": Family("smollm2", **CHATML),
    "SmolLM 3": Family("smollm3", **CHATML),
    "Nemotron Mini": Family("nemotron_mini", eos="</s>", bos="<s>", metaspace=True),
    "Nemotron Super 49B": Family("nemotron_super_49b", **LLAMA3),
    "Nemotron 3 Nano": Family("trl:nemotron_3_nano", **CHATML),
    "Nemotron 3 Ultra": Family("trl:nemotron_3_ultra", **CHATML),
    "Falcon 7B": Family("falcon_7b", eos="<|endoftext|>"),
    "Falcon 3": Family("falcon3", eos="<|endoftext|>"),
    "Zephyr": Family("zephyr", eos="</s>", bos="<s>", metaspace=True),
    "Vicuna": Family("vicuna", eos="</s>", bos="<s>", metaspace=True),
    "Qwen 3 marked": Family("trl:qwen3_training", **CHATML),
    "gpt-oss marked": Family("trl:gptoss_training", **GPTOSS),
    "GLM 4 MoE marked": Family("trl:glm4moe_training", **GLM),
    "LFM 2.5 marked": Family("trl:lfm2_2_5", **CHATML),
    "Nemotron 3 Nano marked": Family("trl:nemotron_3_nano_training", **CHATML),
}


def read_template(name):
    if name == "chatml":
        from make_tiny_model import CHATML_TEMPLATE

        return CHATML_TEMPLATE
    if name.startswith("trl:"):
        spec = find_spec("trl")
        if spec is None:
            pytest.skip("needs the package trl for its templates")
        return (Path(spec.origin).parent / "chat_templates" / f"{name[4:]}.jinja").read_text()
    return (HERE / f"{name}.jinja").read_text()


def make_tokenizer(family):
    texts = ["How many? Five. Be brief. And now? Six. Count. More. assistant user system tool sum: 5 \n\n USER ASSISTANT"] * 20
    if family.metaspace:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        first = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=first, show_progress=False)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=family.eos, bos_token=family.bos)
    wrapped.add_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    wrapped.chat_template = family.before + read_template(family.template)
    return wrapped


def make_masker(family):
    tokenizer = make_tokenizer(family)
    return ChatMasker(tokenizer, stop_token_ids=tokenizer.convert_tokens_to_ids(family.stops))


def trained_texts(masker, messages, tools=None):
    (masked,) = masker.mask([Chat(messages, tools=tools)])
    if isinstance(masked, ValueError):
        raise masked
    assert masked.input_ids == masker.tokenizer.apply_chat_template(messages, tools=tools, return_dict=True)["input_ids"]
    return [masker.tokenizer.decode(ids) for ids, trained in split_runs(masked.input_ids, masked.labels) if trained]
