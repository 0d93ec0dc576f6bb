"""The mutants: lines of the program that are replaced one at a time, for the tests to notice.

mutants/ROOM.txt lists those of a room:

    file mini_trainer/run/step.py
    tests test_resume.py test_regularization.py::test_name

    mutant seed-without-rank: dropout would be the same on every rank
    -seed = derive_seed(options.data.seed, step, world.rank)
    +seed = derive_seed(options.data.seed, step, 0)

`file` and `tests` hold for what follows; `tests` after a mutant's lines are its own. Lines are whole, without the
indentation that the first one has; without a `+` the statement is left out. `equivalent REASON` ends a mutant that no
test can notice.
"""

import textwrap
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "mutants"


@dataclass
class Mutant:
    """A change of one place of a file, and the tests that are the nearest to it."""

    room: str
    name: str
    reason: str  # what would go wrong
    file: str
    tests: list[str]
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    equivalent: str = ""  # why no test can notice it

    def __str__(self) -> str:
        return f"{self.room}/{self.name}"

    def mutate(self, source: str) -> str:
        """The source with the lines replaced; ValueError unless they are there exactly once."""
        lines, num = source.split("\n"), len(self.old)
        wanted = textwrap.dedent("\n".join(self.old))
        found = [i for i in range(len(lines)) if textwrap.dedent("\n".join(lines[i : i + num])) == wanted]
        if len(found) != 1 or not num:
            raise ValueError(f"{self}: its lines are {len(found)} times in {self.file}")
        indent = lines[found[0]][: -len(lines[found[0]].lstrip())]
        new = textwrap.indent("\n".join(self.new or ["pass"]), indent)
        return "\n".join([*lines[: found[0]], new, *lines[found[0] + num :]])


def read_mutants() -> list[Mutant]:
    """All, room by room; ValueError with file and line for a word that is none of the form's."""
    return [mutant for path in sorted(FOLDER.glob("*.txt")) for mutant in read_room(path)]


def read_room(path: Path) -> list[Mutant]:
    """The mutants of one room."""
    found, file, tests, mutant = [], "", [], None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        word, _, rest = line.partition(" ")
        if word == "file":
            file, mutant = rest, None
        elif word == "tests" and mutant is None:
            tests = rest.split()
        elif word == "mutant":
            name, _, reason = rest.partition(": ")
            mutant = Mutant(path.stem, name, reason, file, tests)
            found.append(mutant)
        elif mutant is not None and word == "tests":
            mutant.tests = rest.split()
        elif mutant is not None and word == "equivalent":
            mutant.equivalent = rest
        elif mutant is not None and line[:1] in ("-", "+"):
            (mutant.old if line[0] == "-" else mutant.new).append(line[1:])
        elif line:
            raise ValueError(f"{path}:{number}: {line}")
    return found
