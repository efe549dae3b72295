"""A newcomer finds the place of a change from the tree: folders stay small, and a name means one class."""

import ast
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_FILES = 15


def modules():
    command = ["git", "ls-files", "-z", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    return [Path(name) for name in listed.stdout.split("\0") if name]


def test_no_folder_of_python_holds_more_than_fifteen_files():
    folders = Counter(path.parent for path in modules() if path.name != "__init__.py")
    assert {str(folder): count for folder, count in folders.items() if count > MOST_FILES} == {}


def test_no_public_class_name_occurs_twice():
    homes: dict[str, list[str]] = {}
    for path in modules():
        if path.parts[0] not in {"tests", "benchmarks"} and not path.stem.endswith("_grpc"):
            for node in ast.parse((ROOT / path).read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, []).append(str(path))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_every_decision_is_in_the_index():
    pages = sorted((ROOT / "docs/adr").glob("0*.md"))
    index = (ROOT / "docs/adr/README.md").read_text()
    titles = {page.name: page.read_text().splitlines()[0].partition(". ")[2] for page in pages}
    assert [name for name, title in titles.items() if f"({name}) | {title} |" not in index] == []
    assert [page.name for page in pages if "\nStatus: " not in page.read_text()] == []
