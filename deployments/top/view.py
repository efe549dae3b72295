"""How `slackserve top` looks: a frame in, rich renderables out.

Pure: reads no clock and asks nobody; `deployments.top.collect` collects what is shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deployments.top.frame import DecodeRow, Frame, PrefillRow

if TYPE_CHECKING:
    _Styles: TypeAlias = Mapping[str, str]

_LONGEST_QUEUE: Final = 20
_SHORTEST_QUEUE: Final = 3
_BAR_WIDTH: Final = 16
_TWO_DIGITS_BELOW_S: Final = 10.0
_MINUTES_FROM_S: Final = 600.0
_MIB: Final = 2**20
_GIB: Final = 2**30
_MONITOR_LINES: Final = 2
"""Besides one for each tier."""
_TIER_STYLES: Final = ("magenta", "cyan", "blue", "green", "yellow", "white", "bright_cyan", "bright_blue")
"""Of the tiers, the most valuable first."""


def view(frame: Frame, height: int | None = None) -> RenderableType:
    """Draw a frame; queues are cut so that it fits into `height` lines, as far as that goes."""
    longest = _LONGEST_QUEUE if height is None else _longest_queue(frame, height)
    styles = dict(zip(frame.tiers, _TIER_STYLES, strict=False))
    parts: list[RenderableType] = [_header(frame)]
    parts += [_prefill(replica, longest, styles) for replica in frame.prefill]
    if not frame.prefill:
        parts.append(_nobody("prefill", frame))
    parts.append(_decode(frame.decode) if frame.decode else _nobody("decode", frame))
    if frame.monitored:
        parts.append(_monitor(frame.monitor, styles))
    return Group(*parts)


def _longest_queue(frame: Frame, height: int) -> int:
    """Lines for each queue when everything else has what it needs."""
    fixed = 2 + len(frame.decode) + (_MONITOR_LINES + len(frame.tiers) if frame.monitored else 0)
    for replica in frame.prefill:
        suspended = () if replica.work is None else replica.work["suspended"]
        fixed += 5 + (len(suspended) + 1 if suspended else 0)
    return max(_SHORTEST_QUEUE, (height - fixed) // max(1, len(frame.prefill)))


def _header(frame: Frame) -> RenderableType:
    state = {
        True: Text("ready", style="green"),
        False: Text("not ready", style="yellow"),
        None: Text("router not answering", style="red"),
    }[frame.ready]
    line = Table.grid(expand=True)
    line.add_column()
    line.add_column(justify="right")
    name = Text.assemble(("SlackServe", "bold"), "  ", frame.model, "  ", state)
    line.add_row(name, Text(f"{frame.taken_at:%H:%M:%S}", style="dim"))
    return line


def _nobody(tier: str, frame: Frame) -> Text:
    why = "unknown until the router answers" if frame.ready is None else "no replica has reported yet"
    return Text(f"{tier}: {why}", style="yellow")


def _prefill(replica: PrefillRow, longest: int, styles: _Styles) -> Panel:
    title = Text.assemble(("prefill ", "bold"), replica.replica)
    load = Text(f"KV {replica.kv_usage:.0%}")
    if (work := replica.work) is None:
        had = f"{replica.outstanding} outstanding, {replica.outstanding_tokens:,} tokens"
        body: RenderableType = Text.assemble(
            ("not answering", "red"), f"; last report {_seconds(replica.silent_s)} ago: {had}"
        )
        return _panel(body, title, load, "red")
    parts = [_running(work["step"], styles, preemptible=work["preemptible"])]
    if work["queue"]:
        parts.append(_queue(work, longest, styles))
    if work["suspended"]:
        parts.append(_suspended(work, styles))
    if not work["preemptible"]:
        load = Text.assemble("steps cannot be stopped, ", load)
    if not replica.reports:  # as when its engine has died
        load = Text.assemble((f"no report for {_seconds(replica.silent_s)}", "red"), ", ", load)
    return _panel(Group(*parts), title, load, "none")


def _panel(body: RenderableType, title: Text, load: Text, style: str) -> Panel:
    return Panel(
        body,
        title=title,
        title_align="left",
        subtitle=load,
        subtitle_align="right",
        border_style=style,
    )


def _running(step: Mapping[str, Any] | None, styles: _Styles, *, preemptible: bool) -> RenderableType:
    if step is None:
        return Text("idle", style="dim")
    progress, remaining_s, about = float(step["progress"]), float(step["remaining_s"]), ""
    if not preemptible and progress == 0.0 and remaining_s > 0.0:  # it cannot tell how far it is
        total_s, about = remaining_s, "≈ "
        remaining_s = max(0.0, total_s - step["running_for_s"])
        progress = 1.0 - remaining_s / total_s
    table = _table("running", "", "done", "tokens", "to go", "job")
    table.add_row(
        _tiers(step["jobs"], styles),
        _bar(progress),
        f"{about}{progress:.0%}",
        f"{step['tokens']:,}",
        f"{about}{_seconds(remaining_s)}",
        Text(", ".join(job["job"] for job in step["jobs"]), style="dim"),
    )
    return table


def _queue(work: Mapping[str, Any], longest: int, styles: _Styles) -> Table:
    queue = work["queue"]
    suspended = {job["job"] for step in work["suspended"] for job in step["jobs"]}
    shown = queue if len(queue) <= longest else queue[: longest - 1]
    table = _table(f"waiting ({len(queue):,})", "tokens", "budget", "slack", "job")
    for entry in shown:
        job = Text(entry["job"], style="dim")
        if entry["job"] in suspended:
            job = Text.assemble(("suspended ", "yellow"), job)
        budget_s = entry["budget_s"]
        budget = Text("none", style="dim") if budget_s is None else Text(_seconds(budget_s))
        table.add_row(
            _tier(entry["tier"], styles), f"{entry['tokens']:,}", budget, _slack(entry["slack_s"]), job
        )
    if len(shown) < len(queue):
        table.add_row(Text(f"… and {len(queue) - len(shown):,} more", style="dim"))
    return table


def _suspended(work: Mapping[str, Any], styles: _Styles) -> Table:
    running = [] if work["step"] is None else work["step"]["jobs"]
    tiers = {job["job"]: job["tier"] for job in (*running, *work["queue"])}
    table = _table("suspended", "done", "tokens", "for", "kept/rank", "preempted for")
    for step in work["suspended"]:
        other = step["preempted_by"]
        tier = f"{tiers[other]} " if other in tiers else ""
        table.add_row(
            _tiers(step["jobs"], styles),
            f"{step['progress']:.0%}",
            f"{step['tokens']:,}",
            _seconds(step["for_s"]),
            _bytes(step["bytes"]),
            Text.assemble(tier, (other, "dim")) if other else Text("nobody"),
        )
    return table


def _decode(replicas: Sequence[DecodeRow]) -> Table:
    table = _table("decode", "", "KV use", "running", "last report")
    for replica in replicas:
        report = Text(f"{_seconds(replica.silent_s)} ago", style="dim")
        if not replica.reports:
            report = Text(f"not answering for {_seconds(replica.silent_s)}", style="red")
        usage = replica.kv_usage
        table.add_row(replica.replica, _bar(usage), f"{usage:.0%}", str(replica.running), report)
    return table


def _monitor(state: Mapping[str, Any] | None, styles: _Styles) -> RenderableType:
    """Always of the same height, so that the picture stays in its place."""
    table = _table("SLO", "target", "attained", "burn, long", "burn, short", "shed", "TTFT p50, p95, p99")
    for tier in styles:
        if state is None or (each := state["tiers"].get(tier)) is None:
            table.add_row(_tier(tier, styles), *"-----", Text("-", style="dim"))
            continue
        shed = state["policy"]["shed"].get(tier, 0.0)
        attained, spread = each["attained"], each["ttft"]
        style = "red" if each["at_risk"] else "none"
        table.add_row(
            _tier(tier, styles),
            f"{each['target']:.1%}",
            Text("-", style="dim") if attained is None else Text(f"{attained:.1%}", style=style),
            f"{each['burn']['long']:.1f}",
            Text(f"{each['burn']['short']:.1f}", style=style),
            Text(f"{shed:.0%}", style="yellow" if shed else "none"),
            Text("-" if spread is None else ", ".join(_seconds(value) for value in spread.values())),
        )
    return Group(table, _policy(state))


def _policy(state: Mapping[str, Any] | None) -> Text:
    if state is None:
        return Text("SLO monitor not answering; the last policy holds", style="red", no_wrap=True)
    policy, error = state["policy"], state["error"]
    parts = [f"policy {policy['version']}", state["reason"].replace("_", " ")]
    if policy["reserved"]:
        parts.append(f"{policy['reserved']:.0%} reserved")
    if error is not None:
        parts.append(f"predictions off by {error['mape']:.0%}, p90 {error['p90']:.0%}")
    if (late := state.get("ttft_error")) is not None:
        parts.append(f"first tokens {late['mape']:.0%}, p90 {late['p90']:.0%}")
    line = Text("  ".join(parts), style="dim", no_wrap=True, overflow="ellipsis")
    if refused := state.get("metrics_refused"):
        line = Text.assemble((f"metrics not exported: {refused}  ", "red"), line)
        line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _table(first: str, *names: str) -> Table:
    """Columns of which the first stands left, the last takes the rest, and those between stand right."""
    table = Table(box=None, expand=True, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in names[:-1]:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(names[-1], no_wrap=True, overflow="ellipsis", ratio=1)
    return table


def _bar(fraction: float) -> ProgressBar:
    return ProgressBar(total=1.0, completed=fraction, width=_BAR_WIDTH)


def _tiers(jobs: Sequence[Mapping[str, Any]], styles: _Styles) -> Text:
    """How many jobs of which tier, in the order in which they stand."""
    if not jobs:
        return Text("warm-up", style="dim")
    counts = Counter(str(job["tier"]) for job in jobs)
    parts = [
        Text.assemble(f"{count} " if len(jobs) > 1 else "", _tier(tier, styles))
        for tier, count in counts.items()
    ]
    return Text(", ").join(parts)


def _tier(tier: str, styles: _Styles) -> Text:
    """A tier's name; a job that the replica has not accepted, or not any more, has none."""
    return Text(tier, style=styles.get(tier, "none")) if tier else Text("-", style="dim")


def _slack(slack_s: float | None) -> Text:
    if slack_s is None:
        return Text("none", style="dim")
    sign, style = ("+", "green") if slack_s >= 0 else ("-", "red")
    return Text(f"{sign}{_seconds(abs(slack_s))}", style=style)


def _seconds(seconds: float) -> str:
    if abs(seconds) < _TWO_DIGITS_BELOW_S:
        return f"{seconds:.2f} s"
    return f"{seconds:.0f} s" if abs(seconds) < _MINUTES_FROM_S else f"{seconds / 60:.0f} min"


def _bytes(size: int) -> str:
    return f"{size / _MIB:.1f} MiB" if size < _GIB else f"{size / _GIB:.1f} GiB"
