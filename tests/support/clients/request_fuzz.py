"""Requests that nobody would send: drawn from vLLM's request models and then spoilt; a corpus of the worst.

A body is drawn from a model's JSON schema, so that a field that upstream adds is drawn as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest

PATHS = {"/v1/chat/completions": ChatCompletionRequest, "/v1/completions": CompletionRequest}
CORPUS = Path(__file__).parents[2] / "corpus" / "requests.jsonl"
_SCHEMAS = {path: model.model_json_schema() for path, model in PATHS.items()}
_SAY = [{"role": "user", "content": "hi"}]
_MAX_DEPTH = 6
_ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, -(2**63) - 1, 0.5, -0.0, 1e308, 5e-324,
    "", " ", "\0", "\ud800", "\U0001f600", "a" * 5000, "NaN", "-1", "1e999", "data:,", "http://127.0.0.1:8265/",
    "file:///etc/passwd", "{{ 1 }}", "\u202e", "../../..", [], [[]], [[[[[[]]]]]], [None], {}, {"": {}},
    {"type": []}, {"$ref": "#"}, [1] * 300, ["a"] * 300, {"a": {"b": {"c": {"d": {}}}}},
)  # fmt: skip
_HEADERS = (
    "authorization", "content-type", "content-encoding", "transfer-encoding", "expect", "x-request-id",
    "x-slo-tier", "x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-e2e-ms", "traceparent", "tracestate", "cookie",
    "serve-multiplexed-model-id", "x-slackserve-context", "x-request-timeout-seconds", "x_slo_tier", "x-\xff",
)  # fmt: skip
_HEADER_VALUES = (
    "", "0", "-1", "1e999", "nan", "inf", "premium", "system", "a" * 9000, "Bearer",
    "Bearer key-of-acme", "\xff\xfe", "00-ffffffffffffffffffffffffffffffff-ffffffffffffffff-01",
    "gzip", "chunked", "100-continue", "?1", "1" * 5000, "a;b=c", "\t",
)  # fmt: skip


class Fuzzed(NamedTuple):
    """A request; headers and body as bytes of a client that keeps to no rule."""

    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes


def corpus() -> Iterator[tuple[str, Fuzzed]]:
    """Names and requests of the committed corpus; texts of a body, and headers, may have a count."""
    for line in CORPUS.read_text().splitlines():
        entry = json.loads(line)
        body = "".join(text * count for text, count in entry["body"])
        headers = [
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value, *count in entry.get("headers", [])
            for _ in range(count[0] if count else 1)
        ]
        yield entry["name"], Fuzzed(entry["path"], headers, body.encode("utf-8", "surrogatepass"))


def draw(rng: Random) -> Fuzzed:
    """One request."""
    path = rng.choice([*PATHS])
    schema = _SCHEMAS[path]
    body = {"model": "m"}
    body |= {"messages": _SAY} if "chat" in path else {"prompt": "hi"}
    for name in rng.sample([*schema["properties"]], rng.choice([0, 1, 1, 2, 3, 5, 8])):
        body[name] = _value(schema["properties"][name], schema.get("$defs", {}), rng, 0)
    if rng.random() < 0.1:
        body[_text(rng)] = rng.choice(_ODD)
    raw = json.dumps(body, ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")
    if rng.random() < 0.2:
        raw = _spoilt(raw, rng)
    return Fuzzed(path, _headers(rng), raw)


def _value(schema: dict[str, Any], defs: dict[str, Any], rng: Random, depth: int) -> Any:
    if rng.random() < 0.15 or depth > _MAX_DEPTH:
        return rng.choice(_ODD)
    for choice in ("anyOf", "oneOf", "allOf"):
        if choice in schema:
            return _value(rng.choice(schema[choice]), defs, rng, depth + 1)
    if "$ref" in schema:
        return _value(defs[schema["$ref"].rpartition("/")[2]], defs, rng, depth + 1)
    if names := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return rng.choice(names)
    kind = schema.get("type")
    if kind == "array":
        count = rng.choice([0, 1, 2, 5, 40])
        return [_value(schema.get("items", {}), defs, rng, depth + 1) for _ in range(count)]
    return _object(schema, defs, rng, depth) if kind == "object" else _scalar(kind, rng)


def _object(schema: dict[str, Any], defs: dict[str, Any], rng: Random, depth: int) -> dict[str, Any]:
    given = schema.get("properties", {})
    chosen = [name for name in given if name in schema.get("required", ()) or rng.random() < 0.5]
    value = {name: _value(given[name], defs, rng, depth + 1) for name in chosen}
    if schema.get("additionalProperties") and rng.random() < 0.5:
        value[_text(rng)] = rng.choice(_ODD)
    return value


def _scalar(kind: str | None, rng: Random) -> Any:
    values = {
        "string": [_text(rng)],
        "integer": [0, 1, 2, 5, 17, 100, 2**31, rng.randrange(-100, 5000)],
        "number": [0, 0.5, 1, 2.5, rng.uniform(-10, 10), 1e300],
        "boolean": [True, False],
        "null": [None],
    }
    return rng.choice(values.get(kind or "", _ODD))


def _text(rng: Random) -> str:
    odd = [value for value in _ODD if isinstance(value, str)]
    return rng.choice([*odd, "stop", "user", "text", "image_url", "{", '"', "\\", "a b c"])


def _spoilt(raw: bytes, rng: Random) -> bytes:
    """Some bytes changed, dropped, doubled or cut off."""
    at, until = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
    return rng.choice(
        [
            raw[:at],
            raw[:at] + raw[until:],
            raw[:until] + raw[at:until] + raw[until:],
            raw[:at] + bytes(rng.randrange(256) for _ in range(4)) + raw[at:],
            raw[:at] + b"[" * rng.choice([1, 60, 5000]) + raw[at:],
            raw[:at] + rng.choice([b",", b"}", b"]", b"\\u", b"\\ud83d", b"NaN", b"1e9999"]) + raw[at:],
            b"\xef\xbb\xbf" + raw,
            raw.decode("utf-8", "replace").encode("utf-16"),
        ]
    )


def _headers(rng: Random) -> list[tuple[bytes, bytes]]:
    chosen = [
        (rng.choice(_HEADERS), rng.choice(_HEADER_VALUES)) for _ in range(rng.choice([0, 0, 0, 1, 2, 6]))
    ]
    if rng.random() < 0.01:
        chosen += [(f"x-{number}", "v") for number in range(300)]
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in chosen]
