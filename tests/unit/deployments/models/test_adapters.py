"""All adapters fit into one pass of an engine, and one that could not be loaded is refused by name."""

import errno
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from deployments.config import ConfigError
from deployments.models.adapters import adapter_kwargs


@pytest.fixture
def saved(tmp_path):
    """The directory of an adapter as PEFT saves it, but for what is said of it."""

    def save(name, **described):
        (tmp_path / name).mkdir()
        usual = {"peft_type": "LORA", "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(usual | described))
        save_file({"lora_A": np.zeros((8, 8))}, tmp_path / name / "adapter_model.safetensors")
        return str(tmp_path / name)

    return save


def test_without_adapters_the_engines_are_started_as_ever():
    assert adapter_kwargs({}, 64, "model") == {}


def test_all_adapters_fit_into_one_pass_and_the_largest_rank_has_room(saved):
    kwargs = adapter_kwargs({"a": saved("a", r=8), "b": saved("b", r=24)}, None, "model")
    assert kwargs["enable_lora"]
    assert (kwargs["max_loras"], kwargs["max_lora_rank"]) == (2, 32)
    assert [(one.name, one.path.rpartition("/")[2]) for one in kwargs["lora_modules"]] == [
        ("a", "a"),
        ("b", "b"),
    ]


@pytest.mark.parametrize(("max_rank", "room"), [(None, 16), (64, 64)])
def test_of_an_adapter_that_is_fetched_the_rank_is_what_one_says(max_rank, room):
    kwargs = adapter_kwargs({"a": "org/a"}, max_rank, "model")
    assert kwargs["max_lora_rank"] == room
    assert kwargs["lora_modules"][0].path == "org/a"


def test_an_adapter_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    def refused(_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refused)
    with pytest.raises(ConfigError, match=r"lora.adapters.a: .* cannot be read \(Permission denied\)"):
        adapter_kwargs({"a": str(tmp_path)}, None, "model")


def test_what_cannot_be_an_adapter_is_named(saved, tmp_path):
    with pytest.raises(ConfigError, match="'model' is the name of the model"):
        adapter_kwargs({"model": "org/a"}, None, "model")
    with pytest.raises(ConfigError, match=r"lora.adapters.a: .* has no adapter_config.json"):
        adapter_kwargs({"a": str(tmp_path)}, None, "model")
    for where in ("adapters/of/mine", "org/a ", "s3://bucket/a", "~no-such-user-here/a"):
        with pytest.raises(ConfigError, match=rf"lora.adapters.a: .*{where}"):
            adapter_kwargs({"a": where}, None, "model")
    with pytest.raises(ConfigError, match=r"lora.adapters.a: .* does not say its rank"):
        adapter_kwargs({"a": saved("a", peft_type="PREFIX_TUNING")}, None, "model")
    with pytest.raises(ConfigError, match=r"lora.adapters.d: .* does not say its rank"):
        adapter_kwargs({"d": saved("d", r="x")}, None, "model")
    with pytest.raises(ConfigError, match=r"lora.max_rank: the rank of 'b' is 32, and room is kept for 16"):
        adapter_kwargs({"b": saved("b", r=32)}, 16, "model")
    with pytest.raises(ConfigError, match=r"lora.adapters.c: its rank is 1024, and vLLM takes at most 512"):
        adapter_kwargs({"c": saved("c", r=1024)}, None, "model")


@pytest.mark.parametrize(
    ("described", "complaint"),
    [
        ({"use_dora": True}, "vLLM does not yet support DoRA"),
        ({"modules_to_save": ["embed_tokens"]}, "vLLM only supports modules_to_save being None"),
        ({"bias": "all"}, "Adapter bias is not supported"),
        ({"r": 0}, "must be a positive integer"),
        ({"r": -4}, "must be a positive integer"),
        ({"r": 16.9}, "does not say its rank"),
        ({"lora_alpha": "x"}, "vLLM does not load it"),
    ],
)
def test_an_adapter_that_vllm_would_not_load_is_refused_before_any_engine_loads_a_model(
    described, complaint, saved
):
    places = {"good": saved("good", r=8), "mine": saved("mine", **{"r": 16} | described)}
    with pytest.raises(ConfigError, match=rf"lora\.adapters\.mine: .*{complaint}"):
        adapter_kwargs(places, None, "model")


@pytest.mark.parametrize(
    ("ruin", "complaint"),
    [
        (Path.unlink, "has no weights, as adapter_model.safetensors"),
        (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "cannot be read"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "cannot be read"),
    ],
    ids=["absent", "pointer", "cut"],
)
def test_an_adapter_without_its_weights_is_refused(ruin, complaint, saved, tmp_path):
    place = saved("mine", r=16)
    ruin(tmp_path / "mine" / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=rf"lora\.adapters\.mine: .*{complaint}"):
        adapter_kwargs({"mine": place}, None, "model")


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_weights_in_pytorchs_own_form_are_left_to_vllm(name, saved, tmp_path):
    place = saved("mine", r=16)
    (tmp_path / "mine" / "adapter_model.safetensors").rename(tmp_path / "mine" / name)
    assert adapter_kwargs({"mine": place}, None, "model")["max_loras"] == 1
