"""`slackserve batch` and a real HTTP server."""

import asyncio
import json
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web
from answering_server import AnsweringServer, said
from typer.testing import CliRunner
from waiting import assert_soon

from deployments.batch import BatchError
from deployments.cli import app
from deployments.client import Connection


@pytest.fixture
def files(tmp_path):
    """A file of requests, and where answers go; `ask` runs the command in this process."""

    class Files:
        requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
        failed = tmp_path / "answers.failed.jsonl"

        def write(self, names, **changed):
            body = {"model": "tiny", "prompt": "x"} | changed
            lines = [
                {"custom_id": name, "url": "/v1/completions", "body": body | {"user": name}} for name in names
            ]
            self.requests.write_text("".join(json.dumps(line) + "\n" for line in lines))

        def ask(self, server, *options):
            given = ["batch", str(self.requests), "-o", str(self.answers), "--url", server.url, *options]
            done = CliRunner().invoke(app, given)
            if isinstance(done.exception, BatchError):
                raise done.exception
            assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
            return done

        def results(self, path=None):
            return [json.loads(line) for line in (path or self.answers).read_text().splitlines()]

    return Files()


def error(status, code, headers=None, **fields):
    return said(status, {"error": {"code": code, "message": f"it was {code}", **fields}}, headers)


NAMES = [f"r{number}" for number in range(20)]


def test_each_request_has_its_answer(files):
    files.write(NAMES)
    with AnsweringServer(
        lambda body, _: said(body={"of": body["user"]}, headers={"x-request-id": "i"})
    ) as server:
        done = files.ask(server)
    assert done.exit_code == 0, done.output
    assert {each["custom_id"]: each["response"]["body"]["of"] for each in files.results()} == {
        name: name for name in NAMES
    }
    first = files.results()[0]
    assert first["id"].startswith("batch_req_")
    assert first["error"] is None
    assert (first["response"]["status_code"], first["response"]["request_id"]) == (200, "i")
    path, _, headers = server.seen[0]
    assert path == "/v1/completions"
    assert headers["x-slo-tier"] == "background"
    assert not files.failed.exists()
    assert "20 answered" in done.output


def test_no_more_than_so_many_are_under_way(files):
    files.write(NAMES)

    async def slowly():
        await asyncio.sleep(0.05)
        return said()

    with AnsweringServer(lambda *_: slowly()) as server:
        files.ask(server, "--at-a-time", "3", "--tier", "standard")
    assert server.most == 3
    assert {headers["x-slo-tier"] for _, _, headers in server.seen} == {"standard"}


@pytest.mark.parametrize(
    "refusal",
    [
        lambda headers: error(429, "over_share", headers),
        lambda headers: web.Response(status=503, text="<html>", content_type="text/html", headers=headers),
    ],
    ids=["json", "html"],
)
def test_who_is_refused_comes_again_when_the_server_says_so(files, refusal):
    files.write(NAMES[:4])
    refused_s = {}

    def once(body, _):
        if body["user"] in refused_s:
            return said()
        refused_s[body["user"]] = time.monotonic()
        return refusal({"retry-after": "2"})

    with AnsweringServer(once) as server:
        began_s = time.monotonic()
        done = files.ask(server)
    assert done.exit_code == 0
    assert sorted(each["custom_id"] for each in files.results()) == NAMES[:4]
    assert time.monotonic() - began_s >= 2.0


def test_who_is_refused_all_the_time_keeps_nobody_from_being_asked(files):
    files.write(NAMES)

    def answer(body, _):
        return said() if int(body["user"][1:]) >= 5 else error(503, "no_replica", {"retry-after": "1"})

    with AnsweringServer(answer) as server:
        assert files.ask(server, "--at-a-time", "4", "--within", "8s").exit_code == 1
    assert sorted(each["custom_id"] for each in files.results()) == sorted(NAMES[5:])
    assert {each["custom_id"] for each in files.results(files.failed)} == set(NAMES[:5])


def test_one_request_of_another_tier_fails_alone(files):
    def answer(body, _):
        return error(400, "invalid_value", param="x-slo-tier") if "service_tier" in body else said()

    files.write(NAMES)
    other = {"custom_id": "other", "url": "/v1/completions", "body": {"service_tier": "default"}}
    files.requests.write_text(json.dumps(other) + "\n" + files.requests.read_text())
    with AnsweringServer(answer) as server:
        assert files.ask(server).exit_code == 1
    assert len(files.results()) == len(NAMES)
    assert [each["custom_id"] for each in files.results(files.failed)] == ["other"]


def test_a_proxy_without_an_application_is_waited_for(files):
    files.write(NAMES[:2])
    away = [web.Response(status=404, text="Path '/v1/completions' not found.")]
    with AnsweringServer(lambda *_: away.pop() if away else said()) as server:
        assert files.ask(server).exit_code == 0
    assert len(files.results()) == 2
    assert len(server.seen) == 3


def test_a_path_that_something_before_the_server_does_not_have_is_not_waited_for(files):
    files.write(NAMES)
    page = "<html><head><title>404 Not Found</title></head></html>"
    with AnsweringServer(lambda *_: web.Response(status=404, text=page), models=None) as server:
        assert files.ask(server, "--within", "20s").exit_code == 1
    assert len(server.seen) == len(NAMES)
    assert {each["error"]["code"] for each in files.results(files.failed)} == {"no_json"}


def test_an_answer_that_is_no_text_has_failed(files, monkeypatch):
    monkeypatch.setattr("deployments.batch.pace._SHORTEST_BACK_OFF_S", 0.01)
    files.write(NAMES[:1])
    odd = [b'{"text":"\xff"}']
    with AnsweringServer(lambda *_: web.Response(body=odd.pop()) if odd else said()) as server:
        assert files.ask(server).exit_code == 0
    assert len(server.seen) == 2


def test_what_is_wrong_is_not_sent_again_and_stands_beside(files):
    files.write(NAMES[:3])

    def answer(body, _):
        return error(400, "invalid_value", param="prompt") if body["user"] == "r1" else said()

    with AnsweringServer(answer) as server:
        done = files.ask(server)
        assert done.exit_code == 1
        assert Counter(body["user"] for _, body, _ in server.seen) == {"r0": 1, "r1": 1, "r2": 1}
        (failed,) = files.results(files.failed)
        assert failed["custom_id"] == "r1"
        assert failed["response"]["status_code"] == 400
        assert failed["response"]["body"]["error"]["message"] == "it was invalid_value"
        assert "1 failed" in done.output
        assert "400 invalid_value" in done.output
        # It is asked again, and alone, when the command is given again.
        server.answer = lambda *_: said()
        assert files.ask(server).exit_code == 0
    assert [body["user"] for _, body, _ in server.seen[3:]] == ["r1"]
    assert len(files.results()) == 3
    assert not files.failed.exists()


def test_a_request_that_always_fails_is_sent_five_times_and_keeps_no_other(files, monkeypatch):
    monkeypatch.setattr("deployments.batch.pace._LONGEST_BACK_OFF_S", 0.1)
    monkeypatch.setattr("deployments.batch.pace._SHORTEST_BACK_OFF_S", 0.01)
    files.write(NAMES)

    def answer(body, _):
        return error(500, "engine_error") if body["user"] == "r3" else said()

    with AnsweringServer(answer) as server:
        done = files.ask(server)
    assert done.exit_code == 1
    assert Counter(body["user"] for _, body, _ in server.seen)["r3"] == 5
    assert len(files.results()) == 19
    assert files.results(files.failed)[0]["response"]["status_code"] == 500


def test_a_connection_that_breaks_in_an_answer_is_a_failure_and_tried_again(files, monkeypatch):
    monkeypatch.setattr("deployments.batch.pace._SHORTEST_BACK_OFF_S", 0.01)
    files.write(NAMES[:2])
    broken = set()

    async def breaks(body, request):
        if body["user"] in broken:
            return said()
        broken.add(body["user"])
        request.transport.abort()
        return said()

    with AnsweringServer(breaks) as server:
        assert files.ask(server).exit_code == 0
    assert len(files.results()) == 2


def test_a_server_that_is_away_is_waited_for(files):
    files.write(NAMES[:4])
    held = asyncio.Event()

    async def hold():
        await held.wait()

    with AnsweringServer(lambda *_: hold()) as server:
        process = run(files, server, "--at-a-time", "2")
        assert_soon(lambda: len(server.seen) == 2, 30)
    time.sleep(1.5)  # nobody is there when it tries again
    with AnsweringServer(port=server.port):
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert sorted(each["custom_id"] for each in files.results()) == NAMES[:4]


def test_a_server_that_takes_no_connection_is_waited_for(files, monkeypatch):
    async def unknown(_):
        return None

    monkeypatch.setattr(Connection, "models", unknown)
    monkeypatch.setattr("deployments.batch.pace._SHORTEST_BACK_OFF_S", 0.01)
    monkeypatch.setattr("deployments.batch.pace._LONGEST_BACK_OFF_S", 0.01)
    files.write(NAMES[:1])
    with no_room() as port:
        server = SimpleNamespace(url=f"http://127.0.0.1:{port}")
        assert files.ask(server, "--timeout", "0.2", "--within", "3s").exit_code == 1
    assert [each["error"]["code"] for each in files.results(files.failed)] == ["batch_expired"]


@contextmanager
def no_room():
    """A port whose queue of connections is full, so that the kernel answers no further one."""
    with socket.socket() as listening, ExitStack() as open_:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(2):
            waiting = open_.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield listening.getsockname()[1]


def run(files, server, *options, **given):
    command = [
        sys.executable,
        "-m",
        "deployments.cli",
        "batch",
        str(files.requests),
        "-o",
        str(files.answers),
    ]
    return subprocess.Popen(
        [*command, "--url", server.url, *options], stderr=subprocess.PIPE, text=True, **given
    )


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)]
)
def test_it_goes_on_where_it_was_stopped(files, number, status):
    files.write(NAMES)
    held = asyncio.Event()

    async def half(body):
        if int(body["user"][1:]) >= 10:
            await held.wait()
        return said(body={"of": body["user"]})

    with AnsweringServer(lambda body, _: half(body)) as server:
        process = run(files, server, "--at-a-time", "12")
        assert_soon(lambda: files.answers.exists() and len(files.results()) == 10, 30)
        with pytest.raises(BatchError, match="another process writes its results there"):
            files.ask(server)
        process.send_signal(number)
        said_last = process.communicate(timeout=30)[1]
        assert process.returncode == status
        assert number == signal.SIGKILL or "Give the command again to go on" in said_last
        with files.answers.open("a") as torn:
            torn.write('{"id":"batch_req_')
        asked = len(server.seen)
        server.answer = lambda body, _: said(body={"of": body["user"]})
        done = files.ask(server)
        assert done.exit_code == 0
        assert "10 of 20 are answered" in done.output
    assert sorted(body["user"] for _, body, _ in server.seen[asked:]) == sorted(NAMES[10:])
    assert Counter(each["custom_id"] for each in files.results()) == dict.fromkeys(NAMES, 1)


def test_time_that_is_up_ends_it(files):
    files.write(NAMES[:5])
    with AnsweringServer(lambda *_: error(429, "shed_by_policy", {"retry-after": "30"})) as server:
        began_s = time.monotonic()
        done = files.ask(server, "--within", "1s")
    assert time.monotonic() - began_s < 5
    assert done.exit_code == 1
    assert {each["error"]["code"] for each in files.results(files.failed)} == {"batch_expired"}
    assert len(files.results(files.failed)) == 5


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda *_: error(401, "invalid_api_key"), "401 invalid_api_key: it was invalid_api_key"),
        (
            lambda *_: error(400, "invalid_value", param="x-slo-tier"),
            "400 invalid_value: it was invalid_value",
        ),
    ],
)
def test_what_holds_for_all_ends_it_at_once(files, answer, told):
    files.write(NAMES)
    with AnsweringServer(answer) as server, pytest.raises(BatchError, match=told):
        files.ask(server, "--at-a-time", "1")
    assert len(server.seen) == 1


def test_a_file_of_other_answers_is_left_alone(files):
    files.write(NAMES[:2])
    with AnsweringServer() as server:
        files.ask(server)
        kept = files.answers.read_bytes()
        files.write(NAMES[:2], prompt="another")
        with pytest.raises(BatchError, match=r"line 1: answers another request than 'r\d' is now"):
            files.ask(server)
        files.write(["other"])
        with pytest.raises(BatchError, match="line 1: there is no request 'r"):
            files.ask(server)
        files.answers.write_bytes(kept + b"notes\n")
        files.write(NAMES[:2])
        with pytest.raises(BatchError, match="line 3: is no result of a batch"):
            files.ask(server)
    assert files.answers.read_bytes() == kept + b"notes\n"


@pytest.mark.parametrize("content", [b'{"a": 1}', b"x", b'{"id": "M\xfcller", "custom_id": "a"}\n'])
@pytest.mark.parametrize("name", ["answers", "failed"])
def test_a_file_of_something_else_is_left_alone(files, name, content):
    files.write(NAMES[:1])
    path = getattr(files, name)
    path.write_bytes(content)
    with (
        AnsweringServer() as server,
        pytest.raises(BatchError, match="is no result of a batch"),
    ):
        files.ask(server)
    assert path.read_bytes() == content
    assert not server.seen


@pytest.mark.parametrize("name", ["answers", "failed"])
def test_the_requests_are_not_written_over(files, name):
    files.write(NAMES[:1])
    path = getattr(files, name)
    files.requests.rename(path)
    files.requests.symlink_to(path)
    kept = path.read_bytes()
    with (
        AnsweringServer() as server,
        pytest.raises(BatchError, match=f"{path}: has the requests"),
    ):
        files.ask(server)
    assert path.read_bytes() == kept


def test_requests_may_be_added(files):
    files.write(NAMES[:2])
    with AnsweringServer() as server:
        files.ask(server)
        files.write(NAMES[:4])
        assert files.ask(server).exit_code == 0
        assert len(server.seen) == 4
    assert sorted(each["custom_id"] for each in files.results()) == NAMES[:4]


def test_an_answer_in_several_lines_is_written_in_one(files):
    files.write(NAMES[:1])
    broken = web.Response(text='{\n "text":\t"a\\nb"\n}', content_type="application/json")
    with AnsweringServer(lambda *_: broken) as server:
        files.ask(server)
    assert files.results()[0]["response"]["body"] == {"text": "a\nb"}


def test_no_server(files):
    files.write(NAMES[:1])
    with AnsweringServer() as server:
        pass
    with pytest.raises(BatchError, match="cannot be reached"):
        files.ask(server)


def test_what_cannot_be_written_ends_it_and_is_asked_again(files):
    files.write(NAMES)
    limit = (1000, 1000)
    with AnsweringServer() as server:
        process = run(files, server, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
        told = process.communicate(timeout=30)[1]
        assert process.returncode == 2
        assert f"{files.answers}: cannot be written (File too large)" in told.replace("\n", "")
        assert files.answers.stat().st_size == 1000
        assert files.ask(server).exit_code == 0
    assert Counter(each["custom_id"] for each in files.results()) == dict.fromkeys(NAMES, 1)


def test_answers_need_a_file(files):
    files.write(NAMES)
    files.answers = Path("/dev/null")
    with (
        AnsweringServer() as server,
        pytest.raises(BatchError, match="/dev/null: is no file that can be gone"),
    ):
        files.ask(server)
