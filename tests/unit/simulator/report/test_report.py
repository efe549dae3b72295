"""The page and its files: complete, self-contained, and safe with any name."""

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from synthetic_findings import ARMS, arm, findings

from simulator.report.page import html, write_report
from simulator.report.plots import capacity_plot, granularity_plot, plots, save

POINTS = [
    ("every layer", 0.5, 1.2, 4.1),
    ("every 8 layers", 3.6, 7.6, 0.7),
    ("whole pass", 160.0, 900.0, 0.0),
]
PLAN = [(count, 1 - 0.5**count, {"premium": 1 - 0.4**count}) for count in range(1, 8)]
NASTY = "<script>alert('&')</script> $x_1$ _y"


class Page(HTMLParser):
    """What a browser would show, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in {"src", "srcset", "href"}]

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(html(findings(), [granularity_plot(POINTS), capacity_plot(PLAN, 0.95, 5)]))


@pytest.mark.slow
def test_each_plot_becomes_a_readable_png_and_svg(tmp_path):
    made = findings(["fcfs", "slackserve"])
    paths = save(made, tmp_path / "new", [granularity_plot(POINTS), capacity_plot(PLAN, 0.95)])
    names = ["goodput", "attainment", "ttft", "timeline", "blocking", "granularity", "capacity"]
    assert [path.name for path in paths] == [f"{name}.{end}" for name in names for end in ("png", "svg")]
    for path in paths:
        if path.suffix == ".svg":
            assert ET.parse(path).getroot().tag.endswith("svg")
        else:
            assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.slow
def test_the_same_findings_give_the_same_bytes(tmp_path):
    made = findings(["slackserve"])
    first, second = (save(made, tmp_path / name) for name in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_the_page_is_one_file_that_loads_nothing(tmp_path):
    path = write_report(findings(["fcfs", "slackserve"]), tmp_path)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert path.name == "report.html"
    assert page.addresses
    assert all(address.startswith("data:image/svg+xml;base64,") for address in page.addresses)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert not re.search(r"https?:|url\(|@import", text)


def test_pictures_in_the_page_load_nothing_either(page):
    for address in page.addresses:
        root = ET.fromstring(base64.b64decode(address.split(",", 1)[1]))
        links = [
            value for node in root.iter() for name, value in node.attrib.items() if name.endswith("href")
        ]
        assert all(link.startswith("#") for link in links)


def test_the_page_has_every_arm_and_its_numbers(page):
    for title, at_90, at_99, blocking in ARMS.values():
        assert title in page.text
        assert f"{at_90:.2f}/s" in page.text
        assert f"{at_99:.2f}/s" in page.text
        if blocking is not None:
            assert f"{blocking[3]:g} ms" in page.text


def test_the_page_says_what_it_rests_on_and_how_to_do_it_again(page):
    made = findings()
    for text in (made.title, made.description, made.command, *made.assumptions, "Seed 7", "10,000"):
        assert " ".join(text.split()) in page.text


def test_narrow_and_wide_pictures_for_each_plot(page):
    assert page.tags.count("img") == page.tags.count("source") == 7


def test_names_are_text_and_never_markup():
    made = findings(
        title=NASTY,
        description=NASTY,
        assumptions=[NASTY],
        command=NASTY,
        preset=NASTY,
        objective_ms={NASTY: 100.0},
        arms=[
            replace(
                arm("slackserve", title=NASTY, ttft_ms={NASTY: [1.0, 2.0, 3.0]}),
                points=[
                    replace(point, by_kind={NASTY: 0.5}, setting={NASTY: 1.0}) for point in arm("fcfs").points
                ],
                timeline=[replace(life, kind=NASTY) for life in arm("fcfs").timeline],
            )
        ],
    )
    page = Page(html(made))
    assert "script" not in page.tags
    assert page.text.count("<script>alert('&')</script> $x_1$ _y") > 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "absent"),
    [
        ({"blocking": None}, {"blocking"}),
        ({}, set()),
        ({"ttft_ms": {}}, {"ttft"}),
        ({"points": ()}, {"attainment"}),
        ({"goodput_rps": {}}, {"goodput"}),
        ({"goodput_rps": {"0.90": 0.0, "0.99": 0.0}}, set()),
        ({"ttft_ms": {"chat": [], "code": [5.0], "odd": [0.0, 10.0, float("inf")]}}, set()),
    ],
)
def test_what_is_missing_is_left_out(changes, absent):
    made = findings([arm("slackserve", **{"timeline": (), **changes})])
    absent = {*absent, "timeline"}
    assert {plot.name for plot in plots(made)} == {
        "goodput",
        "attainment",
        "ttft",
        "timeline",
        "blocking",
    } - absent
    assert not re.search(r"\b(nan|inf|None|Undefined)\b", Page(html(made)).text)


def test_a_comparison_without_arms_or_assumptions_is_a_page():
    assert "Nothing was compared." in Page(html(findings([], assumptions=[]))).text


def test_arms_that_nobody_knows_and_kinds_without_objective():
    made = findings([arm(f"other-{number}", timeline=()) for number in range(6)], objective_ms={"chat": None})
    page = Page(html(made))
    assert all(item.title in page.text for item in made.arms)


def test_results_can_be_written_as_json():
    assert json.loads(json.dumps(findings().document()))["goodput_rps"]["slackserve"]["0.90"] == 5.1
