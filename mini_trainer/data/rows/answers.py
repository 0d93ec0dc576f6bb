"""Chats whose last messages answer a prompt: the prompt's messages are not trained."""

from dataclasses import replace

from mini_trainer.data.chat.examples import ASSISTANT, Chat, Message


def check_ends(messages: list[Message], num_prompt: int, name: str) -> None:
    """Raises ValueError for a prompt that ends within the assistant's turn, and an answer that ends outside of it."""
    check_prompt(messages[:num_prompt])
    if messages[-1]["role"] != ASSISTANT:
        raise ValueError(f"{name} ends with the role {messages[-1]['role']!r}, expected an assistant's message")


def check_prompt(prompt: list[Message]) -> None:
    """Raises ValueError for a prompt that ends within the assistant's turn."""
    if prompt[-1]["role"] == ASSISTANT:
        raise ValueError(
            "the prompt ends with an assistant's message, and it is not known whether the answer continues it or is"
            " another message: make it part of the answer, or end the prompt with a user's message"
        )


def leave_untrained(chat: Chat, num_messages: int) -> Chat:
    """The chat, of which the first messages are not trained."""
    prompt = [{key: value for key, value in message.items() if key != "weight"} for message in chat.messages]
    untrained = [message | {"train": False} for message in prompt[:num_messages]]
    return replace(chat, messages=[*untrained, *chat.messages[num_messages:]])
