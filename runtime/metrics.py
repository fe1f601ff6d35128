"""The metrics actor: every other actor reports into it, and the HTTP front asks it for the Prometheus text."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

import actors

from .config import Config
from .faults import open_door
from .peers import walk
from .report import BUCKETS_S, Report


class Figure(NamedTuple):
    kind: str  # gauge | counter | histogram
    help: str
    label: tuple[str, str] | None = None  # a fixed label, where several figures make one metric
    metric: str = ""  # its metric's name, where that is not the figure's


def _kv(state: str) -> Figure:
    return Figure("gauge", "KV pages by state", ("state", state), "kv_pages")


def _phase(phase: str) -> Figure:
    return Figure("counter", "Seconds spent by phase of the step loop", ("phase", phase), "step_phase_seconds")


FIGURES: dict[str, Figure] = {
    "requests_running": Figure("gauge", "Requests in the running batch"),
    "requests_waiting": Figure("gauge", "Requests that wait for admission"),
    "kv_pages_free": _kv("free"),
    "kv_pages_cached": _kv("cached"),
    "kv_pages_used": _kv("used"),
    "steps": Figure("counter", "Steps of the engine"),
    "prompt_tokens": Figure("counter", "Prompt tokens of admitted requests"),
    "cached_tokens": Figure("counter", "Prompt tokens found in the prefix cache"),
    "generated_tokens": Figure("counter", "Tokens generated"),
    "retractions": Figure("counter", "Requests put back for want of KV pages"),
    "evicted_pages": Figure("counter", "Cached pages evicted"),
    "aborted_requests": Figure("counter", "Requests aborted before their end"),
    "aborted_at": Figure("gauge", "CLOCK_MONOTONIC in seconds when a request was last aborted", metric="last_abort"),
    "phase_schedule_s": _phase("schedule"),
    "phase_launch_s": _phase("launch"),
    "phase_collect_s": _phase("collect"),
    "phase_output_s": _phase("output"),
    "phase_idle_s": _phase("idle"),
    "requests_open": Figure("gauge", "Requests that clients wait for"),
    "requests_stop": Figure("counter", "Requests by how they ended", ("reason", "stop"), "requests"),
    "requests_length": Figure("counter", "Requests by how they ended", ("reason", "length"), "requests"),
    "requests_abort": Figure("counter", "Requests by how they ended", ("reason", "abort"), "requests"),
    "requests_error": Figure("counter", "Requests by how they ended", ("reason", "error"), "requests"),
    "requests_resumed": Figure("counter", "Resubmissions of live requests to a new generation"),
    "garbage_frames": Figure("counter", "Frames on a data socket that were no message"),
    "time_to_first_token": Figure("histogram", "Seconds from a request's arrival to its first token"),
    "inter_token": Figure("histogram", "Seconds between a request's tokens"),
    "request_duration": Figure("histogram", "Seconds from a request's arrival to its end"),
}


class Reports:
    """The last report of each source, as a Prometheus collector."""

    def __init__(self) -> None:
        self.by_source: dict[str, Report] = {}
        self.tree: actors.Snapshot | None = None

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Any] = {}
        for report in self.by_source.values():
            for name, value in report.values.items():
                if (figure := FIGURES.get(name)) is not None:
                    labels = [report.source, *([figure.label[1]] if figure.label else [])]
                    self._family(families, name, figure).add_metric(labels, value)
            for name, (counts, total) in report.histograms.items():
                if (figure := FIGURES.get(name)) is not None:
                    running, buckets = 0, []
                    for bound, count in zip([*map(str, BUCKETS_S), "+Inf"], counts, strict=True):
                        running += count
                        buckets.append((bound, running))
                    self._family(families, name, figure).add_metric([report.source], buckets, total)
        yield from families.values()
        if self.tree is not None:
            up = GaugeMetricFamily("runtime_actor_up", "1 where the actor runs", labels=["actor"])
            restarts = CounterMetricFamily("runtime_actor_restarts", "Restarts of the actor", labels=["actor"])
            for actor in walk(self.tree):
                up.add_metric([actor.path], float(actor.state == "running"))
                restarts.add_metric([actor.path], actor.restarts)
            yield up
            yield restarts

    @staticmethod
    def _family(families: dict[str, Any], name: str, figure: Figure) -> Any:
        metric = "runtime_" + (figure.metric or name) + ("_seconds" if figure.kind == "histogram" else "")
        if metric not in families:
            make = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
            labels = ["source", *([figure.label[0]] if figure.label else [])]
            families[metric] = make[figure.kind](metric, figure.help, labels=labels)
        return families[metric]


async def metrics(ctx: actors.Context, config: Config) -> None:
    """The actor. Casts: ``Report``. Calls: ``render`` -> bytes in the Prometheus text format."""
    reports = Reports()
    registry = CollectorRegistry()
    registry.register(reports)

    async def render(payload: None, info: actors.CallInfo) -> bytes:
        reports.tree = await ctx.snapshot()
        return generate_latest(registry)

    ctx.on("render", render)
    async with open_door(ctx, config):
        ctx.started()
        async for report in ctx.inbox:
            known = report if isinstance(report, Report) else msgspec.convert(report, Report)
            reports.by_source[known.source] = known
