"""Writes the quickstart's chats: questions on geography in several phrasings, some held out.

    python examples/quickstart/make_data.py --output-dir runs/quickstart

`train.jsonl` and `held_out.jsonl` hold the same facts, but no held-out question stands word for word in the training
data: to answer one, a model must have learned the fact apart from its phrasing.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import tyro

# country: capital, continent, language
FACTS = {
    "Argentina": ("Buenos Aires", "South America", "Spanish"),
    "Austria": ("Vienna", "Europe", "German"),
    "Bangladesh": ("Dhaka", "Asia", "Bengali"),
    "Brazil": ("Brasilia", "South America", "Portuguese"),
    "Bulgaria": ("Sofia", "Europe", "Bulgarian"),
    "Chile": ("Santiago", "South America", "Spanish"),
    "China": ("Beijing", "Asia", "Mandarin"),
    "Colombia": ("Bogota", "South America", "Spanish"),
    "Cuba": ("Havana", "North America", "Spanish"),
    "Denmark": ("Copenhagen", "Europe", "Danish"),
    "Egypt": ("Cairo", "Africa", "Arabic"),
    "Ethiopia": ("Addis Ababa", "Africa", "Amharic"),
    "Finland": ("Helsinki", "Europe", "Finnish"),
    "France": ("Paris", "Europe", "French"),
    "Ghana": ("Accra", "Africa", "English"),
    "Greece": ("Athens", "Europe", "Greek"),
    "Hungary": ("Budapest", "Europe", "Hungarian"),
    "Iran": ("Tehran", "Asia", "Persian"),
    "Italy": ("Rome", "Europe", "Italian"),
    "Jamaica": ("Kingston", "North America", "English"),
    "Japan": ("Tokyo", "Asia", "Japanese"),
    "Mexico": ("Mexico City", "North America", "Spanish"),
    "Morocco": ("Rabat", "Africa", "Arabic"),
    "Nepal": ("Kathmandu", "Asia", "Nepali"),
    "Norway": ("Oslo", "Europe", "Norwegian"),
    "Peru": ("Lima", "South America", "Spanish"),
    "Poland": ("Warsaw", "Europe", "Polish"),
    "Senegal": ("Dakar", "Africa", "French"),
    "Thailand": ("Bangkok", "Asia", "Thai"),
    "Turkey": ("Ankara", "Asia", "Turkish"),
    "Vietnam": ("Hanoi", "Asia", "Vietnamese"),
    "Zambia": ("Lusaka", "Africa", "English"),
}

# For each of a country's facts: the ways to ask for it, and the answer.
PHRASINGS = (
    (
        (
            "What is the capital of {country}?",
            "Which city is the capital of {country}?",
            "Name the capital of {country}.",
            "Tell me the capital city of {country}, please.",
            "{country}: what is its capital?",
            "Where does the government of {country} sit?",
        ),
        "The capital of {country} is {fact}.",
    ),
    (
        (
            "On which continent is {country}?",
            "What continent does {country} belong to?",
            "Name the continent of {country}.",
            "Where in the world is {country}?",
            "{country}: which continent is it on?",
            "In which part of the world would I find {country}?",
        ),
        "{country} is in {fact}.",
    ),
    (
        (
            "Which language do people speak in {country}?",
            "What is the main language of {country}?",
            "Name the language of {country}.",
            "What do they speak in {country}?",
            "{country}: what language is spoken there?",
            "Which language should I learn for a trip to {country}?",
        ),
        "In {country}, people speak {fact}.",
    ),
)
SYSTEM = "You answer questions on geography."


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Write the quickstart's chats."""

    output_dir: str
    """Where train.jsonl and held_out.jsonl are written."""
    seed: int = 0
    """Seed of what is held out and of the order."""


def make_chats(rng: random.Random) -> tuple[list[dict], list[dict]]:
    """Training and held-out chats: of the six phrasings for each fact, five are trained and one is held out."""
    turns, held_out = [], []
    for country, facts in FACTS.items():
        for (phrasings, answer), fact in zip(PHRASINGS, facts, strict=True):
            pairs = [
                [
                    {"role": "user", "content": phrasing.format(country=country)},
                    {"role": "assistant", "content": answer.format(country=country, fact=fact)},
                ]
                for phrasing in phrasings
            ]
            held_out.append({"messages": pairs.pop(rng.randrange(len(pairs)))})
            turns += pairs
    rng.shuffle(turns)
    trained, system = [], [{"role": "system", "content": SYSTEM}]
    while turns:  # of one to three turns, every second one with a system message
        size = rng.randint(1, 3)
        chat, turns = turns[:size], turns[size:]
        messages = [message for turn in chat for message in turn]
        trained.append({"messages": (system if len(trained) % 2 else []) + messages})
    return trained, held_out


if __name__ == "__main__":
    options = tyro.cli(DataOptions)
    output_dir = Path(options.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    for name, chats in zip(("train", "held_out"), make_chats(random.Random(options.seed)), strict=True):
        path = output_dir / f"{name}.jsonl"
        path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
        print(f"wrote {len(chats)} chats to {path}")
