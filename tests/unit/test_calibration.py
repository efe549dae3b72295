import json

import pytest

from deployments.calibration import load_profile, save_profile, sweep
from deployments.config import ConfigError


def test_a_sweep_fits_what_it_measures_and_survives_the_file(tmp_path):
    calls = []

    def measure(tokens, _=0):
        calls.append(tokens)
        return 0.03 + 0.0002 * tokens

    calibration = sweep(measure, [32, 512, 2048], repeats=2)
    assert calls == [n for n in (32, 512, 2048) for _ in range(3)], "each length is warmed up once"
    assert calibration.fit.r_squared == pytest.approx(1.0)
    path = tmp_path / "deep" / "profile.json"
    save_profile(path, calibration, {"model": "tiny"})
    assert load_profile(path) == calibration.fit.predictor
    assert json.loads(path.read_text())["about"] == {"model": "tiny"}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "predictor": {"x": 1}}', '{"format": 99}']
)
def test_what_is_not_a_profile_is_refused(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="profile"):
        load_profile(path)


def test_a_missing_profile_says_how_to_write_one(tmp_path):
    with pytest.raises(ConfigError, match="slackserve calibrate"):
        load_profile(tmp_path / "none.json")
