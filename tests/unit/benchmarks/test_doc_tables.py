"""The documentation says what was measured."""

import json

import pytest

from benchmarks import report
from benchmarks.doc_tables import PAGES, TABLES, remade
from benchmarks.report import RESULTS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_results(page):
    text = page.read_text()
    assert remade(text) == text, "python -m benchmarks.doc_tables"


def test_every_table_stands_somewhere():
    text = "".join(page.read_text() for page in PAGES)
    assert [name for name in TABLES if f"<!-- table: {name} -->" not in text] == []


def test_another_result_is_another_table(monkeypatch, tmp_path):
    name = "held-out-90"
    results = json.loads((RESULTS / "cores" / "held_out.json").read_text())
    page = f"<!-- table: {name} -->\n<!-- end of table -->"
    before = remade(page)
    results["results"]["rows"][0]["goodput_rps"] += 1.0
    (tmp_path / "cores").mkdir()
    (tmp_path / "cores" / "held_out.json").write_text(json.dumps(results))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert remade(before) != before
