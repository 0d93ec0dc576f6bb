"""Small inputs of other people that once failed: what should happen to each, and what process_data.py does with it.

    OMP_NUM_THREADS=1 python benchmarks/strangers_cases.py CASES
    OMP_NUM_THREADS=1 python benchmarks/strangers_cases.py CASES --only 20 --show

CASES is a folder of files and folders of rows, with EXPECTATIONS.tsv: a name, a tab, and what is right. Prints `pass`
or `FAIL` where a check below can tell, and `look` where a person has to. Cases of tool calls are also tried with every
template of the tests.
"""

import argparse
import contextlib
import csv
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "quickstart")]
from make_tiny_model import train_tokenizer
from stock_templates import TEMPLATES, make_tokenizer
from trait_templates import TRAITS

from chat.labels import IGNORED
from chat.masking import ChatMasker
from corpus.formats import parse_row, read_example
from options import ProcessDataOptions, group_options
from process_data import process_data

TEMPLATE, _ = TRAITS["content that may not be null"]  # ChatML that writes tools and calls as JSON
VOCAB_SIZE = 2000  # so many that answers merge with spaces before them, as they do in real vocabularies
FORMATS = {"26": "preference"}  # of cases whose format is not detected
CALLS = ("17", "20")  # cases that are tried with every template


@dataclass
class Outcome:
    """What happened to a case."""

    error: str | None = None
    report: str = ""
    trained: list[list[str]] = field(default_factory=list)  # the trained stretches of each sample
    samples: list[dict] = field(default_factory=list)
    refused_by: list[str] = field(default_factory=list)  # templates that refuse what they take in the reference
    wrong_with: list[str] = field(default_factory=list)  # templates that train other tokens than in the reference

    @property
    def notes(self) -> list[str]:
        return [line.removeprefix("note: ") for line in self.report.splitlines() if line.startswith("note: ")]

    @property
    def text(self) -> str:
        return "\n".join(text for texts in self.trained for text in texts)

    def is_told(self, *words: str) -> bool:
        """Whether the error, or a note, has all of the words."""
        said = [self.error or "", *self.notes]
        return any(all(word in one for word in words) for one in said)


def check_answers(outcome: Outcome, *answers: str) -> bool:
    """Whether each answer is trained whole, or the case is refused or noted."""
    if outcome.error is not None:
        return True
    return bool(outcome.notes) or all(
        any(answer in text for text in texts) for answer, texts in zip(answers, outcome.trained, strict=True)
    )


def check_same(outcome: Outcome) -> bool:
    return outcome.error is None and not outcome.refused_by and not outcome.wrong_with


Check = Callable[[Outcome], bool]
CHECKS: dict[str, Check] = {
    "01": lambda o: check_answers(o, "Lima", "Paris", "yes"),
    "05": lambda o: len(o.samples) == 6 or o.is_told(".ndjson"),
    "06": lambda o: o.is_told("LICENSE.txt") and not any("licence" in text.lower() for text in o.text.splitlines()),
    "07": lambda o: o.error is not None or '{"city": "Lima", "unit": "C"}' in o.text,
    "08": lambda o: o.error is not None or ("null" not in o.text and '{"city": "Lima"}' in o.text),
    "12b": lambda o: o.error is not None and "price" in o.error,
    "13": lambda o: len(o.samples) == 6 or o.is_told("JSON text"),
    "15": lambda o: o.error is not None and "'data'" in o.error and len(o.error.splitlines()) == 1,
    "16": lambda o: len(o.samples) == 6 or o.is_told("byte-order mark"),
    "17": lambda o: check_same(o) and not any("does not write the key" in note for note in o.notes),
    "20": check_same,
    "24": lambda o: o.error is not None or (o.is_told("'nan'") and o.is_told("'None'") and "None" in o.text),
    "26": lambda o: (o.error is not None and "space" in o.error) or all(said in o.text for said in ("Lima", "Quito")),
    "32": lambda o: "--ignore-columns chat_template_kwargs" not in (o.error or ""),
    "33b": lambda o: o.is_told("null", "arguments"),
    "34": lambda o: len(o.samples) == 2 and '{"t": 5, "u": [1]}' in o.text,
    "60": lambda o: check_answers(o, "Hi.", "\n\nHi.", "51"),
    "39": lambda o: [len(texts) for texts in o.trained] == [1] and o.text.startswith("Hello"),
}  # fmt: skip


def process(case: Path, model: Path, tokenizer: object, expectation: str) -> Outcome:
    """Runs process_data on a case, with its report and samples."""
    number, output = case.name.partition("_")[0], model / "out.jsonl"
    name = "input_dataset" if "--input-dataset" in expectation and case.is_dir() else "input_file"
    given = {name: str(case), "output_file": str(output), "model_name_or_path": str(model), "num_proc": 1, "preview": 0}
    given |= {"format": FORMATS[number]} if number in FORMATS else {}
    given |= {"skip_invalid": True} if number == "24" else {}  # one of its cells is empty
    said, outcome = io.StringIO(), Outcome()
    try:
        with contextlib.redirect_stdout(said):
            process_data(group_options(ProcessDataOptions, **given))
    except ValueError as error:
        outcome.error = str(error).replace(str(case), "CASE").replace(case.name, "CASE")
    else:
        outcome.samples = [json.loads(line) for line in output.read_text().splitlines()]
        outcome.trained = [list(decode_trained(sample, tokenizer)) for sample in outcome.samples]
    outcome.report = said.getvalue()
    return outcome


def decode_trained(sample: dict, tokenizer: object) -> Iterator[str]:
    pairs = zip(sample["input_ids"], sample["labels"], strict=True)
    for is_trained, stretch in groupby(pairs, key=lambda pair: pair[1] != IGNORED):
        if is_trained:
            yield tokenizer.decode([token for token, _ in stretch])


def compare_templates(case: Path, reference: list[bytes], outcome: Outcome) -> None:
    """Masks a case's rows with every template, and the rows of its reference, which should give the same."""
    for name, (template, stops) in TEMPLATES.items():
        tokenizer = make_tokenizer(template, stops)
        masker = ChatMasker(tokenizer, stop_token_ids=tokenizer.convert_tokens_to_ids(list(stops)))
        rows = [parse_row(line, "json") for line in (*case.read_bytes().splitlines(), *reference)]
        masked = masker.mask([read_example(row, "messages", is_given=False) for row in rows])
        found, expected = masked[: len(rows) - len(reference)], masked[len(rows) - len(reference) :]
        if any(isinstance(one, ValueError) for one in expected):
            continue
        if any(isinstance(one, ValueError) for one in found):
            outcome.refused_by.append(name)
        elif found != expected:
            outcome.wrong_with.append(name)


def find_reference(case: Path, folder: Path) -> list[bytes]:
    """The lines that a case of calls should train the same tokens as."""
    if case.name.startswith("20"):
        return (folder / "20_arguments_dict.jsonl").read_bytes().splitlines()
    rows = [json.loads(line) for line in case.read_bytes().splitlines()]
    bare = [[{key: message[key] for key in ("role", "content")} for message in row["messages"]] for row in rows]
    return [json.dumps({"messages": messages}).encode() for messages in bare]


def read_expectations(folder: Path) -> dict[str, str]:
    with open(folder / "EXPECTATIONS.tsv", newline="") as file:
        return {row[0]: row[1] for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if len(row) > 1}


def find_expectation(case: Path, expectations: dict[str, str]) -> str:
    """What is said of the case by its name, or of one that has its number and a letter."""
    number = case.name.partition("_")[0]
    others = [text for name, text in expectations.items() if f"{number}_" in name]
    return expectations.get(case.name, others[0] if others else "(nothing)")


def read_texts(folder: Path) -> list[str]:
    """Texts to train the tokenizer on: the answers with the words before them, often enough to merge."""
    words = "Question Answer : Lima Paris yes capital Peru France Quito Hello Hi. weather None nan 51"
    return [words, *(path.read_text(errors="replace") for path in sorted(folder.glob("*.jsonl")))] * 5


def judge(number: str, outcome: Outcome) -> str:
    return "look" if number not in CHECKS else "pass" if CHECKS[number](outcome) else "FAIL"


def describe(outcome: Outcome, *, shows: bool) -> str:
    lines = [f"refused: {outcome.error}" if outcome.error is not None else f"kept {len(outcome.samples)}"]
    lines += [f"note: {note}" for note in outcome.notes]
    for what, names in (("refused with", outcome.refused_by), ("other tokens with", outcome.wrong_with)):
        lines += [f"{what} {len(names)} templates: {', '.join(names)}"] if names else []
    trained = outcome.trained if shows else outcome.trained[:3]
    lines += [f"trained: {' … '.join(map(repr, texts))}" for texts in trained]
    return "\n".join("      " + (line if shows else line[:300]) for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path, help="the folder of cases, with EXPECTATIONS.tsv")
    parser.add_argument("--only", help="cases whose names begin so")
    parser.add_argument("--show", action="store_true", help="all of what is trained, and of what is said")
    options = parser.parse_args()
    expectations, counts = read_expectations(options.cases), {"pass": 0, "FAIL": 0, "look": 0}
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary)
        tokenizer = train_tokenizer(read_texts(options.cases), vocab_size=VOCAB_SIZE, chat_template=TEMPLATE)
        tokenizer.save_pretrained(model)
        for case in sorted(options.cases.iterdir()):
            number = case.name.partition("_")[0]
            if case.name == "EXPECTATIONS.tsv" or not case.name.startswith(options.only or ""):
                continue
            expected = find_expectation(case, expectations)
            outcome = process(case, model, tokenizer, expected)
            if number in CALLS:
                compare_templates(case, find_reference(case, options.cases), outcome)
            verdict = judge(number, outcome)
            counts[verdict] += 1
            print(f"{verdict}  {case.name}: {expected}\n{describe(outcome, shows=options.show)}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    sys.exit(counts["FAIL"] > 0)


if __name__ == "__main__":
    main()
