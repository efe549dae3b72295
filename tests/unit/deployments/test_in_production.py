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
