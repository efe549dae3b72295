"""What the whole application is served with on one GPU, and on a host without one."""

import pytest

from benchmarks.gpu.serving import FULL, MODES, settings
from deployments.config.settings import SlackServeConfig
from deployments.engine_kwargs import check_engine_kwargs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_gpu", [False, True])
def test_what_the_whole_application_is_served_with_is_a_configuration(tmp_path, mode, is_gpu):
    given = settings(FULL, tmp_path, mode, is_gpu=is_gpu)
    config = SlackServeConfig.model_validate(given)
    check_engine_kwargs(config)
    assert config.accelerator == ("cuda" if is_gpu else "cpu")
    assert config.prefill.gpus_per_worker + config.decode.gpus_per_worker == (1 if is_gpu else 2)
