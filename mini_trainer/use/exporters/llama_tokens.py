"""llama.cpp's token ids for a SentencePiece vocabulary, to find texts that the tokenizer encodes differently.

llama.cpp (`llm_tokenizer_spm_session` in src/llama-vocab.cpp) first cuts out added tokens, then merges the neighbours
whose text is the token of the highest score, the first of equals; characters that are no tokens become bytes.
"""

import heapq
import unicodedata
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

SPACE = "\u2581"  # a blank in SentencePiece's vocabularies
COMPOSED = ("naïve café, déjà vu, Ångström", "Tiếng Việt có dấu", "한국어 문장입니다")
STRINGS = (
    *COMPOSED,
    *(unicodedata.normalize("NFD", text) for text in COMPOSED),
    "Hello, world! How are you?",
    "żółw gęś źdźbło",
    "Привет, как дела?",
    "Καλημέρα κόσμε",
    "你好，世界！这是一个测试。",
    "日本語のテキスト、カタカナ",
    "שלום עולם",
    "مرحبا بالعالم، كيف حالك؟",
    "नमस्ते दुनिया",
    "ภาษาไทยไม่มีช่องว่าง",
    "ភាសាខ្មែរ",
    "👍🏽 👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈",
    "🚀🚀🚀 ✅",
    "1234567890",
    "3.14159 1,000,000 0x1F 1e-10",
    "٣٤٥ Ⅷ ½ ²",
    "  two  blanks   three    four",
    " " * 17 + "x",
    "blanks at the end   ",
    " ",
    "\t\ttabs\twithin\tand before",
    "lines\nof text\n\nwith gaps\n\n\n",
    "of Windows\r\nlines\r\n\r\n",
    "\r\r returns",
    "no\u00a0break\u2009thin\u3000wide",
    "zero\u200bwidth\u200dand\ufeffmarks",
    "\u202eright to left\u202c and back",
    "many marks: a\u0301\u0323\u0302 h\u0353\u0352",
    "a" * 100,
    "ab" * 60,
    "=" * 80,
    "!?!?...---___***",
    "I'm, you're, WE'LL, they'd, O'Neil’s",
    "<s></s><|im_start|><|endoftext|>[INST]<0x41>",
    'def f(x: int) -> str:\n    return f"{x!r}"  # text\n',
    "for (int i = 0; i < n; ++i) { a[i] = b->c; }",
    '{"key": [1, 2.5, null], "nested": {"a": "b\\n"}}',
    "https://example.com/path?query=1&x=%20#part user@example.org",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case",
    "ﬁ ﬂ ℌ ｆｕｌｌ ㍿ ①",
    "𝒳𝓎 𐍈 𠜎",
    f"C:\\Users\\name\\file.txt $PATH `ls -la | grep x` {SPACE} Ġ",
)


def find_differing(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Sequence[str],
    scores: Sequence[float],
    *,
    has_space_prefix: bool,
) -> list[str]:
    """Texts of `STRINGS` without added tokens of which llama.cpp makes other tokens than the tokenizer."""
    ids = {text: i for i, text in enumerate(tokens)}
    added = tokenizer.get_added_vocab()
    return [
        text
        for text in STRINGS
        if not any(token in text for token in added)
        and tokenizer(text, add_special_tokens=False).input_ids
        != tokenize_by_scores(" " * has_space_prefix + text, ids, scores)
    ]


def tokenize_by_scores(text: str, ids: dict[str, int], scores: Sequence[float]) -> list[int]:
    """llama.cpp's token ids of a text without added tokens."""
    parts = list(text.replace(" ", SPACE))  # "" once it is merged into one before it
    before, after = list(range(-1, len(parts) - 1)), [*range(1, len(parts)), -1]
    queue: list[tuple[float, int, int, str]] = []  # -score, the two parts, their merge

    def add_pair(left: int, right: int) -> None:
        if left >= 0 and right >= 0 and (token := ids.get(parts[left] + parts[right])) is not None:
            heapq.heappush(queue, (-scores[token], left, right, parts[left] + parts[right]))

    for i in range(1, len(parts)):
        add_pair(i - 1, i)
    while queue:
        _, left, right, merged = heapq.heappop(queue)
        if not parts[left] or not parts[right] or parts[left] + parts[right] != merged:
            continue  # one of them has merged with another
        parts[left], parts[right] = merged, ""
        after[left] = after[right]
        if after[right] >= 0:
            before[after[right]] = left
        add_pair(before[left], left)
        add_pair(left, after[left])
    return [token for part in parts if part for token in find_tokens(part, ids)]


def find_tokens(part: str, ids: dict[str, int]) -> list[int]:
    """The token of a text, or those of its bytes, -1 where the vocabulary has none."""
    return [ids[part]] if part in ids else [ids.get(f"<0x{byte:02X}>", -1) for byte in part.encode()]
