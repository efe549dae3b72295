"""A newcomer finds the place of a change from the tree: folders stay small, and a name means one class."""

import ast
import subprocess
from collections import Counter, defaultdict
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


def test_a_test_of_one_module_lies_where_that_lies():
    """Folders of tests that no folder of code has are of one module, or of a matter."""
    folders, homes = {path.parent for path in modules()}, defaultdict(set)
    for path in modules():
        homes[path.parts[0], path.stem].add(path.parent)
    misplaced = {}
    for path in modules():
        if path.parts[:2] == ("tests", "unit") and path.name.startswith("test_"):
            folder = path.parent.relative_to("tests/unit")
            of_module = homes.get((path.parts[2], path.stem.removeprefix("test_")), set())
            if folder in folders and len(of_module) == 1 and folder not in of_module:
                misplaced[str(path)] = str(*of_module)
    assert misplaced == {}


def test_every_decision_is_in_the_index():
    pages = sorted((ROOT / "docs/adr").glob("0*.md"))
    index = (ROOT / "docs/adr/README.md").read_text()
    titles = {page.name: page.read_text().splitlines()[0].partition(". ")[2] for page in pages}
    assert [name for name, title in titles.items() if f"({name}) | {title} |" not in index] == []
    assert [page.name for page in pages if "\nStatus: " not in page.read_text()] == []
