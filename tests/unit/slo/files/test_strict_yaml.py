import subprocess
import sys

import pytest

LIBRARY = "import lmformatenforcer.external.jsonschemaobjectutil"
OURS = "from slo.files.strict_yaml import parse_yaml"


@pytest.mark.parametrize("imports", [(LIBRARY, OURS), (OURS, LIBRARY)], ids=["before", "after"])
def test_a_library_that_has_its_process_read_dates_as_text_changes_no_file_of_ours(imports):
    script = (*imports, "print(parse_yaml('expires: 2026-06-30', 'a file', ValueError))")
    command = [sys.executable, "-c", "\n".join(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'expires': datetime.date(2026, 6, 30)}"
