"""What docs/deploying.md says of production names what it has to."""

import configparser
import re
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
DEPLOYING = (DOCS / "deploying.md").read_text()


def test_the_unit_goes_on_when_one_process_is_killed_for_memory():
    (text,) = re.findall(r"```ini\n(.*?)```", DEPLOYING, re.DOTALL)
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read_string(text)
    assert unit["Service"]["OOMPolicy"] == "continue"


def test_variables_without_which_logs_fill_the_disk_are_among_those_to_set():
    (row,) = [line for line in (DOCS / "logs.md").read_text().splitlines() if "as large as the disk" in line]
    table = DEPLOYING.split("\n## In production\n")[1].split("\n\n")[0]
    rotating = re.findall(r"`(RAY_\w+)`", row)
    assert rotating
    assert [name for name in rotating if f"`{name}`" not in table] == []
