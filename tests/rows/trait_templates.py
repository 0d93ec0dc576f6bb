"""Small chat templates, each with one habit of families whose tool calls are hard to mask, named for the habit."""

HEADERS = (
    "{{% for m in messages %}}{{{{ '<|im_start|>' + m.role + '\n' }}}}{body}{{{{ '<|im_end|>\n' }}}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\n' }}}}{{% endif %}}"
)
DESCRIBED = "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"


def chatml(calls: str, *, content: str = "{{ m.content or '' }}") -> str:
    """ChatML with `calls` after the content of a message that has calls."""
    return DESCRIBED + HEADERS.format(body=content + "{% if m.tool_calls %}" + calls + "{% endif %}")


def each_call(call: str) -> str:
    return "{% for c in m.tool_calls %}{% set f = c.function %}" + call + "{% endfor %}"


JSON_CALL = "{{ '<call>' + f.name + ' ' + f.arguments | tojson + '</call>' }}"
ARGUMENTS = "{{ '<call name=' + f.name + '>' }}{% for k, v in f.arguments.items() %}"

# The result stands in the model's turn, and the content of the message with the call after it, as in Gemma 4.
RESULT_BEFORE_CONTENT = (
    DESCRIBED + "{% for m in messages %}{% if m.role != 'tool' %}"
    "{% set goes_on = m.role == 'assistant' and loop.index0 > 0 and messages[loop.index0 - 1].role == 'tool' %}"
    "{% if not goes_on %}{{ '<|turn>' + m.role + '\n' }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '<|tool_call>' + c.function.name + c.function.arguments | tojson"
    " + '<tool_call|>' }}{% endfor %}"
    "{% set seen = namespace(result=false) %}"
    "{% if m.tool_calls %}{% set i = loop.index0 %}{% for r in messages[i + 1:] %}"
    "{% if r.role == 'tool' and not seen.stop %}{% set seen.result = true %}"
    "{{ '<|tool_response>' + r.content + '<tool_response|>' }}{% else %}{% set seen.stop = true %}{% endif %}"
    "{% endfor %}{% if not seen.result %}{{ '<|tool_response>' }}{% endif %}{% endif %}"
    "{{ m.content or '' }}"
    "{% if not m.tool_calls or (m.content and seen.result) %}{{ '<turn|>\n' }}{% endif %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|turn>assistant\n' }}{% endif %}"
)
# The call is a turn of its own after the content's, and only the first one is written, as in GigaChat 3.
FIRST_CALL_IN_ITS_OWN_TURN = (
    DESCRIBED + "{% for m in messages %}{{ m.role + '<|sep|>\n' + (m.content or '') + '<|end|>\n\n' }}"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    '{{ \'function call<|sep|>\n{"name": "\' + f.name + \'", "arguments": \' + f.arguments | tojson }}'
    "{{ '}<|end|>\n\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'assistant<|sep|>\n' }}{% endif %}"
)
# The last message's content and its calls are two turns, each with a header, as in Nemotron Nano v2.
LAST_CALL_IN_ITS_OWN_TURN = (
    DESCRIBED + "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last and m.content %}{{ '<think>\n\n' }}{% endif %}{{ m.content or '' }}"
    "{% if m.tool_calls %}{% if loop.last and m.content %}{{ '\n<|end|>\n\n<|turn|>assistant\n' }}{% endif %}"
    '<TOOLCALL>[{% for c in m.tool_calls %}{{ \'{"name": "\' + c.function.name + \'", "arguments": \''
    " + c.function.arguments | tojson + '}' }}{% if not loop.last %}, {% endif %}{% endfor %}]</TOOLCALL>{% endif %}"
    "{{ '\n<|end|>\n\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\n<think>\n\n' }}{% endif %}"
)
# A turn is only closed where another follows, as in Apertus, Apriel 1.6 and Hy3; there is one stop token.
CLOSED_BY_THE_NEXT_TURN = (
    DESCRIBED + "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function | tojson + '</call>' }}{% endfor %}"
    "{% if m.role != 'assistant' or not loop.last %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The token that closes a turn stands on a line of its own and is not the tokenizer's, as in Apriel 1.5.
CLOSED_ON_A_NEW_LINE = (
    DESCRIBED + "{% for m in messages %}{{ '<|' + m.role + '|>\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_calls>[' + c.function.name + c.function.arguments | string + ']' }}"
    "{% endfor %}{% if m.role != 'assistant' or not loop.last %}{{ '\n<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# What closes a tool's turn has a line break before it only where another turn follows, as in Hermes 2 Pro tool_use,
# which also fails without tools.
LINE_BREAK_BEFORE_THE_NEXT_TURN = (
    "{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% for m in messages %}{% if m.role == 'tool' %}{{ '<|im_start|>tool\n<tool_response>\n' + m.content }}"
    "{{ '\n</tool_response>\n' if not loop.last else '\n</tool_response>' }}{{ '<|im_end|>' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>\n' + c.function | tojson + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Reasoning is a message that ends with its own stop token, as in Muse Glimmer; the call's name is there twice.
REASONING_ENDS_WITH_A_STOP = (
    DESCRIBED + "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}{{ '<|start|>assistant to=self<|message|>' + m.reasoning_content + '<|eom|>' }}"
    "{% endif %}{% if m.tool_calls %}{% for c in m.tool_calls %}{{ '<|start|>assistant to=' + c.function.name"
    " + '<|message|><invoke name=\"' + c.function.name + '\">' + c.function.arguments | tojson }}"
    "{{ '<|eot|>' if loop.last else '<|eom|>' }}{% endfor %}"
    "{% else %}{{ '<|start|>assistant to=user<|message|>' + m.content + '<|eot|>' }}{% endif %}"
    "{% else %}{{ '<|start|>' + m.role + ((' ' + m.name) if m.name else '') + '<|message|>' + m.content + '<|eot|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
# Only usable with tools; results name the function, as in FunctionGemma.
ONLY_WITH_TOOLS = (
    "{% if not tools %}{{ raise_exception('tools are needed') }}{% endif %}"
    + DESCRIBED
    + "{% for m in messages %}{% if m.role == 'tool' %}{{ '<start_of_response>' + m.name + ':' + m.content"
    " + '<end_of_response>' }}{% else %}"
    "{% if not (m.role == 'assistant' and loop.previtem and loop.previtem.role == 'tool') %}"
    "{{ '<start_of_turn>' + m.role + '\n' }}{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '<start_of_call>call:' + c.function.name + '{' }}"
    "{% for k, v in c.function.arguments | dictsort %}{{ k + ':' }}"
    "{% if v is string %}{{ '<escape>' + v + '<escape>' }}{% else %}{{ v | tojson }}{% endif %}"
    "{% if not loop.last %},{% endif %}{% endfor %}{{ '}<end_of_call>' }}{% endfor %}"
    "{{ '<start_of_response>' if m.tool_calls else '<end_of_turn>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<start_of_turn>assistant\n' }}{% endif %}"
)
MARKED_WITH_HEADER = (  # as in Laguna: the marks hold the header, and where there is reasoning also what opens it
    DESCRIBED + "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ '<|im_start|>assistant\n' }}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n' }}"
    "{% else %}{{ '</think>\n' }}{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function | tojson + '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endgeneration %}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)

TRAITS: dict[str, tuple[str, tuple[str, ...]]] = {  # template, stop tokens: the first is the tokenizer's
    "a result before the content": (RESULT_BEFORE_CONTENT, ("<eos>", "<turn|>", "<|tool_response>")),
    "the first call in its own turn": (FIRST_CALL_IN_ITS_OWN_TURN, ("<eos>", "<|end|>")),
    "the last call in its own turn": (LAST_CALL_IN_ITS_OWN_TURN, ("<eos>", "<|end|>")),
    "closed by the next turn": (CLOSED_BY_THE_NEXT_TURN, ("<|im_end|>",)),
    "closed on a new line": (CLOSED_ON_A_NEW_LINE, ("<eos>", "<|end|>")),
    "a line break before the next turn": (LINE_BREAK_BEFORE_THE_NEXT_TURN, ("<|im_end|>",)),
    "reasoning ends with a stop": (REASONING_ENDS_WITH_A_STOP, ("<|eot|>", "<|eom|>")),
    "only with tools": (ONLY_WITH_TOOLS, ("<eos>", "<end_of_turn>", "<start_of_response>")),
    "marks with the header": (MARKED_WITH_HEADER, ("<|im_end|>",)),
    "an id in place of the name": (
        chatml(each_call("{{ '<call>' + c.id + '<|args|>' + f.arguments | tojson + '</call>' }}")),
        ("<|im_end|>",),
    ),
    "CDATA around some arguments": (
        chatml(
            each_call(
                ARGUMENTS + "{% set t = v if v is string else v | tojson %}{{ '<arg name=' + k + '>' }}"
                "{{ '<![CDATA[' + t + ']]>' if '\n' in t or '<' in t or '&' in t else t }}</arg>{% endfor %}</call>"
            )
        ),
        ("<|im_end|>",),
    ),
    "calls only without content": (
        chatml("{% if not m.content %}" + each_call(JSON_CALL) + "{% endif %}"),
        ("<|im_end|>",),
    ),
    "only arguments that are text": (
        chatml(
            each_call(
                ARGUMENTS + "{% if v is string %}{{ '<arg name=' + k + '>' + v + '</arg>' }}{% endif %}{% endfor %}"
                "</call>"
            )
        ),
        ("<|im_end|>",),
    ),
    "arguments without keys": (
        chatml(each_call(ARGUMENTS + "{{ v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}</call>")),
        ("<|im_end|>",),
    ),
    "content that may not be null": (chatml(each_call(JSON_CALL), content="{{ m.content + '' }}"), ("<|im_end|>",)),
    "calls as a Python list": (chatml("{{ m.tool_calls | string }}"), ("<|im_end|>",)),
    "arguments in the order of their keys": (
        chatml(
            each_call(
                "{{ '<call>' + f.name + '{' }}{% for k, v in f.arguments | dictsort %}{{ k + ':' + v | tojson }}"
                "{% if not loop.last %},{% endif %}{% endfor %}}</call>"
            )
        ),
        ("<|im_end|>",),
    ),
    "the names of tools are looked up": (
        "{% set names = tools | default([], true) | map(attribute='function.name') | list %}"
        + chatml(
            each_call(
                "{% if f.name not in names %}{{ raise_exception('unknown tool ' + f.name) }}{% endif %}" + JSON_CALL
            )
        ),
        ("<|im_end|>",),
    ),
    "the name is written with the result": (
        DESCRIBED + "{% set last = namespace(name=none) %}{% for m in messages %}"
        "{% if m.role == 'tool' %}{{ '<|start|>functions.' + last.name + '<|message|>'"
        " + m.content + '<|end|>' }}{% else %}{{ '<|start|>' + m.role }}{% if m.tool_calls %}"
        "{% set last.name = m.tool_calls[0].function.name %}{{ ' to=' + last.name + '<|message|>'"
        " + m.tool_calls[0].function.arguments | tojson + '<|call|>' }}{% else %}"
        "{{ '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        ("<|return|>", "<|call|>", "<|end|>"),
    ),
}  # fmt: skip


def thinking(answer: str, prompt: str, *, before: str = "") -> str:
    """ChatML whose answers are written by `answer`, and whose generation prompt continues with `prompt`."""
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        + (before + answer)
        + "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n" + prompt + "' }}{% endif %}"
    )


WRITTEN_REASONING = (
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n' }}"
    "{% else %}{{ '<think></think>' }}{% endif %}{{ m.content }}"
)
# How the generation prompt continues where a row without reasoning does not: template, the prompt's further words, and
# what has to follow them before the answer (None: nothing can).
PROMPTED_REASONING: dict[str, tuple[str, str, str | None]] = {
    "reasoning only in contents": (  # as in R1's distills and QwQ: earlier reasoning is cut off, none is ever written
        thinking("{{ m.content.split('</think>')[-1] }}", "<think>\n"), "<think>\n", "\n</think>\n\n",
    ),
    "an empty reasoning on one line": (thinking(WRITTEN_REASONING, "<think>\n"), "<think>\n", "\n</think>\n"),
    "no line breaks": (  # as in DeepSeek V3.1 and V3.2
        thinking("{{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '</think>' }}"
                 "{{ m.content }}", "<think>"), "<think>", "</think>",
    ),
    "a channel that is closed": (  # as in the large Gemma 4
        thinking("{{ m.content }}", "<|channel>thought\n<channel|>"), "<|channel>thought\n<channel|>", "",
    ),
    "a tag that the template never closes": (thinking("{{ m.content }}", "<think>\n"), "<think>\n", None),
    "a tag that nobody knows": (thinking("{{ m.content }}", "<|ponder|>"), "<|ponder|>", None),
}  # fmt: skip
# Contents are written only where they are lists of parts, as in SmolVLM, Idefics 3 and LLaVA-NeXT.
ONLY_PARTS = (
    "{% for m in messages %}{{ m.role + ': ' }}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
