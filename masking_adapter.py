"""Temporary: the interface that chat_masking is going to have."""

from dataclasses import dataclass

import chat_masking
from chat_masking import Chat as _Chat


@dataclass(frozen=True)
class Chat(_Chat):
    tools: list | None = None


@dataclass(frozen=True)
class Completion:
    prompt: str
    completion: str


@dataclass(frozen=True)
class Document:
    text: str


@dataclass(frozen=True)
class TokenizedChat:
    input_ids: list[int]
    labels: list[int]
    loss_weights: list[float] | None
    num_trained_by_role: dict[str, int]


class ChatMasker(chat_masking.ChatMasker):
    def mask(self, examples):
        results = {}
        chats = {i: e for i, e in enumerate(examples) if isinstance(e, Chat)}
        documents = {i: e for i, e in enumerate(examples) if isinstance(e, Document)}
        results.update(zip(chats, self.mask_chats(list(chats.values())) if chats else [], strict=True))
        texts = [Chat([{"role": "pretrain", "content": d.text}]) for d in documents.values()]
        results.update(zip(documents, self.mask_documents(texts) if texts else [], strict=True))
        finished = []
        for i, example in enumerate(examples):
            if isinstance(example, Completion):
                results[i] = self.complete(example)
            result = results[i]
            if not isinstance(result, ValueError):
                n = len(result.labels) - result.labels.count(-100)
                role = "document" if isinstance(example, Document) else "assistant"
                weights = None
                if isinstance(example, Chat) and any("weight" in m for m in example.messages):
                    w = example.messages[-1].get("weight", 1.0)
                    weights = [0.0 if label == -100 else w for label in result.labels]
                result = TokenizedChat(result.input_ids, result.labels, weights, {role: n})
            finished.append(result)
        return finished

    def complete(self, example):
        a = self.tokenizer(example.prompt)["input_ids"]
        b = self.tokenizer(example.completion, add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]
        return TokenizedChat(a + b, [-100] * len(a) + b, None, {})
