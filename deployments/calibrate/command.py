"""`slackserve calibrate`: measures a running deployment and writes a profile, or tests one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deployments.calibrate.plan import default_lengths, handoff_lengths, lengths_to_check, prefixed
from deployments.calibrate.profile import (
    WORST_MAPE,
    Calibration,
    MeasurePrefill,
    check_handoffs,
    check_prefills,
    measure_handoffs,
    profile_of,
    save_profile,
    sweep,
    with_handoff_s,
    with_handoffs,
)
from deployments.config import ConfigError
from deployments.options import (
    ApplicationOption,
    ModelOption,
    check_file_and_directory,
    finite,
    refuse_given,
    writing,
)
from slo.predict.handoff import HandoffSample
from slo.predict.measured_on import ON_HOST, Measurable
from slo.predict.prediction_error import PredictionError
from slo.predict.prefill_time import PrefillPredictor, Sample

if TYPE_CHECKING:
    from rich.status import Status

    from deployments.calibrate.run import Measuring

_console = Console(stderr=True)


def calibrate(  # noqa: PLR0913, PLR0917 - an option each
    ctx: typer.Context,
    output: Annotated[Path | None, typer.Option(help="Where to write the profile.")] = None,
    check: Annotated[Path | None, typer.Option(help="Test this profile instead; writes nothing.")] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Prompt lengths to sweep, tokens; by default up to the model's.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each length.")] = 3,
    handoff_ms: Annotated[
        float | None,
        typer.Option(callback=finite, min=0.001, help="Prefill end to first token, instead of measuring it."),
    ] = None,
    prompts: Annotated[int, typer.Option(min=2, max=64, help="How many prompts --check sends.")] = 12,
    seed: Annotated[int, typer.Option(help="The lengths of those follow from it.")] = 0,
    model: ModelOption = None,
    application: ApplicationOption = None,
) -> None:
    """Measure prefills, handoffs and KV transfers of the running deployment; it should be idle."""
    sizes = None if lengths is None else _lengths(lengths)
    if (output is None) == (check is None):
        raise ConfigError("calibrate: give --output, to write a profile, or --check, to test one")
    if output is None:
        refuse_given(ctx, ("lengths", "repeats", "handoff_ms"), "with --check", ConfigError)
    else:
        refuse_given(ctx, ("prompts", "seed"), "without --check", ConfigError)
        check_file_and_directory("--output", output, ConfigError)
    from deployments.calibrate.run import Measuring  # noqa: PLC0415 - imports Ray
    from deployments.local.running import NotRunningError, connect  # noqa: PLC0415

    try:
        measuring = Measuring(connect(model, application))
    except NotRunningError as error:
        raise ConfigError(f"calibrate: {error}") from None
    about = measuring.measurable()
    if check is not None:
        pairs = lengths_to_check(about.max_model_len, about.block_tokens, prompts, seed)
        _check(check, measuring, about, pairs)
    elif output is not None:
        sizes = sizes or list(default_lengths(about.max_model_len))
        calibration = _measure(measuring, about, sizes, repeats, handoff_ms)
        told = {**asdict(about.subject), "max_model_len": about.max_model_len, "lengths": sizes}
        _show(calibration, about)
        with writing("--output", output, ConfigError):
            save_profile(output, calibration, told | {"repeats": repeats}, about.kv_bytes_per_token)
        _console.print(f"written to {output}", highlight=False)


def _measure(
    measuring: Measuring, about: Measurable, sizes: Sequence[int], repeats: int, handoff_ms: float | None
) -> Calibration:
    if (longest := max(sizes)) >= about.max_model_len:
        raise ConfigError(
            f"--lengths: {longest} is not below the model's length, which is {about.max_model_len}"
        )
    handoffs: Sequence[HandoffSample] = ()
    if handoff_ms is None:
        with _console.status("measuring handoffs"):  # first: if they cannot be, no sweep of minutes is lost
            lengths = handoff_lengths(sizes, about.max_model_len)
            handoffs = measure_handoffs(measuring.handoff, lengths, repeats)
    behind = prefixed(sizes, about.max_model_len, about.block_tokens)
    with _console.status("measuring prefills") as status:
        has_floor = about.subject.accelerator != ON_HOST
        calibration = sweep(_shown(measuring, status), sizes, repeats, behind, has_floor=has_floor)
    if handoff_ms is not None:
        return with_handoff_s(calibration, handoff_ms / 1e3)
    return with_handoffs(calibration, handoffs)


def _shown(measuring: Measuring, status: Status) -> MeasurePrefill:
    def prefill_s(tokens: int, context_tokens: int) -> float:
        status.update(f"measuring a prefill of {tokens} tokens behind {context_tokens}")
        return measuring.prefill_s(tokens, context_tokens)

    return prefill_s


def _show(calibration: Calibration, about: Measurable) -> None:
    fit, curve = calibration.fit, calibration.fit.predictor
    _console.print(_prefills(calibration.samples, curve))
    lines = [
        (
            f"prefill = max({curve.floor_s * 1e3:.2f} ms, {curve.fixed_s * 1e3:.2f} ms "
            f"+ {curve.per_token_s * 1e3:.4f} ms · tokens "
            f"+ {curve.per_pair_s * 1e9:.3f} ms · million pairs), R² {fit.r_squared:.5f}, MAPE {fit.mape:.1%}"
        )
    ]
    if (transfer := calibration.transfer) is not None:
        per_token_s, size_bytes = transfer.per_token_s, about.kv_bytes_per_token
        rate = (
            f" at {size_bytes / per_token_s / 1e9:.2f} GB/s" if per_token_s > 0 else ", too fast to measure"
        )
        lines += [
            f"prefill's end to first token = {curve.handoff_s * 1e3:.2f} ms",
            f"KV transfer = {transfer.latency_s * 1e3:.2f} ms + tokens · {size_bytes:,} bytes{rate}",
        ]
    for line in lines:
        _console.print(line, highlight=False, soft_wrap=True)
    _warn(fit.mape)


def _check(path: Path, measuring: Measuring, about: Measurable, pairs: Sequence[tuple[int, int]]) -> None:
    profile = profile_of(path, about.subject)
    with _console.status("measuring prefills") as status:
        samples, error = check_prefills(profile.predictor, _shown(measuring, status), pairs)
    _console.print(_prefills(samples, profile.predictor))
    _tell("prefill", error)
    if profile.predictor.handoff_s > 0:
        lengths = handoff_lengths([tokens for tokens, _ in pairs], about.max_model_len)
        with _console.status("measuring handoffs"):
            for tokens in lengths:
                measuring.handoff(tokens)
            handoffs = check_handoffs(profile.predictor.handoff_s, measuring.handoff, lengths)
        _tell("handoff", handoffs)
    _warn(error.mape)


def _prefills(samples: Sequence[Sample], predictor: PrefillPredictor) -> Table:
    table = Table("tokens", "behind", "measured ms", "residual ms", "of measured")
    for sample in samples:
        residual_s = sample.measured_s - predictor.prefill_s(sample.tokens, sample.context_tokens)
        table.add_row(
            str(sample.tokens),
            str(sample.context_tokens),
            f"{sample.measured_s * 1e3:.1f}",
            f"{residual_s * 1e3:+.1f}",
            f"{residual_s / sample.measured_s:+.1%}",
        )
    return table


def _tell(what: str, error: PredictionError) -> None:
    _console.print(
        f"{what}: MAPE {error.mape:.1%}, p90 {error.p90:.1%} of {error.samples} measured", highlight=False
    )


def _warn(mape: float) -> None:
    if mape > WORST_MAPE:
        _console.print(
            Text(
                f"Predictions are off by {mape:.1%} on average, more than {WORST_MAPE:.0%}: was the "
                "deployment idle, and the machine left alone? Measure again, with more --repeats.",
                style="yellow",
            )
        )


def _lengths(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if len(set(sizes)) < 2 or min(sizes) < 1:  # noqa: PLR2004 - a line needs two points
        msg = f"--lengths: {text!r} is not at least two different positive numbers, like 32,512,2048"
        raise ConfigError(msg)
    return sizes
