"""The budget of lines, as benchmarks/code_statistics.py counts them. Its numbers are only ever lowered.

They leave few lines for what comes; beyond that a feature names what it replaces.
"""

from code_statistics import count_parts
from program import ROOT

BUDGET = {"program": 54_380, "JavaScript and CSS": 2_200, "tests": 45_745, "benchmarks": 10_900}


def test_a_part_grows_beyond_its_budget_of_lines():
    lines = count_parts(ROOT)
    over = {part: f"{lines[part]:,} of {most:,}" for part, most in BUDGET.items() if lines[part] > most}
    assert not over, f"lines over the budget: {over}"
