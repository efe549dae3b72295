"""Keys that are given twice, and values that are not of the kind that they have to be, are refused."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from slo.files.strict_yaml import Address, parse_yaml, read_yaml

LIBRARY = "import lmformatenforcer.external.jsonschemaobjectutil"
OURS = "from slo.files.strict_yaml import parse_yaml"


@pytest.mark.parametrize("imports", [(LIBRARY, OURS), (OURS, LIBRARY)], ids=["before", "after"])
def test_a_library_that_has_its_process_read_dates_as_text_changes_no_file_of_ours(imports):
    script = (*imports, "print(parse_yaml('expires: 2026-06-30', 'a file', ValueError))")
    command = [sys.executable, "-c", "\n".join(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'expires': datetime.date(2026, 6, 30)}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 1\nhost: a\nport: 2\n", "line 3: the key 'port' is given twice, first in line 1"),
        ("a: {b: 1, 'b': 2}\n", "line 1: the key 'b' is given twice, first in line 1"),
        ("- {}\n- c:\n  - d: 1\n    e: 1\n    d: 1\n", "line 5: the key 'd' is given twice, first in line 3"),
        ("models:\n  1: a\n  1: b\n", "line 3: the key '1' is given twice, first in line 2"),
    ],
)
def test_a_key_that_is_given_twice_is_refused_with_both_lines(text, message):
    with pytest.raises(LookupError, match=f"^a file: {message}; leave out one$"):
        parse_yaml(text, "a file", LookupError)


@pytest.mark.parametrize("is_quoted", [True, False])
@pytest.mark.parametrize("value", ["!!bool maybe", "!!timestamp soon", "!!int few"])
def test_a_value_that_is_none_of_the_tag_that_it_has_is_refused(value, is_quoted):
    with pytest.raises(LookupError, match=r"^a file: is not YAML: ") as refused:
        parse_yaml(f"a: 1\nport: {value}\n", "a file", LookupError, is_quoted=is_quoted)
    assert is_quoted or value.split()[1] not in str(refused.value)


def test_what_a_merge_key_brings_along_may_be_given_again():
    text = """
base: &base {a: 1, b: 2}
more: &more
  <<: *base
  a: 3
once: {<<: *more, b: 4}
both: {<<: [*base, *more], c: 5}
twice:
  <<: *base
  <<: *more
again: {<<: *more, a: 6}
"""
    assert parse_yaml(text, "a file", ValueError) == {
        "base": {"a": 1, "b": 2},
        "more": {"a": 3, "b": 2},
        "once": {"a": 3, "b": 4},
        "both": {"a": 1, "b": 2, "c": 5},
        "twice": {"a": 3, "b": 2},
        "again": {"a": 6, "b": 2},
    }


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "0.0.0.0",
        "127.1",
        "::",
        "::1",
        "fe80::1%eth0",
        "::ffff:10.0.0.1",
        "localhost",
        "my_service.ns",
        "head.default.svc.cluster.local.",
        "x" * 63,
        "ü.de",
    ],
)
def test_an_address_of_either_family_and_a_name_are_taken(address):
    assert TypeAdapter(Address).validate_python(address) == address


@pytest.mark.parametrize(
    "text",
    [
        "[::1]",
        "[::1]:9465",
        "[head",
        "127.0.0.1:9465",
        "head:9465",
        "http://head",
        "head/",
        "head\0",
        "::1::",
    ],
)
def test_an_address_with_a_port_brackets_or_a_scheme_is_refused(text):
    with pytest.raises(ValidationError, match="is neither an address nor a name"):
        TypeAdapter(Address).validate_python(text)


@pytest.mark.parametrize("path", ["a\0b", "\ud800"])
def test_a_path_that_no_system_takes_is_refused(path):
    with pytest.raises(LookupError, match=r"^'.*': is no path: ") as refused:
        read_yaml(Path(path), LookupError)
    assert str(refused.value).isprintable()
