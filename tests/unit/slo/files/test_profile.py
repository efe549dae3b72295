"""A profile with a time that is none is refused by its name."""

import json

import pytest

from slo.files.profile import read_profile


@pytest.mark.parametrize("wrong", ["NaN", "Infinity", "-1"])
@pytest.mark.parametrize("name", ["per_token_s", "fixed_s", "per_pair_s", "handoff_s"])
def test_a_time_that_is_none(tmp_path, name, wrong):
    numbers = {"per_token_s": 1e-4, "fixed_s": 1e-3, "per_pair_s": 0.0, "handoff_s": 0.01}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"format": 4, "predictor": numbers}))
    assert read_profile(path, ValueError).predictor.fixed_s == 1e-3
    path.write_text(json.dumps({"format": 4, "predictor": {**numbers, name: float(wrong)}}))
    with pytest.raises(ValueError, match=rf"profile\.json is not a profile.*{name} is"):
        read_profile(path, ValueError)
