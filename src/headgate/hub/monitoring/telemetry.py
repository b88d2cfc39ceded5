"""OpenTelemetry: the table of metrics, sent to a collector periodically. Needs the packages of `headgate[otel]`.

The SDK collects and sends in a thread of its own; metrics are read in the hub's loop, as for Prometheus. Numbers are
observable instruments. The SDK has no instrument for a histogram that was filled elsewhere, so histograms are added on
export.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final, TypeVar
from uuid import uuid4

import structlog
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
    ScopeMetrics,
)
from opentelemetry.sdk.metrics.export import Metric as Exported
from opentelemetry.sdk.resources import OTELResourceDetector, Resource

from headgate._version import VERSION
from headgate.errors import HeadgateError
from headgate.hub.monitoring.metrics import METRICS, Distribution, Labels, Metric, MetricSources

T = TypeVar("T")

_SCOPE: Final = "headgate"
_PATH: Final = "v1/metrics"  # where collectors take metrics
_SECONDS: Final = "_seconds"
_LOOP_TIMEOUT: Final = 5.0  # seconds that the SDK's thread waits for the hub's loop
_LAST_EXPORT_TIMEOUT: Final = 2.0  # seconds for the last export, at the end

_log = structlog.get_logger("headgate.hub")
_exporter_log = logging.getLogger(OTLPMetricExporter.__module__)


def name_and_unit(metric: Metric) -> tuple[str, str]:
    """The name of a metric in OpenTelemetry: an exporter to Prometheus makes the original name of it."""
    name = metric.name.removesuffix("_total")
    unit = "s" if name.endswith(_SECONDS) else ""
    return name.removesuffix(_SECONDS).replace("_", ".", 1), unit


class Telemetry:
    """Sends a hub's metrics to a collector until it is closed. A collector that is away holds nothing up."""

    def __init__(self, sources: MetricSources, endpoint: str) -> None:
        self._sources: Final = sources
        self._loop: Final = asyncio.get_running_loop()
        self._closed = False
        self._exporter: Final = _Exporter(endpoint, self._histograms)
        try:
            self._reader: Final = PeriodicExportingMetricReader(self._exporter)
        except ValueError as error:
            raise HeadgateError(f"OTEL_METRIC_EXPORT_INTERVAL: expected milliseconds above 0, got: {error}") from error
        self._began: Final = time.time_ns()
        meter = MeterProvider([self._reader], _resource(), shutdown_on_exit=False).get_meter(_SCOPE, VERSION)
        for metric in METRICS:
            if metric.kind != "histogram":
                make = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
                name, unit = name_and_unit(metric)
                make(name, [self._observer(metric)], unit, metric.about)

    async def close(self) -> None:
        """Send the last metrics, if the collector can be reached."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._exporter.failing:
            self._exporter.shutdown()  # otherwise it may wait for its next attempt first
        self._reader.shutdown(_LAST_EXPORT_TIMEOUT * 1000)  # the provider's may raise before it starts
        self._closed = True

    # In the SDK's thread ---------------------------------------------------------------------------------------------

    def _in_loop(self, read: Callable[[MetricSources], T]) -> T:
        answer: Future[T] = Future()

        def work() -> None:
            try:
                answer.set_result(read(self._sources))
            except Exception as error:  # noqa: BLE001 - it is raised in the other thread
                answer.set_exception(error)

        self._loop.call_soon_threadsafe(work)
        return answer.result(_LOOP_TIMEOUT)

    def _observer(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_options: CallbackOptions) -> Iterator[Observation]:
            if self._closed:  # the thread may outlive the shutdown
                return
            found = self._in_loop(metric.read)
            assert not isinstance(found, Distribution)
            for labels, value in found.items():
                yield Observation(value, _attributes(metric, labels))

        return observe

    def _histograms(self) -> list[Exported]:
        found = []
        for metric in METRICS:
            if metric.kind == "histogram":
                distribution = self._in_loop(metric.read)
                assert isinstance(distribution, Distribution)
                found.append(self._histogram(metric, distribution))
        return found

    def _histogram(self, metric: Metric, found: Distribution) -> Exported:
        name, unit = name_and_unit(metric)
        nothing: Any = None  # neither the minimum nor the maximum is known
        point = HistogramDataPoint(
            attributes={},
            start_time_unix_nano=self._began,
            time_unix_nano=time.time_ns(),
            count=sum(found.counts),
            sum=found.total,
            bucket_counts=found.counts,
            explicit_bounds=found.bounds,
            min=nothing,
            max=nothing,
        )
        return Exported(name, metric.about, unit, Histogram([point], AggregationTemporality.CUMULATIVE))


class _Exporter(OTLPMetricExporter):
    """Sends metrics over OTLP, with the histograms added, and logs once when that starts to fail."""

    def __init__(self, endpoint: str, more: Callable[[], list[Exported]]) -> None:
        path = endpoint.partition("://")[2].partition("/")[2]
        super().__init__(endpoint if path else f"{endpoint.rstrip('/')}/{_PATH}")
        self._path: Final = path or _PATH
        self._more: Final = more
        self._over = False
        self.failing = False

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **options: Any
    ) -> MetricExportResult:
        more = self._more()
        found = [
            replace(of, scope_metrics=[_joined(scope, more) for scope in of.scope_metrics])
            for of in metrics_data.resource_metrics
        ]
        _exporter_log.addFilter(self._capture)
        try:
            result = super().export(MetricsData(found), timeout_millis, **options)
        finally:
            _exporter_log.removeFilter(self._capture)
        if result is MetricExportResult.SUCCESS and self.failing:
            self.failing = False
            _log.info("metrics are sent to the collector again")
        return result

    def _capture(self, record: logging.LogRecord) -> bool:
        """Drop the exporter's own lines: there would be one for each attempt for as long as it fails."""
        if not self.failing:
            self.failing = True
            reason = record.getMessage().replace(self._path, "…")  # it may contain a key
            _log.warning("metrics can't be sent to the collector; retrying", reason=reason)
        return False

    def shutdown(self, timeout_millis: float = 30_000, **options: Any) -> None:
        if not self._over:
            self._over = True
            super().shutdown(timeout_millis, **options)


def _joined(scope: ScopeMetrics, more: list[Exported]) -> ScopeMetrics:
    return replace(scope, metrics=[*scope.metrics, *more]) if scope.scope.name == _SCOPE else scope


def _attributes(metric: Metric, labels: Labels) -> dict[str, str]:
    return dict(zip(metric.labels, labels, strict=True))


def _resource() -> Resource:
    """The resource: headgate, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES name another."""
    given = OTELResourceDetector().detect().attributes
    own = {"service.name": "headgate", "service.version": VERSION, "service.instance.id": str(uuid4())}
    return Resource.create({name: value for name, value in own.items() if name not in given})
