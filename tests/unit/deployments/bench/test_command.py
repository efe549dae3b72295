"""`slackserve bench` as a user sees it."""

import json
import ssl
import sys
import time

import pytest
from certificates import self_signed
from completions_server import Behaviour, CompletionsServer

from deployments import cli
from deployments.bench import run as bench_run
from deployments.bench.stream import Extent

MOONCAKE = [
    {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]},
    {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [1, 3]},
    {"timestamp": 6000, "input_length": 9000, "output_length": 500, "hash_ids": [4]},
]
QUICK = ("--rate", "40", "--requests", "20", "--max-tokens", "100", "--max-output", "2")
SEARCHED = ("--min-rate", "30", "--max-rate", "60")


@pytest.fixture
def bench(monkeypatch, capsys):
    """Runs the command; its exit code, standard output and standard error."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["slackserve", "bench", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def server():
    with CompletionsServer() as running:
        yield running


def test_a_run_prints_a_table_and_writes_json(bench, server, tmp_path):
    path = tmp_path / "run.json"
    code, out, err = bench("--url", server.url, *QUICK, "--json", path)
    assert code == 0, err
    for word in ("all", "premium", "standard", "chat", "document", "100.0%", "sent late by"):
        assert word in out
    found = json.loads(path.read_text())
    assert found["model"] == "tiny"
    assert found["overall"]["requests"] == len(server.seen) == 20
    assert found["overall"]["attainment"] == 1.0
    assert {*found["kinds"]} == {"chat", "document"}


def test_another_model_and_tiers(bench, server):
    code, _, err = bench("--url", server.url, *QUICK, "--model", "other", "--tiers", "background=1")
    assert code == 0, err
    assert {seen.body["model"] for seen in server.seen} == {"other"}
    assert {seen.headers["x-slo-tier"] for seen in server.seen} == {"background"}


def test_the_same_seed_offers_the_same_lengths_and_other_words(bench, server):
    for _ in range(2):
        bench("--url", server.url, *QUICK, "--seed", "7")
    prompts = [seen.body["prompt"] for seen in server.seen]
    assert sorted(map(len, prompts[:20])) == sorted(map(len, prompts[20:]))
    assert not {tuple(prompt[:16]) for prompt in prompts[:20]} & {
        tuple(prompt[:16]) for prompt in prompts[20:]
    }


def test_a_trace_is_replayed_with_its_shared_blocks(bench, server, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, MOONCAKE)))
    code, out, err = bench("--url", server.url, "--trace", path, "--rate", "20", "--requests", "3")
    assert code == 0, err
    assert "short" in out
    assert "long" in out
    sent = {len(seen.body["prompt"]): seen.body["prompt"] for seen in server.seen}
    assert {*sent} == {700, 600, 9000}
    assert sent[700][:512] == sent[600][:512]
    assert sent[700][512:600] != sent[600][512:]


def test_search_finds_the_rate_that_the_server_can_bear(bench, tmp_path):
    path = tmp_path / "search.json"
    mix = tmp_path / "mix.yaml"
    mix.write_text("kinds: {chat: {share: 1, mean_tokens: 50, ttft_ms: 400, output_tokens: 1}}")
    searching = ("--search", "--min-rate", "20", "--max-rate", "300", "--precision", "0.5", "--settle", "0")
    with CompletionsServer(Behaviour(seconds=lambda _: 0.01, is_serial=True)) as server:
        code, out, err = bench(
            "--url", server.url, "--mix", mix, "--duration", "1.2", *searching, "--json", path
        )
    assert code == 0, err
    found = json.loads(path.read_text())
    assert found["is_bounded"]
    assert 20 <= found["goodput_rps"] < 200  # it serves at most 100 in a second
    assert out.count("requests/s: ") == len(found["probes"]) >= 3
    assert f"goodput at 90%: {found['goodput_rps']:.3f}" in out


@pytest.mark.parametrize(
    ("given", "extent"),
    [
        ((), Extent(None, 60.0, "--min-rate", fewest=30)),
        (("--duration", "5"), Extent(None, 5.0, "--min-rate")),
        (("--requests", "20"), Extent(20, rate_option="--min-rate", fewest=30)),
    ],
)
def test_no_rate_of_a_search_is_judged_by_a_handful_of_requests_unless_it_is_told(
    bench, monkeypatch, given, extent
):
    searched = []
    monkeypatch.setattr(bench_run, "run_search", lambda plan, *_: searched.append(plan.extent) or {})
    code, _, err = bench("--search", "--max-rate", "4", *given)
    assert code == 0, err
    assert searched == [extent]


class Shedding:
    """Takes 20 requests, and then none until it is left alone for a second."""

    def __init__(self):
        self._count = 0
        self._last_s = 0.0
        self._is_over = False

    def refuse(self, *_):
        alone_s, self._last_s = time.perf_counter() - self._last_s, time.perf_counter()
        self._count += 1
        self._is_over = self._is_over or (self._count > 21 and alone_s > 1.0)
        return None if self._count <= 20 or self._is_over else (429, {"code": "shed"})


@pytest.mark.parametrize(("settle_s", "expected"), [(1.5, [True, False, True]), (0, [True, False, False])])
def test_a_search_lets_a_server_rest_that_has_refused(bench, tmp_path, settle_s, expected):
    path = tmp_path / "search.json"
    searching = ("--search", "--min-rate", "40", "--max-rate", "80", "--precision", "0.4", "--json", path)
    with CompletionsServer(Behaviour(refuse=Shedding().refuse)) as server:
        code, out, err = bench("--url", server.url, *QUICK[2:], *searching, "--settle", settle_s)
    assert code == 0, err
    probes = json.loads(path.read_text())["probes"]
    assert [probe["overall"]["attainment"] >= 0.9 for probe in probes] == expected
    sent = 20 - probes[1]["unsent"]
    assert f"ended after {sent} of 20 requests\n  {sent} refused: 429 shed\n" in out


@pytest.mark.parametrize("lasts", [5, 25])  # until the lowest rate, until the highest one
def test_a_search_whose_server_is_gone_finds_no_goodput(bench, tmp_path, lasts):
    path = tmp_path / "search.json"
    searching = ("--search", *SEARCHED, "--settle", "0", "--json", path)
    with CompletionsServer(Behaviour(lasts=lasts)) as server:
        code, out, err = bench("--url", server.url, *QUICK[2:], *searching)
    assert code == 2
    assert "cannot be reached" in " ".join(err.split())
    assert "goodput" not in out
    assert out.count("requests/s: ") == 1 + lasts // 20
    assert "failed: " in out
    written = json.loads(path.read_text())
    assert [probe["rate_rps"] for probe in written["probes"]] == [30, 60][: 1 + lasts // 20]
    assert (written["model"], "goodput_rps" in written) == ("tiny", False)
    assert "cannot be reached" in written["error"]


def test_a_search_that_has_measured_nothing_writes_nothing(bench, tmp_path):
    path = tmp_path / "search.json"
    code, *_ = bench("--url", "http://127.0.0.1:9", *QUICK[2:], "--search", *SEARCHED, "--json", path)
    assert code == 2
    assert not path.exists()


def test_a_server_whose_requests_have_failed_is_left_alone_before_it_is_asked_whether_it_is_there(bench):
    with CompletionsServer(Behaviour(refuse=lambda *_: (500, {"code": "broken"}))) as server:
        code, out, _ = bench("--url", server.url, *QUICK[2:], "--search", *SEARCHED, "--settle", "0.5")
    assert code == 0
    assert "less than --min-rate" in out
    assert len(server.listed_s) == 2
    assert server.listed_s[-1] - server.seen[-1].at_s >= 0.5


def test_a_search_whose_lowest_rate_is_too_high_says_so(bench):
    with CompletionsServer(Behaviour(refuse=lambda *_: (429, {"code": "full"}))) as server:
        code, out, _ = bench("--url", server.url, *QUICK[2:], "--search", *SEARCHED, "--attainment", "0.01")
    assert code == 0
    assert "less than --min-rate" in out
    assert "20 refused: 429 full" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "tinny"), "--model: 'tinny' is not served there; did you mean 'tiny'?"),
        (("--model", "xyz"), "it serves tiny, other"),
        (("--mix", "embeded"), "did you mean 'embedded'?"),
        (("--trace", "none.jsonl"), "--trace: none.jsonl: there is no such file"),
        (("--trace", "trace.txt"), "give a .jsonl trace"),
        (("--mix", "trace"), "need a --trace"),
        (("--tiers", "premum=1"), "did you mean 'premium'?"),
        (("--tiers", "premium"), "is not a tier and its share"),
        (("--tiers", "premium=0"), "no share above 0"),
        (("--vocabulary", "many"), "is not a range of token ids"),
        (("--requests", "5", "--duration", "5"), "not both"),
        (("--search", "--min-rate", "5", "--max-rate", "5"), "must be less than --max-rate"),
        (
            ("--rate", "0.001", "--duration", "0.1"),
            "no request arrives within 0.1 s at 0.001 requests/s; give a longer --duration, a higher --rate",
        ),
        (("--search", "--duration", "0.1"), "a higher --min-rate"),
        (("--search", "--max-rate", "1e12"), "more than 10,000,000"),
        (("--rate", "1e12", "--duration", "10"), "1e+13 requests are more than 10,000,000"),
        (("--rate", "inf"), "Invalid value for '--rate': inf is no finite number"),
        (("--duration", "inf"), "inf is no finite number"),
        (("--scale", "inf"), "inf is no finite number"),
        (("--search", "--max-rate", "inf"), "inf is no finite number"),
        (("--api-key", "a key\nand another"), "no header can have '\\n'"),
        (("--json", "/nowhere/run.json"), "cannot be written"),
        (("--url", "127.0.0.1:8000"), "does not begin with http:// or https://"),
        (("--url", "http://[::1"), "--url: 'http://[::1' is no address of a server (Invalid IPv6 URL)"),
        (("--url", "http://127.0.0.1:99999"), "is no address of a server (Port out of range 0-65535)"),
        (("--url", "https://"), "is no address of a server (it names no host)"),
        (("--cacert", "none.pem"), "--cacert: counts for nothing with http://"),
        (("--url", "https://127.0.0.1:9", "--cacert", "none.pem"), "none.pem: no certificates can be read"),
        (("--profile", "none.json"), "none.json cannot be read"),
        (("--trace", "t.jsonl", "--profile", "p.json"), "--profile: counts for nothing with --trace"),
    ],
)
def test_what_a_user_gets_wrong_is_one_clear_message(bench, server, arguments, message):
    code, out, err = bench("--url", server.url, *arguments)
    assert code == 2
    assert message in " ".join(err.split())
    assert "Traceback" not in out + err
    assert not server.seen


@pytest.mark.parametrize("url", ["http://me:hidden@127.0.0.1:9", "me:hidden@host", "https://me:hid/den@host"])
@pytest.mark.parametrize("key", [(), ("--api-key", "k")])
def test_a_password_in_an_address_is_refused_and_shown_nowhere(bench, tmp_path, url, key):
    path = tmp_path / "run.json"
    code, out, err = bench("--url", url, *key, *QUICK, "--json", path)
    assert code == 2
    assert "--url: an address is printed and kept, so it must have no user" in " ".join(err.split())
    assert "hid" not in out + err
    assert not path.exists()


def test_a_broken_trace_is_refused_by_line(bench, server, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(MOONCAKE[0]) + "\nnot json\n")
    code, _, err = bench("--url", server.url, "--trace", path)
    assert code == 2
    assert "line 2" in err


def test_a_server_that_is_not_there(bench, server):
    code, _, err = bench("--url", "http://127.0.0.1:9")
    assert code == 2
    err = " ".join(err.split())  # without the terminal's line breaks
    assert "cannot be reached" in err
    assert "is the server running?" in err


def test_a_server_with_a_certificate_of_its_own(bench, tmp_path):
    made = self_signed(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(made.certificate, made.key)
    with CompletionsServer(Behaviour(tls=tls)) as server:
        code, _, err = bench("--url", server.url, *QUICK)
        assert code == 2
        err = " ".join(err.split())
        assert "does not trust the server's certificate (self-signed certificate); give --cacert" in err
        assert "is the server running?" not in err
        code, _, err = bench("--url", server.url, *QUICK, "--cacert", made.certificate)
        assert code == 0, err


def test_a_server_without_tls(bench, server):
    code, _, err = bench("--url", server.url.replace("http:", "https:"), *QUICK)
    assert code == 2
    assert "does not speak TLS as this client does" in " ".join(err.split())


def test_a_server_that_wants_a_key(bench):
    with CompletionsServer(Behaviour(key="secret")) as server:
        code, _, err = bench("--url", server.url, *QUICK)
        assert code == 2
        assert "give --api-key" in err
        code, _, err = bench("--url", server.url, *QUICK, "--api-key", "secret")
        assert code == 0, err


def test_a_key_may_end_as_files_do(bench, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret\n")
    with CompletionsServer(Behaviour(key="secret")) as server:
        code, _, err = bench("--url", server.url, *QUICK)
    assert code == 0, err


def test_an_empty_key_is_none(bench, server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "\n")
    code, _, err = bench("--url", server.url, *QUICK)
    assert code == 0, err
    assert "Authorization" not in server.seen[0].headers


def test_a_server_without_models_needs_a_name(bench):
    with CompletionsServer(Behaviour(models=())) as server:
        code, _, err = bench("--url", server.url, *QUICK)
    assert code == 2
    assert "give --model" in err


def test_tiers_of_the_servers_own_are_sent_as_they_are(bench, server):
    code, _, err = bench("--url", server.url, *QUICK, "--tiers", "text=1")
    assert code == 0, err
    assert {seen.headers["x-slo-tier"] for seen in server.seen} == {"text"}
