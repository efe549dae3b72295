"""Files of requests."""

import json
import os
from pathlib import Path

import pytest

from deployments.batch import BatchError
from deployments.batch.requests import open_requests, read_requests


def line(**changed):
    given = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny"}}
    return json.dumps({key: value for key, value in (given | changed).items() if value is not None})


def read(tmp_path, *lines, models=("tiny",)):
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(lines))
    with open_requests(path) as file:
        return [(each, each.body(file)) for each in read_requests(file, models)]


def test_a_body_is_sent_as_it_stands(tmp_path):
    body = '{"model":  "tiny", "temperature": 1e-1, "x": 12345678901234567890}'
    ((request, sent),) = read(
        tmp_path, '{"custom_id": "a", "url": "/v1/chat/completions", "body": ' + body + "}"
    )
    assert sent == body.encode()
    assert (request.custom_id, request.path) == ("a", "/chat/completions")


@pytest.mark.parametrize(
    ("given", "names"),
    [({}, False), *(({"service_tier": tier}, tier == "default") for tier in (None, "auto", "default"))],
)
def test_only_a_tier_that_can_contradict_the_batchs_is_one_of_its_own(tmp_path, given, names):
    ((request, _),) = read(tmp_path, line(body={"model": "tiny"} | given))
    assert request.names_tier is names


def test_empty_lines_and_the_last_line_break_do_not_count(tmp_path):
    found = read(tmp_path, line(), "", "  ", line(custom_id="b", body={"model": "tiny", "n": 2}))
    assert [(request.custom_id, json.loads(body)) for request, body in found] == [
        ("a", {"model": "tiny"}),
        ("b", {"model": "tiny", "n": 2}),
    ]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["{"], "line 1: Input data was truncated"),
        ([line(), '{"custom_id": 3}'], "line 2: Expected `str`, got `int` - at `$.custom_id`"),
        ([line(custom_id=None)], "line 1: Object missing required field `custom_id`"),
        ([line(body=None)], "line 1: Object missing required field `body`"),
        ([line(body=[1])], "line 1: Expected `object`, got `array`"),
        ([line(method="GET")], "line 1: method: 'GET' is not POST"),
        ([line(url="v1/completions")], "line 1: url: 'v1/completions' is no path of the API"),
        ([line(url="/v1/")], "line 1: url: '/v1/' is no path of the API"),
        ([line(body={"stream": True})], "line 1: body.stream: an answer is written as a whole; leave it out"),
        ([line(body={"model": "tinny"})], "line 1: body.model: 'tinny' is not served there; it serves tiny"),
        ([line(), "", line()], "line 3: custom_id: 'a' is that of line 1, too"),
        (["", " "], "has no request; give one in each line"),
    ],
)
def test_what_cannot_be_sent_is_refused_with_its_line(tmp_path, lines, said):
    with pytest.raises(BatchError) as refused:
        read(tmp_path, *lines)
    assert said in str(refused.value)
    assert str(tmp_path / "requests.jsonl") in str(refused.value)


def test_any_model_will_do_where_the_server_names_none(tmp_path):
    assert read(tmp_path, line(body={"model": "other"}), models=None)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(BatchError, match="No such file"):
        open_requests(tmp_path / "none.jsonl")
    read_end, write_end = os.pipe()
    with pytest.raises(BatchError, match="which a pipe cannot be"):
        open_requests(Path(f"/dev/fd/{read_end}"))
    os.close(read_end)
    os.close(write_end)


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text(line())
    with open_requests(path) as file:
        (request,) = read_requests(file, None)
        path.write_text(line(body={"model": "tino"}))
        with pytest.raises(BatchError, match="has changed while it was read"):
            request.body(file)
