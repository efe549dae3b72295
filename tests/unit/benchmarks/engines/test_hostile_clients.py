"""What is kept of the tests that are hostile clients."""

from benchmarks.engines.hostile_clients import TESTS, measured

JUNIT = """<testsuites><testsuite>
<testcase name="test_a[3-1500]"><properties>
<property name="statuses" value="{400: 7, 200: 2, 'left': 1}"/><property name="grown" value="1.5"/>
<property name="at" value="2026-01-01T00:00:00"/></properties></testcase>
<testcase name="test_b"><failure message="no"/></testcase>
</testsuite></testsuites>"""


def test_a_test_is_kept_with_what_it_recorded(tmp_path):
    path = tmp_path / "junit.xml"
    path.write_text(JUNIT)
    assert measured(path) == {
        "test_a[3-1500]": {
            "passed": True,
            "statuses": {400: 7, 200: 2, "left": 1},
            "grown": 1.5,
            "at": "2026-01-01T00:00:00",
        },
        "test_b": {"passed": False},
    }


def test_the_tests_are_there(request):
    assert [name for name in TESTS if not (request.config.rootpath / name).is_file()] == []
