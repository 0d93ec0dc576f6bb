"""Invented rows in the format of TRACE's files: folders of tasks with train.json, eval.json and test.json."""

import json
from pathlib import Path

ROWS = {
    "C-STANCE": ("选择一项：A.支持，B.反对，C.中立。\n文本：火车{n}很快\n对象：火车\n态度：", "A"),
    "FOMC": ("Which stance? A. dovish, B. hawkish, C. neutral.\nText: rates rise by {n}\nStance: ", "B"),
    "MeetingBank": ("Summarise the meeting.\nThe clerk reads bill {n}. All agree.\nSummary: ", "Bill {n} is passed."),
    "Py150": ("<s> import os <EOL> x = <NUM_LIT:{n}> <EOL>", "print ( x )"),
    "ScienceQA": ("Answer, then give your reasons.\n\nIs {n} odd? (A) yes (B) no\nAnswer: ", "A\nIt leaves 1."),
    "NumGLUE-cm": ("Solve the problem.\nA bus has {n} wheels, how many have 2?\nAnswer: ", "{n}"),
    "NumGLUE-ds": ("Solve the problem.\nWhat is {n} plus 0?\nAnswer: ", "{n}.0"),
    "20Minuten": ("Vereinfache den Absatz.\n\nDie {n} Gemeinden beschlossen den Erlass.\n", "{n} Orte sind dafür."),
}


def write_trace(folder: Path, *, num_rows: int = 3) -> Path:
    """Writes all tasks' folders with this many rows in each file."""
    for number, (name, (prompt, answer)) in enumerate(ROWS.items()):
        (folder / name).mkdir(parents=True)
        for start, split in enumerate(("train", "eval", "test")):
            numbers = range(100 * number + 10 * start, 100 * number + 10 * start + num_rows)
            rows = [{"prompt": prompt.replace("{n}", str(n)), "answer": answer.replace("{n}", str(n))} for n in numbers]
            (folder / name / f"{split}.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    return folder
