"""What is shown of samples: all of it, what is trained made visible, and nothing that the data could make happen."""

import base64
import hashlib
import html.parser
import json
import re
import sys
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from made_pages import make_sample, make_totals

from mini_trainer.data.columns.base import IGNORED, DataTask
from mini_trainer.data.rows.report import MAX_REASON_KINDS, Totals
from mini_trainer.use.pages.preview import (
    COLOURS,
    NUM_BINS,
    RESET,
    Segment,
    fold,
    format_sample,
    print_samples,
    split_segments,
    write_page,
)

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!-- $SCRIPT$ & \u2028 \x1b[31m \u202e"


@given(question=st.text(min_size=1), answer=st.text(min_size=1))
def test_segments_are_the_sample_and_say_what_is_trained(tokenizer, question, answer):
    sample = make_sample(tokenizer, f"a{question}a", f"b{answer}b")
    segments = split_segments(sample.tokens, tokenizer)
    assert "".join(segment.text for segment in segments) == tokenizer.decode(sample.tokens.input_ids)
    trained = "".join(segment.text for segment in segments if segment.is_trained)
    assert trained == tokenizer.decode([label for label in sample.tokens.labels if label != IGNORED])
    special = [segment.text for segment in segments if segment.is_special]
    assert {"<|im_start|>", "<|im_end|>"} <= set(special)


def test_a_sample_without_and_with_colours(tokenizer, capsys, monkeypatch):
    sample = make_sample(tokenizer, "How many?", "42 \x1b[2J\u202e")
    (plain, colours) = (
        format_sample(split_segments(sample.tokens, tokenizer), mask=None, in_colour=in_colour)
        for in_colour in (False, True)
    )
    start = "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    assert plain == start + "[[42 \\x1b[2J\\u202e<|im_end|>]]\n"
    stop = f"{COLOURS[True, True]}<|im_end|>{RESET}"
    masked, trained = COLOURS[False, False], COLOURS[True, False]
    assert colours.endswith(f"{masked}assistant\n{RESET}{trained}42 \\x1b[2J\\u202e{RESET}{stop}{masked}\n{RESET}")
    assert len(set(COLOURS.values())) == 4
    masked = format_sample(split_segments(sample.tokens, tokenizer), mask="<|MASK|>", in_colour=False)
    assert masked == "<|MASK|>42 \\x1b[2J\\u202e<|im_end|><|MASK|>"
    weighted = make_sample(tokenizer, "How?", "42", weight=0.25)
    shown = format_sample(split_segments(weighted.tokens, tokenizer), mask="", in_colour=False)
    assert shown == "(weight 0.25) 42<|im_end|>"
    print_samples([sample], tokenizer, mask=None)
    said = f"\n--- in.jsonl:1: {len(sample.tokens.labels)} tokens, 10 trained\n{plain}\n"
    assert capsys.readouterr().out == f"\nlegend: [[trained]] not trained\n{said}"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for no_color, shown in {"": colours, "1": plain}.items():
        monkeypatch.setenv("NO_COLOR", no_color)
        print_samples([sample], tokenizer, mask=None)
        assert capsys.readouterr().out.endswith(f"{shown}\n")


def test_long_texts_are_folded():
    assert fold("abc" * 100, 300) == "abc" * 100
    folded = fold("a" * 1000 + "b" * 9000, 600)
    assert folded == "a" * 400 + " … (9,400 characters) … " + "b" * 200
    shown = format_sample([Segment("a" * 9000, True, False, None)], mask=None, in_colour=False)
    assert len(shown) < 900 and shown.startswith("[[aaa") and "characters)" in shown


class PageParser(html.parser.HTMLParser):
    """Collects what a browser would see."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.scripts: list[str] = []
        self.text = ""
        self.policy = ""
        self.inside = ""

    def handle_starttag(self, tag, attributes):
        self.tags[tag], self.inside = self.tags[tag] + 1, tag
        if dict(attributes).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attributes)["content"]
        assert not {"src", "href", "onerror", "onclick"} & {name for name, _ in attributes}

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts.append(data)
        elif self.inside != "style":
            self.text += data


def parse_page(tmp_path, totals: Totals, tokenizer, title: str = "in.jsonl") -> tuple[PageParser, list[dict]]:
    write_page(tmp_path / "page.html", totals, DataTask(), tokenizer=tokenizer, title=title)
    parser = PageParser()
    parser.feed((tmp_path / "page.html").read_text())
    return parser, json.loads(parser.scripts[0])


def test_the_page_shows_the_report_and_every_sample(tokenizer, tmp_path):
    samples = [make_sample(tokenizer, f"How many are {i}?", "42 " * i + "1", place=f"in.jsonl:{i}") for i in range(40)]
    totals = make_totals(samples, too_long=3, invalid=2)
    totals.add_invalid("message 1 has the role 'wizard'")
    totals.add_invalid("message 27 has the role 'cat'")
    parser, shown = parse_page(tmp_path, totals, tokenizer)
    assert [sample["place"] for sample in shown] == [sample.place for sample in samples]
    for sample, there in zip(samples, shown, strict=True):
        assert "".join(part[0] for part in there["sides"][0]["parts"]) == tokenizer.decode(sample.tokens.input_ids)
        trained = "".join(part[0] for part in there["sides"][0]["parts"] if part[1])
        assert trained == tokenizer.decode([label for label in sample.tokens.labels if label != IGNORED])
        assert there["summary"] == sample.tokens.summary
    text = " ".join(parser.text.split())
    for words in ("dropped: too long 3", "trained: assistant", "2 message … has the role …", "rows 45"):
        assert words.replace(" ", "") in text.replace(" ", ""), words
    assert 1 < parser.tags["rect"] <= NUM_BINS


def test_nothing_in_the_data_becomes_a_part_of_the_page(tokenizer, tmp_path):
    calm, _ = parse_page(tmp_path, make_totals([make_sample(tokenizer, "How?", "42")], invalid=1), tokenizer)
    totals = make_totals([make_sample(tokenizer, HOSTILE, HOSTILE, place=HOSTILE)], invalid=1)
    totals.trained_by_role = Counter({HOSTILE: 1})
    totals.reasons[HOSTILE] += 1
    parser, shown = parse_page(tmp_path, totals, tokenizer, title=HOSTILE)
    assert "".join(part[0] for part in shown[0]["sides"][0]["parts"]).count(HOSTILE) == 2
    assert parser.tags - calm.tags == Counter({"h3": 1, "table": 1, "tr": 1, "td": 2})  # of the reason
    assert len(parser.scripts) == 2
    digest = base64.b64encode(hashlib.sha256(parser.scripts[1].encode()).digest()).decode()
    assert parser.policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r"https?:|url\(|@import|innerHTML|eval\(", page)


def test_a_huge_sample_and_many_reasons_stay_bounded(tokenizer, tmp_path):
    totals = make_totals([make_sample(tokenizer, "How many? " * 30_000, "42")], invalid=1)
    for i in range(5000):
        totals.add_invalid("x" * (i % 97) + "yz" * i)
    assert len(totals.reasons) <= MAX_REASON_KINDS + 1 and totals.reasons.total() == 5000
    _, shown = parse_page(tmp_path, totals, tokenizer)
    text = "".join(part[0] for part in shown[0]["sides"][0]["parts"])
    assert len(text) < 9_000 and "characters)" in text and text.endswith("42<|im_end|>\n")
