"""ADR 1, by whose table an upgrade of the engines is checked, says what the code touches and where."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
ADR = ROOT / "docs/adr/0001-engines-unforked-through-their-extension-points.md"
SERVING = (
    "deployments",
    "router",
    "prefill_node",
    "decode_node",
    "engine_host",
    "kv_transfer",
    "sampling",
    "telemetry",
)
OURS = "_slackserve_"
"""How attributes of our own on foreign objects begin."""


class Row(NamedTuple):
    """What is touched, where, and all words of the names with what they are attributes of."""

    names: tuple[str, ...]
    files: tuple[str, ...]
    words: frozenset[str]


def rows() -> list[Row]:
    found = []
    for what, where in re.findall(r"^\| (.+?) \| (`.+?`) \| .+ \|$", ADR.read_text(), re.MULTILINE):
        codes = re.findall(r"`([^`]+)`", what)
        names = [name for code in codes for name in re.findall(r"[A-Za-z_]\w*$", code)]
        files = re.findall(r"`([^`]+)`", where)
        found.append(Row(tuple(names), tuple(files), frozenset(re.findall(r"\w+", " ".join(codes)))))
    return found


ROWS = rows()


def has(file: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", (ROOT / file).read_text()) is not None


def marked() -> list[tuple[str, str]]:
    """The private names of other objects, as ruff's rule has them marked, and where."""
    found = set()
    for folder in SERVING:
        for path in (ROOT / folder).rglob("*.py"):
            for line in path.read_text().splitlines():
                code, _, why = line.partition("# noqa:")
                if "SLF001" in why:
                    names = re.findall(r"(?<!self)\.(_[a-z]\w*)", code)
                    found |= {
                        (str(path.relative_to(ROOT)), name) for name in names if not name.startswith(OURS)
                    }
    return sorted(found)


def test_the_table_is_read_whole():
    table = [line for line in ADR.read_text().splitlines() if line.startswith("| ")]
    assert len(ROWS) == len(table) - 1


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.names[0])
def test_each_file_of_a_row_has_one_of_its_names(row):
    assert [file for file in row.files if not any(has(file, name) for name in row.names)] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.names[0])
def test_each_name_of_a_row_is_in_one_of_its_files(row):
    assert [name for name in row.names if not any(has(file, name) for file in row.files)] == []


def test_each_private_name_that_is_touched_has_a_row():
    known = {(file, word) for row in ROWS for file in row.files for word in row.words}
    assert [touched for touched in marked() if touched not in known] == []
