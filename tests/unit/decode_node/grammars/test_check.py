"""Grammars that would keep an engine busy or eat its memory."""

import asyncio
import random
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import psutil
import pytest
from vllm.config import StructuredOutputsConfig
from vllm.exceptions import GenerationError, VLLMServerError, VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from benchmarks.harness.tiny_models import build_tiny_llama
from decode_node.grammars import check as grammar_check
from decode_node.grammars import child_process
from decode_node.grammars.backends import backend_of
from decode_node.grammars.check import (
    GrammarCheck,
    GrammarLimits,
    GrammarNotCheckedError,
    TooManyGrammarsError,
)
from decode_node.grammars.child import CHECKED
from slo.request import TENANT_XARG

GOOD = [
    StructuredOutputsParams(regex="[a-z]{3,5}"),
    StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}}),
    StructuredOutputsParams(json_object=True),
    StructuredOutputsParams(choice=["yes", 'n"o']),
    StructuredOutputsParams(grammar='root ::= "a" | "b"'),
]
INVALID = [
    StructuredOutputsParams(regex="("),
    StructuredOutputsParams(grammar="root ::= undefined"),
    StructuredOutputsParams(json={"type": "no such type"}),
]
ANY_OBJECT = GOOD[2]
UNTOLD = {"xgrammar": [], "guidance": INVALID, "outlines": INVALID[1:2]}
"""What of these is left to vLLM: llguidance raises nothing for it, and outlines knows no such kind."""


def good(name: str) -> list[StructuredOutputsParams]:
    """What of `GOOD` a backend knows."""
    return [params for params in GOOD if name != "outlines" or params is not ANY_OBJECT]


RULES = 450
SLOW = [
    # 14 kB, of which each rule leads to every other: seconds with the smallest of vocabularies.
    StructuredOutputsParams(
        grammar="root ::= r0\n"
        + "\n".join(f'r{n} ::= ("a" | "b" | r{(n + 1) % RULES} | r{(n + 7) % RULES})*' for n in range(RULES))
    ),
    StructuredOutputsParams(
        json={
            "anyOf": [
                {"type": "object", "properties": {f"p{n}": {"$ref": "#"} for n in range(size)}}
                for size in range(1, 100)
            ]
        }
    ),
]

MANY_STATES = StructuredOutputsParams(regex="(a|b)*a(a|b){21}")
"""An automaton with a state for each of the last letters: gigabytes, if it is made as a whole."""
MANY_LENGTHS = StructuredOutputsParams(
    json={
        "type": "object",
        "properties": {
            f"p{n}": {"type": "string", "minLength": n, "maxLength": n * 37} for n in range(1, 200)
        },
        "required": [f"p{n}" for n in range(1, 200)],
    }
)


@pytest.mark.slow
async def test_a_child_that_dies_while_it_starts_is_started_again(check, tmp_path, monkeypatch):
    once, real = tmp_path / "once.py", child_process._PROGRAM
    once.write_text(
        f"import os, pathlib, runpy\nseen = pathlib.Path({str(tmp_path / 'seen')!r})\n"
        f"os._exit(1) if not seen.exists() and not seen.touch() else "
        f"runpy.run_path({str(real)!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(child_process, "_PROGRAM", once)
    await check.check(GOOD[0])
    assert (tmp_path / "seen").exists()


async def test_a_child_that_does_not_start_is_told_with_what_it_said(check, tmp_path, monkeypatch):
    broken = tmp_path / "broken.py"
    broken.write_text("import sys\nsys.exit('no such module')\n")
    monkeypatch.setattr(child_process, "_PROGRAM", broken)
    told = []
    monkeypatch.setattr(grammar_check.logs, "event", lambda name, **what: told.append((name, what)))
    with pytest.raises(RuntimeError, match="does not start"):
        await check.check(GOOD[0])
    assert told == 3 * [("grammar_child_not_started", {"returncode": 1, "said": "no such module\n"})]


@pytest.mark.slow
def test_nobodys_fork_handlers_run_in_the_child(tmp_path):
    """gRPC's start threads there that may crash before the child runs its program; replicas run on uvloop."""
    program = """
        import asyncio, os, sys
        import uvloop
        from transformers import PreTrainedTokenizerFast
        from vllm.sampling_params import StructuredOutputsParams
        from decode_node.grammars.backends import Xgrammar
        from decode_node.grammars.check import GrammarCheck, GrammarLimits

        async def checked():
            tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
            check = GrammarCheck(GrammarLimits(), Xgrammar(tokenizer, len(tokenizer)))
            os.register_at_fork(after_in_child=os.abort)
            await check.check(StructuredOutputsParams(regex="[a-z]{3,5}"))
            await check.close()

        uvloop.run(checked())
    """
    model = build_tiny_llama(tmp_path / "tiny")
    command = [sys.executable, "-c", textwrap.dedent(program), str(model)]
    subprocess.run(command, check=True, timeout=300)


@pytest.mark.slow
async def test_what_compiles_passes_and_what_does_not_is_refused_and_verdicts_are_kept(check):
    async def check_all():
        for params in GOOD:
            await check.check(params)
        for params in INVALID:
            with pytest.raises(VLLMValidationError, match="does not compile"):
                await check.check(params)

    await check_all()
    await check.close()
    await check_all()
    assert check._child is None, "nobody was asked"


@pytest.mark.parametrize("name", CHECKED)
async def test_where_the_vocabulary_cannot_be_read_grammars_are_refused(name):
    check = GrammarCheck(GrammarLimits(), backend_of(StructuredOutputsConfig(backend=name), object(), 100))
    with pytest.raises(VLLMValidationError, match="its vocabulary cannot be read"):
        await check.check(GOOD[0])


@pytest.mark.slow
async def test_what_takes_too_much_is_refused_and_the_next_one_served(check):
    good, *following = GOOD[: len(SLOW) + 1]
    await check.check(good)
    for params, next_one in zip(SLOW, following, strict=True):
        started_s = time.monotonic()
        with pytest.raises(VLLMValidationError, match=r"limits.grammar_timeout_s allows 0.5 s"):
            await check.check(params)
        assert time.monotonic() - started_s < 5
        with pytest.raises(VLLMValidationError):
            await check.check(params)
        await check.check(next_one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wide"),
    [
        (
            "xgrammar",
            StructuredOutputsParams(grammar="root ::= " + " | ".join(f'"{n:06d}"' for n in range(30000))),
        ),
        ("outlines", StructuredOutputsParams(regex="(a|b)*a(a|b){15}")),
    ],
)
async def test_what_takes_too_much_memory_is_refused(check_by, name, wide):
    """xgrammar says so with an error of its own, outlines ends; both long before the time is over."""
    check = check_by(name, limits=GrammarLimits(timeout_s=30, max_mib=4))
    for params in good(name) + UNTOLD[name]:
        await check.check(params)
    for params in INVALID:
        if params not in UNTOLD[name]:
            with pytest.raises(VLLMValidationError, match="does not compile"):
                await check.check(params)
    with pytest.raises(VLLMValidationError, match=r"limits.max_grammar_mib 4 MiB"):
        await check.check(wide)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config", "served", "refused"),
    [
        ("xgrammar", {}, [MANY_STATES], [MANY_LENGTHS]),
        ("guidance", {}, [MANY_STATES, MANY_LENGTHS], []),
        ("guidance", {"disable_any_whitespace": True, "disable_additional_properties": True}, GOOD, []),
        ("outlines", {}, [], [MANY_STATES]),
    ],
)
async def test_a_grammar_is_compiled_with_what_the_engine_compiles_it_with(
    check_by, name, config, served, refused
):
    check = check_by(name, **config)
    for params in [*good(name), *UNTOLD[name], *served]:
        await check.check(params)
    for params in refused:
        with pytest.raises(VLLMValidationError, match="takes too long or too much memory"):
            await check.check(params)


@pytest.mark.parametrize("allowed", [None, [1, 2]])
async def test_any_object_is_refused_of_a_backend_that_does_not_know_it(check_by, allowed):
    """vLLM lets it pass, and its engine fails the request."""
    with pytest.raises(VLLMValidationError, match=r"outlines, .* knows no JSON object without a schema"):
        await check_by("outlines").check(ANY_OBJECT, allowed=allowed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["guidance", "outlines"])
async def test_every_backend_reads_the_vocabulary_of_mistrals(check_by, mistrals, name):
    check = check_by(name, mistrals(), GrammarLimits(timeout_s=5))
    for params in good(name) + UNTOLD[name]:
        await check.check(params)


@pytest.mark.slow
async def test_a_client_that_leaves_changes_no_others_verdict(check):
    await check.check(GOOD[0])
    asking = asyncio.create_task(check.check(SLOW[0]))
    await asyncio.sleep(0.05)
    asking.cancel()
    await check.check(GOOD[1])
    with pytest.raises(VLLMValidationError):
        await check.check(SLOW[0])


class Slow:
    """A child that answers when it is told to go on."""

    has_ended = False

    def __init__(self):
        self.asked = []
        self.go = asyncio.Event()

    async def ask(self, key, within_s):
        self.asked.append(key[1])
        await self.go.wait()
        return "ok"

    async def end(self):
        pass


@pytest.fixture
def child(check):
    check._child = Slow()
    return check._child


async def asking(check, letters, tenant=""):
    """Requests that have asked, each for a grammar of its own."""
    tasks = [
        asyncio.create_task(check.check(StructuredOutputsParams(regex=letter), tenant)) for letter in letters
    ]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


async def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled(check, child):
    first, gone, last = await asking(check, "abc")
    gone.cancel()
    child.go.set()
    await asyncio.gather(first, last)
    assert child.asked == ["a", "c"]
    assert not check._pending


async def test_who_asks_for_the_same_waits_for_one_verdict_and_one_who_leaves_changes_nothing(check, child):
    gone, *others = await asking(check, "aaaa")
    gone.cancel()
    child.go.set()
    await asyncio.gather(*others)
    assert child.asked == ["a"]


async def test_another_tenants_grammar_waits_for_one_of_each_other_tenant(check, child):
    many = await asking(check, "abcdef", "many")
    few = await asking(check, "xy", "few")
    child.go.set()
    await asyncio.gather(*many, *few)
    assert child.asked == list("axbycdef")


async def test_the_same_grammar_does_not_wait_in_another_tenants_queue(check, child):
    """Who knows what another will ask for could put it behind all of its own."""
    many = await asking(check, "abcdef", "many")
    few = await asking(check, "f", "few")
    child.go.set()
    await asyncio.gather(*few, *many)
    assert child.asked == list("afbcde"), "its verdict is known then"


async def test_a_tenant_has_only_so_many_grammars_that_wait(check, child, monkeypatch):
    monkeypatch.setattr(grammar_check, "_MOST_PENDING", 3)
    many = await asking(check, "abc", "many")
    with pytest.raises(TooManyGrammarsError, match="3 new grammars"):
        await check.check(StructuredOutputsParams(regex="d"), "many")
    same = await asking(check, "c", "many")
    other = await asking(check, "d", "other")
    many[1].cancel()
    await asyncio.wait(many[1:2])
    again = await asking(check, "e", "many")
    child.go.set()
    await asyncio.gather(many[0], many[2], *same, *other, *again)
    await check.check(StructuredOutputsParams(regex="c"), "many")
    assert not check._pending


async def test_who_has_just_had_a_verdict_goes_behind_who_has_not(check, child):
    many = [
        *await asking(check, "abcd", "a"),
        *await asking(check, "stu", "b"),
        *await asking(check, "x", "c"),
    ]
    child.go.set()
    await asyncio.gather(*many)
    assert child.asked == list("asxbtcud")


@pytest.mark.parametrize("steps", range(10))
async def test_whenever_one_leaves_the_next_has_its_turn(check, child, steps):
    """Also as it is called, and has not heard of it."""
    first, gone, last = await asking(check, "abc")
    child.go.set()
    for _ in range(steps):
        await asyncio.sleep(0)
    gone.cancel()
    async with asyncio.timeout(1.0):
        await asyncio.gather(first, last)
        await check.check(StructuredOutputsParams(regex="d"), "another")
    assert child.asked in (list("acd"), list("abcd"))
    assert not check._pending


class Hasty:
    """A child that is asked one thing at a time, and answers soon."""

    has_ended = False

    def __init__(self, rng):
        self._rng = rng
        self._is_asked = False
        self.asked = set()

    async def ask(self, key, within_s):
        assert not self._is_asked
        self._is_asked = True
        await asyncio.sleep(self._rng.random() * 0.002)
        self._is_asked = False
        self.asked.add(key[1])
        return "ok"

    async def end(self):
        pass


async def test_one_grammar_is_compiled_at_a_time_and_none_is_left_out_whoever_leaves(check):
    rng = random.Random(3)
    check._child = child = Hasty(rng)

    async def ask(number):
        await asyncio.sleep(rng.random() * 0.02)
        await check.check(StructuredOutputsParams(regex=str(number)), rng.choice("abc"))

    tasks = [asyncio.create_task(ask(number)) for number in range(60)]
    await asyncio.sleep(0.02)
    left = set(rng.sample(range(60), 20))
    for number in left:
        tasks[number].cancel()
    async with asyncio.timeout(5.0):
        await asyncio.gather(*tasks, return_exceptions=True)
    stayed = set(range(60)) - left
    assert all(tasks[number].exception() is None for number in stayed)
    assert {str(number) for number in stayed} <= child.asked


@pytest.mark.slow
async def test_one_tenants_slow_grammars_do_not_keep_another_waiting(check):
    await check.check(GOOD[0])
    slow = [
        asyncio.create_task(check.check(StructuredOutputsParams(grammar=f'{text}\nextra{n} ::= "x"'), "many"))
        for n, text in enumerate([SLOW[0].grammar] * 6)
    ]
    await asyncio.sleep(0.05)
    await check.check(StructuredOutputsParams(regex="yes|no"), "few")
    assert sum(task.done() for task in slow) <= 1
    await asyncio.gather(*slow, return_exceptions=True)


@pytest.mark.slow
async def test_a_child_that_dies_is_replaced_and_one_that_has_died_meanwhile(check):
    await check.check(GOOD[0])
    child = psutil.Process(check._child.process.pid)
    child.suspend()  # it dies with a grammar in hand, not before it is known to have ended
    asked = asyncio.create_task(check.check(GOOD[1]))
    await asyncio.sleep(0.1)
    child.kill()
    with pytest.raises(GrammarNotCheckedError):
        await asked
    await check.check(GOOD[1])
    psutil.Process(check._child.process.pid).kill()
    await asyncio.sleep(0.2)
    await check.check(GOOD[2])


class Silent:
    """A child that says something of one grammar alone."""

    has_ended = False

    def __init__(self):
        self.asked = []

    async def ask(self, key, within_s):
        self.asked.append(key[1])
        return "ok" if key[1] == "b" else ""

    async def end(self):
        pass


async def test_a_child_that_says_nothing_is_the_servers_fault_but_not_for_ever(check, monkeypatch):
    child = Silent()

    async def start():
        check._child = child
        return child

    monkeypatch.setattr(check, "_start", start)
    a, b = StructuredOutputsParams(regex="a"), StructuredOutputsParams(regex="b")
    for _ in range(2):
        with pytest.raises(VLLMServerError):
            await check.check(a)
        await check.check(b)
    for _ in range(3):
        with pytest.raises(VLLMValidationError):
            await check.check(a)
    assert child.asked == ["a", "b", "a", "a"], "no child dies any more of what three have died of"


async def test_an_answer_makes_up_for_silences_before(check, monkeypatch):
    says = iter(["", "", "ok"])

    class Child(Silent):
        async def ask(self, key, within_s):
            return next(says)

    async def start():
        return Child()

    monkeypatch.setattr(check, "_start", start)
    for _ in range(2):
        with pytest.raises(GrammarNotCheckedError):
            await check.check(GOOD[0])
    await check.check(GOOD[0])
    await check.check(GOOD[0])
    assert not check._silences


async def generated(params):
    yield "token"


async def test_a_request_without_a_grammar_costs_nothing(check):
    client = SimpleNamespace(generate=lambda prompt, params, request_id: generated(params))
    check.stand_before(client, pytest.fail)
    assert [out async for out in client.generate("hi", SamplingParams(), "r")] == ["token"]
    assert check._child is None


async def test_one_too_many_is_answered_with_a_429_of_the_request(check, child, monkeypatch):
    monkeypatch.setattr(grammar_check, "_MOST_PENDING", 1)
    answered = []

    def refuse(params, response):
        answered.append((params, response.error.code, response.error.type))
        return GenerationError("refused")

    client = SimpleNamespace(generate=lambda prompt, params, request_id: generated(params))
    check.stand_before(client, refuse)
    (waiting,) = await asking(check, "a", "acme")
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="b"), extra_args={TENANT_XARG: "acme"}
    )
    with pytest.raises(GenerationError, match="refused"):
        await anext(client.generate("hi", params, "r"))
    assert answered == [(params, 429, "grammars")]
    child.go.set()
    await waiting


async def test_who_waits_for_a_verdict_is_told_and_who_finds_one_is_not(check, child):
    child.go.set()
    client, waited = SimpleNamespace(generate=lambda prompt, params, request_id: generated(params)), []
    check.stand_before(client, pytest.fail, waited.append)
    first, second = (SamplingParams(structured_outputs=GOOD[0]) for _ in range(2))
    for params in (first, second, SamplingParams()):
        assert [out async for out in client.generate("hi", params, "r")] == ["token"]
    assert waited == [first]
    assert waited[0] is first
