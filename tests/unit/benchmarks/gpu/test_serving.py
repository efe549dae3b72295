"""What the whole application is served with on one GPU, and on a host without one."""

import pytest

from benchmarks.gpu import engine, serving
from benchmarks.gpu.serving import FULL, MODES, settings
from deployments.config.settings import SlackServeConfig
from deployments.engines.arguments import check_engine_kwargs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_gpu", [False, True])
def test_what_the_whole_application_is_served_with_is_a_configuration(tmp_path, mode, is_gpu):
    given = settings(FULL, tmp_path, mode, is_gpu=is_gpu)
    config = SlackServeConfig.model_validate(given)
    check_engine_kwargs(config)
    assert config.accelerator == ("cuda" if is_gpu else "cpu")
    assert config.prefill.gpus_per_worker + config.decode.gpus_per_worker == (1 if is_gpu else 2)


def test_modes_behind_one_that_fails_are_measured(tmp_path, monkeypatch, capsys):
    asked = []

    def serve(plan, mode, directory, out, *, is_gpu):
        asked.append(mode)
        raise RuntimeError("the server did not come up")

    monkeypatch.setattr(serving, "serve", serve)
    monkeypatch.setattr("sys.argv", ["serving", "--tiny", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="not measured: resume, compiled, off"):
        serving.main()
    assert asked == [*MODES]
    assert "resume: RuntimeError: the server did not come up" in capsys.readouterr().err


def test_arms_behind_one_that_fails_are_measured(tmp_path, monkeypatch):
    asked = []

    def in_own_process(_, arm, *rest):
        asked.append(arm)
        if arm == "compiled":
            raise RuntimeError("refused")
        return tmp_path

    monkeypatch.setattr(engine, "in_own_process", in_own_process)
    monkeypatch.setattr("sys.argv", ["engine", "--tiny", "--arm", "compiled", "--arm", "stock"])
    with pytest.raises(SystemExit, match="not measured: compiled"):
        engine.main()
    assert asked == ["compiled", "stock"]
