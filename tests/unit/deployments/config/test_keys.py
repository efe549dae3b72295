"""Keys: where they come from, what they may do, and what is refused of them."""

import pickle
import re
from datetime import UTC, datetime

import pytest
import yaml
from pydantic import ValidationError

from deployments.config import ConfigError
from deployments.config.settings import SlackServeConfig, parse
from slo.admission.tenant_limits import NO_LIMIT, KeyLimit, TenantLimit
from slo.errors import AuthenticationError
from slo.tiers import BACKGROUND, STANDARD

NOW_S = datetime(2030, 1, 1, tzinfo=UTC).timestamp()


@pytest.fixture
def in_file(tmp_path):
    """A configuration with keys in a file."""

    def write(*keys, **more):
        path = tmp_path / "keys.yaml"
        path.write_text(yaml.safe_dump([*keys]))
        return parse({"api_keys_file": str(path), **more})

    return write


def ring_of(config):
    return config.key_source().ring()


@pytest.mark.parametrize(
    ("given", "secret"),
    [
        ({"api_keys": [{"tenant": "a", "key": "0123456789"}]}, "0123456789"),
        ({"api_keys": ["0123456789"]}, "0123456789"),
        ({"prefill": {"engine_kwargs": {"hf_token": "hf_x"}}}, "hf_x"),
        ({"models": {"b": {"decode": {"engine_kwargs": {"hf_token": "hf_x"}}}}}, "hf_x"),
    ],
)
def test_no_refusal_repeats_a_secret_as_serve_shows_it(given, secret):
    """Serve makes the settings itself, and has what pydantic says in its status and its log."""
    with pytest.raises(ValidationError) as refused:
        SlackServeConfig(**given)
    assert secret not in str(refused.value)


def test_keys_come_from_file_and_environment(in_file, monkeypatch):
    monkeypatch.setenv("UMBRA_KEY", "key-of-umbra")
    config = in_file(
        {"tenant": "file", "key": "key-of-file", "highest_tier": "background"},
        api_keys=[{"tenant": "umbra", "key_env": "UMBRA_KEY"}],
    )
    ring = ring_of(config)
    assert ring.tenant("key-of-umbra", NOW_S).name == "umbra"
    assert ring.tenant("key-of-file", NOW_S).highest_tier == BACKGROUND
    with pytest.raises(AuthenticationError):
        ring.tenant("key-of-nobody", NOW_S)


def test_a_key_in_the_configuration_itself_is_refused_and_not_told():
    with pytest.raises(ConfigError, match="the key of tenant 'a' stands in the configuration") as refused:
        parse({"api_keys": [{"tenant": "a", "key": "secret-key-1"}]})
    assert "secret-key-1" not in str(refused.value)
    assert "key_env" in str(refused.value)
    assert "api_keys_file" in str(refused.value)


def test_a_key_that_is_missing_or_shared_is_refused(in_file, tmp_path):
    missing = parse({"api_keys": [{"tenant": "a", "key_env": "NOT_SET_ANYWHERE"}]})
    with pytest.raises(ConfigError, match=r"\$NOT_SET_ANYWHERE, which is not set"):
        missing.key_source()
    shared = in_file({"tenant": "a", "key": "same-key-1"}, {"tenant": "b", "key": "same-key-1"})
    with pytest.raises(ConfigError, match="two tenants have the same key"):
        ring_of(shared)
    path = tmp_path / "keys.yaml"
    for text, told in (("tenant: x\n", "a list of keys"), ("[]", "a key at least"), ("", "a list of keys")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"expected {told}"):
            parse({"api_keys_file": str(path)}).key_source()


@pytest.mark.parametrize("key", [12345678, "hunter2", ["hunter2"], 0.1234567])
def test_a_key_that_is_no_key_is_not_told(key, in_file):
    """Unquoted digits and keys that are too short."""
    for read in (
        lambda: parse({"api_keys": [{"tenant": "a", "key": key}]}),
        lambda: in_file({"tenant": "a", "key": key}).key_source(),
    ):
        with pytest.raises(ConfigError, match="key: ") as refused:
            read()
        assert str(key).strip("[']") not in str(refused.value)


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("tenant: acme\n  key: sk-live-1234: rotated", "line 2, column 20: mapping values are not allowed"),
        ("{tenant: acme, key: sk-live-1234\n- {tenant: b, key: sk-live-5678}", "line 2, column 3"),
        ("tenant: acme\n  key: sk-live-1234\n\texpires: 2027-01-01T00:00:00Z", "line 3, column 1"),
        ("tenant: acme\n  key: @sk-live-1234", "line 2, column 8: found character '@'"),
        ('tenant: acme\n  key: "sk-live-1234', "line 3, column 1: found unexpected end of stream"),
        ("tenant: acme\n  key: *sk-live-1234", "line 2, column 8"),
        ("tenant: acme\n  key: !sk-live-1234", "line 2, column 8"),
        ("tenant: acme\n  key: !sk-live-1234!x", "line 2, column 8"),
        ("tenant: acme\n  key: !!int sk-live-1234", "is not YAML: a date or a number is none"),
        ("tenant: acme\n  key: sk-live-1234\n  key: sk-live-5678", "line 3: a key is given twice, first in"),
        ("{tenant: acme, sk-live-1234: a, sk-live-1234: b}", "line 1: a key is given twice, first in line 1"),
        ("tenant: acme\n  key: sk-live-1234\n  expires: 2026-06-31", "is not YAML: a date or a number"),
        ("sk-live-1234", "api_keys.0: "),
        ("tenant: acme\n  sk-live-1234:", "api_keys.0: unknown key; known are tenant, name, key, "),
        ("tenant: acme\n  sk-live-1234: key", "api_keys.0: unknown key; known are tenant, name, key, "),
        ("{tenant: acme, key: [sk-live-1234]}", "api_keys.0.key: "),
        ("{tenant: acme, name: sk-live-1234+, key: key-of-acme}", "api_keys.0.name: "),
        ("{tenant: acme, key: sk-live-1234, expires: never}", "api_keys.0.expires: "),
        ("{tenant: acme, key_env: sk-live-1234}", "its key from a variable that is not set"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_of_keys_tells_its_place_and_no_key(entry, complaint, tmp_path):
    """Such messages are logged, and Serve shows them as the state of the application."""
    path = tmp_path / "keys.yaml"
    path.write_text(f"- {entry}\n")
    with pytest.raises(ConfigError, match=re.escape(complaint)) as refused:
        parse({"api_keys_file": str(path)}).key_source()
    assert "sk-live" not in str(refused.value)


@pytest.mark.parametrize("entry", ["sk-live-1234", {"tenant": "a", "sk-live-1234": None}])
def test_a_mistake_in_the_configured_keys_tells_its_place_and_no_key(entry):
    with pytest.raises(ConfigError, match=r"api_keys\.0: ") as refused:
        parse({"api_keys": [entry]})
    assert "sk-live" not in str(refused.value)


def test_what_is_wrong_with_an_entry_is_told_with_its_place(in_file):
    keys = {"tenant": "a", "key": "key-of-a-1"}, {"tenant": "b", "key": "key-of-b-1", "expirse": "x"}
    with pytest.raises(ConfigError, match=r"keys\.yaml: api_keys\.1: unknown key; did you mean 'expires'\?"):
        in_file(*keys).key_source()


@pytest.mark.parametrize("blank", ["\n", "\r\n", " \t"])
def test_blanks_around_a_key_are_none_of_it(blank, in_file, monkeypatch):
    """As of a secret that was made with `echo`, or of a block of YAML; the client's are dropped as well."""
    monkeypatch.setenv("K", f"acme-key-1{blank}")
    keys = {"tenant": "file", "key": f" key-of-file{blank}"}
    ring = ring_of(in_file(keys, api_keys=[{"tenant": "acme", "key_env": "K"}]))
    assert ring.tenant("acme-key-1", 0).name == "acme"
    assert ring.tenant("key-of-file", 0).name == "file"


@pytest.mark.parametrize(
    ("value", "complaint"),
    [("", "is empty"), (" \n", "is empty"), ("acme-k1\n", "is shorter than 8 characters")],
)
def test_a_variable_without_a_whole_key_is_refused_and_not_told(value, complaint, monkeypatch):
    monkeypatch.setenv("K", value)
    config = parse({"api_keys": [{"tenant": "acme", "key_env": "K"}]})
    with pytest.raises(
        ConfigError, match=rf"tenant 'acme' takes its key from \$K, which {complaint}"
    ) as refused:
        config.key_source()
    assert "acme-k1" not in str(refused.value)


@pytest.mark.parametrize("key", ["schlüssel-1", "key-of-a\t-1", "key-of-a-1\N{SNOWMAN}"])
def test_a_key_that_no_client_can_send_is_refused(key, in_file):
    with pytest.raises(ConfigError, match="the key of tenant 'a' has a character that no header carries"):
        in_file({"tenant": "a", "key": key}).key_source()


def test_a_key_of_blanks_in_a_file_is_refused(in_file):
    with pytest.raises(ConfigError, match="the key of tenant 'a' is shorter than 8 characters"):
        in_file({"tenant": "a", "key": "abc" + 9 * " "}).key_source()


def test_a_key_expires(in_file):
    config = in_file({"tenant": "a", "key": "key-of-a-1", "expires": "2030-01-01T00:00:00+00:00"})
    assert ring_of(config).tenant("key-of-a-1", NOW_S - 1).name == "a"
    with pytest.raises(AuthenticationError, match="expired"):
        ring_of(config).tenant("key-of-a-1", NOW_S)
    with pytest.raises(ConfigError, match=r"expires: .*timezone"):
        in_file({"tenant": "a", "key": "key-of-a-1", "expires": "2030-01-01T00:00:00"}).key_source()


def test_limits_are_of_the_tenant_whatever_its_keys(in_file, monkeypatch):
    monkeypatch.setenv("KEY_OF_A", "key-of-a-2")
    keys = [
        {"tenant": "a", "key": "key-of-a-1", "limits": {"max_concurrent": 3}},
        {"tenant": "b", "key": "key-of-b-1", "limits": {"tokens_per_s": 100, "burst_tokens": 500}},
        {"tenant": "c", "key": "key-of-c-1"},
    ]
    more = {"api_keys": [{"tenant": "a", "key_env": "KEY_OF_A"}]}
    ring = ring_of(in_file(*keys, **more))
    limits = [ring.tenant(f"key-of-{name}", NOW_S).limit for name in ("a-1", "a-2", "b-1", "c-1")]
    assert limits[:2] == [TenantLimit(max_concurrent=3)] * 2
    assert limits[2:] == [TenantLimit(tokens_per_s=100, burst_tokens=500), NO_LIMIT]
    default = {"admission": {"default_limits": {"output_tokens_per_s": 5}}}
    ring = ring_of(in_file(*keys, **default))
    assert ring.tenant("key-of-c-1", NOW_S).limit == TenantLimit(output_tokens_per_s=5)
    assert ring_of(parse(default)).tenant(None, NOW_S).limit == TenantLimit(output_tokens_per_s=5)
    with pytest.raises(ConfigError, match="tenant 'a' have different limits"):
        ring_of(in_file(*keys, {"tenant": "a", "key": "key-of-a-3", "limits": {"max_concurrent": 4}}))


def test_tenants_share_cached_prefixes_in_groups_only(in_file):
    keys = [{"tenant": name, "key": f"key-of-{name}"} for name in "abcd"]
    keys[1]["cache_group"] = keys[2]["cache_group"] = "a"
    ring = ring_of(in_file(*keys))
    a, b, c, d = (ring.tenant(key["key"], NOW_S).cache_salt for key in keys)
    assert b == c
    assert len({a, b, d}) == 3, "a group has another name than a tenant"


@pytest.mark.parametrize("key", ["tenant", "cache_group"])
@pytest.mark.parametrize("name", [" acme", "acme ", "acme\n", "a\nb", "a\tb", "acme\u00a0", "a\u200bb", " "])
def test_a_name_that_only_looks_like_another_is_refused(key, name, in_file):
    """Limits, the fair part and the cached prefixes of the other would not hold for it."""
    entry = {"tenant": "acme", "key": "key-of-acme", key: name}
    with pytest.raises(ConfigError, match=rf"api_keys\.0\.{key}: give a name without blanks around it"):
        in_file(entry).key_source()
    for plain in ("Acme & Söhne", "acme", "a-b_c.d@e"):
        in_file({**entry, key: plain}).key_source()


def test_salts_stay_when_keys_change(in_file):
    source = in_file({"tenant": "a", "key": "key-of-a-1"}).key_source()
    before = source.ring().tenant("key-of-a-1", NOW_S).cache_salt
    in_file({"tenant": "a", "key": "key-of-a-2"}, {"tenant": "b", "key": "key-of-b-1"})
    assert source.ring().tenant("key-of-a-2", NOW_S).cache_salt == before
    assert source.ring().tenant("key-of-b-1", NOW_S).cache_salt != before


def test_the_tier_of_those_without_keys():
    assert ring_of(parse({})).tenant(None, NOW_S).highest_tier is None
    assert ring_of(parse({"anonymous_tier": "standard"})).tenant(None, NOW_S).highest_tier == STANDARD
    with pytest.raises(ConfigError, match="no tier 'standart'; did you mean 'standard'"):
        parse({"anonymous_tier": "standart"})


def test_no_key_travels_with_the_source(in_file, monkeypatch):
    monkeypatch.setenv("UMBRA_KEY", "key-of-umbra")
    source = in_file(
        {"tenant": "a", "key": "key-of-file"}, api_keys=[{"tenant": "umbra", "key_env": "UMBRA_KEY"}]
    ).key_source()
    assert b"key-of-" not in pickle.dumps((source, source.ring()))


def test_limits_of_a_key_are_those_of_its_name(in_file):
    """So that a key is exchanged without giving its holder twice as much meanwhile."""
    ci = {"tenant": "a", "name": "ci", "key_limits": {"max_concurrent": 2}}
    keys = [
        {**ci, "key": "key-of-ci-old"},
        {**ci, "key": "key-of-ci-new"},
        {"tenant": "a", "name": "web", "key": "key-of-web"},
        {"tenant": "a", "key": "key-of-a-1"},
        {**ci, "tenant": "b", "key": "key-of-b-1"},
    ]
    ring = ring_of(in_file(*keys))
    held = [ring.tenant(key["key"], NOW_S) for key in keys]
    assert [one.key_limit for one in held[1:4]] == [KeyLimit("ci", TenantLimit(max_concurrent=2)), None, None]
    assert held[0] == held[1], "nothing tells them apart"
    assert [one.key_name for one in held] == ["ci", "ci", "web", None, "ci"]
    assert [one.limit for one in held] == [NO_LIMIT] * 5


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"name": None}, "tenant 'a': key_limits goes with name"),
        ({"key_limits": {"max_concurrent": 3}}, "the keys 'ci' of tenant 'a' have different key_limits"),
        ({"key_limits": None}, "the keys 'ci' of tenant 'a' have different key_limits"),
        ({"key_limits": {"weight": 2}}, "unknown key 'weight'"),
        ({"key_limits": {"burst_tokens": 2}}, "burst_tokens goes with tokens_per_s"),
        ({"name": "two words"}, "name: "),
    ],
)
def test_limits_of_a_key_that_cannot_be(in_file, change, complaint):
    one = {"tenant": "a", "name": "ci", "key": "key-of-ci-old", "key_limits": {"max_concurrent": 2}}
    with pytest.raises(ConfigError, match=complaint) as refused:
        ring_of(in_file(one, {**one, "key": "key-of-ci-new", **change}))
    assert "key-of-ci" not in str(refused.value)
