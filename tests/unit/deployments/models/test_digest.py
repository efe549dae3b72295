"""A digest is another one where the KV cache or the tokens would be, and the same for copies of a model."""

import json
import os
import shutil
from pathlib import Path

import pytest

from deployments.config.settings import parse
from deployments.models import digest
from deployments.models.digest import model_digest

TIERS = ("prefill", "decode")


def model(directory, weights=b"weights", **files):
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(weights)
    for name, text in {"config": "{}", "tokenizer": "{}", **files}.items():
        (directory / f"{name}.json").write_text(text)
    return directory


@pytest.fixture
def here(tmp_path):
    """Digests of models that one after the other lie at the same path."""

    def digest_here(files, values=None):
        place = tmp_path / "model"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(files, place)
        return model_digest(str(place), parse({"model": str(place), **(values or {})}))

    return digest_here


def test_a_copy_whose_files_have_other_times_is_the_same_model(here, tmp_path):
    one = model(tmp_path / "one")
    before = here(one)
    for path in one.iterdir():
        os.utime(path, (1, 1))
    (one / "README.md").write_text("read me")
    (one / ".cache").mkdir()
    assert here(one) == before


@pytest.mark.parametrize(
    "other",
    [
        {"weights": b"Weights"},
        {"config": '{"rope_theta": 1}'},
        {"tokenizer": "[]"},
        {"model.safetensors.index": "{}"},
    ],
    ids=str,
)
def test_other_files_are_another_model(here, tmp_path, other):
    assert here(model(tmp_path / "one")) != here(model(tmp_path / "other", **other))


def test_another_place_is_another_model(tmp_path):
    one, other = model(tmp_path / "one"), model(tmp_path / "other")
    assert model_digest(str(one), parse({})) != model_digest(str(other), parse({}))


def test_of_large_weights_pieces_are_read_and_the_end(here, tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "_PIECES", 4)
    weights = bytearray(64 * 4096)
    whole = here(model(tmp_path / "whole", bytes(weights)))
    read = 0
    for place in range(64):
        changed = weights.copy()
        changed[4096 * place + 7] = 1
        read += here(model(tmp_path / f"{place}", bytes(changed))) != whole
    assert read == 5


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ({}, {"dtype": "bfloat16"}, False),
        ({}, {"prefill": {"engine_kwargs": {"hf_overrides": {"rope_theta": 1e6}}}}, False),
        ({}, {"decode": {"engine_kwargs": {"revision": "0123abc"}}}, False),
        ({}, {"decode": {"engine_kwargs": {"kv_cache_dtype": "fp8"}}}, False),
        ({}, {"decode": {"engine_kwargs": {"logits_processors": ["a.B"]}}}, False),
        (
            {},
            {tier: {"engine_kwargs": {"load_format": "dummy"}} for tier in TIERS},
            False,
        ),
        (
            {"prefill": {"engine_kwargs": {"quantization": "fp8"}}},
            {"decode": {"engine_kwargs": {"quantization": "fp8"}}},
            True,
        ),
        (
            {},
            {
                "model_name": "m",
                "max_model_len": 256,
                "pressure": {"enabled": True},
                "prefill": {
                    "replicas": 2,
                    "engine_kwargs": {"max_num_seqs": 7, "load_format": "safetensors"},
                },
                "decode": {"replicas": 2},
            },
            True,
        ),
    ],
    ids=str,
)
def test_what_is_configured_counts_where_it_changes_kv_cache_or_tokens(here, tmp_path, one, other, is_same):
    files = model(tmp_path / "files")
    assert (here(files, one) == here(files, other)) is is_same


@pytest.mark.parametrize(
    ("kv_heads", "one", "other", "is_same"),
    [
        (8, (1, 1), (2, 4), True),
        (8, (8, 8), (1, 2), True),
        (4, (2, 2), (4, 8), False),
        (4, (8, 8), (4, 4), False),
        (4, (8, 8), (4, 8), False),
        (4, (8, 8), (8, 8), True),
        (12, (2, 2), (3, 3), False),
        (12, (3, 3), (3, 6), False),
        (None, (1, 1), (2, 2), False),
        (None, (2, 2), (2, 2), True),
    ],
)
def test_replicas_between_whose_workers_kv_may_not_move_do_not_work_together(
    here, tmp_path, kv_heads, one, other, is_same
):
    heads = {} if kv_heads is None else {"num_attention_heads": 24, "num_key_value_heads": kv_heads}
    files = model(tmp_path / "files", config=json.dumps(heads))
    first, second = (
        here(files, {name: {"tensor_parallel_size": size} for name, size in zip(TIERS, sizes, strict=True)})
        for sizes in (one, other)
    )
    assert (first == second) is is_same


def test_a_hub_id_is_its_own_and_that_of_its_revision(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    pinned = {"prefill": {"engine_kwargs": {"revision": "0123abc"}}}
    digests = {
        model_digest("org/one", parse({"model": "org/one"})),
        model_digest("org/other", parse({"model": "org/other"})),
        model_digest("org/one", parse({"model": "org/one", **pinned})),
    }
    assert len(digests) == 3
    assert not Path("org").exists()
