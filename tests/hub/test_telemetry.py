"""Metrics over OpenTelemetry, decoded by a real receiver."""

import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, HistogramDataPoint, Metric
from structlog.testing import capture_logs

import headgate
from headgate import HeadgateError
from headgate.gate.policy import PolicyError
from headgate.hub.app import Hub
from headgate.hub.monitoring import telemetry
from headgate.hub.monitoring.metrics import METRICS
from headgate.hub.settings import HubSettings
from headgate.hub.sockets.relay import Relay
from tests.support.hub import HubServer, hub_server, hub_settings
from tests.support.hub_process import hub_process
from tests.support.ports import unused_port
from tests.support.prometheus import Series, scrape
from tests.support.valkey import PATIENCE, wait_for
from tests.support.webhook_receiver import ReceivedWebhook, WebhookReceiver

PACKAGES = str(Path(headgate.__file__).parents[1])
PATIENT = {"OTEL_EXPORTER_OTLP_TIMEOUT": "600", "OTEL_METRIC_EXPORT_TIMEOUT": "600000"}
"""Seconds for one try to send, and milliseconds to collect what is sent."""


class Collector(WebhookReceiver):
    """Takes metrics."""

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def newest(self) -> ExportMetricsServiceRequest:
        wait_for(lambda: self.heard, "metrics")
        return decoded(self.heard[-1])

    def next(self) -> ExportMetricsServiceRequest:
        """One that was read after now."""
        before = len(self.heard)
        wait_for(lambda: len(self.heard) >= before + 2, "metrics")
        return self.newest


def decoded(heard: ReceivedWebhook) -> ExportMetricsServiceRequest:
    found = ExportMetricsServiceRequest()
    found.ParseFromString(heard.body)
    return found


def metrics(request: ExportMetricsServiceRequest) -> list[Metric]:
    (of_resource,) = request.resource_metrics
    (of_scope,) = of_resource.scope_metrics
    assert of_scope.scope.name == "headgate"
    return list(of_scope.metrics)


def resource(request: ExportMetricsServiceRequest) -> dict[str, str]:
    return {one.key: one.value.string_value for one in request.resource_metrics[0].resource.attributes}


def as_in_prometheus(found: list[Metric]) -> dict[Series, float]:
    """What a collector makes of metrics for Prometheus, by the rules that OpenTelemetry has for it."""
    series: dict[Series, float] = {}
    for metric in found:
        name = metric.name.replace(".", "_") + ("_seconds" if metric.unit == "s" else "")
        assert metric.unit in ("s", "")
        if metric.HasField("histogram"):
            (point,) = metric.histogram.data_points
            series |= histogram(name, point)
            continue
        if metric.HasField("sum"):
            assert metric.sum.is_monotonic, name
            assert metric.sum.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
            name += "_total"
        for number in (metric.sum if metric.HasField("sum") else metric.gauge).data_points:
            labels = frozenset((one.key, one.value.string_value) for one in number.attributes)
            series[name, labels] = number.as_double or number.as_int
    return series


def histogram(name: str, point: HistogramDataPoint) -> dict[Series, float]:
    assert not point.HasField("min")
    assert not point.HasField("max")
    ends = [*point.explicit_bounds, float("inf")]
    assert len(ends) == len(point.bucket_counts)
    found: dict[Series, float] = {(f"{name}_count", frozenset()): point.count, (f"{name}_sum", frozenset()): point.sum}
    for number, end in enumerate(ends, 1):
        label = frozenset({("le", str(end) if end != float("inf") else "+Inf")})
        found[f"{name}_bucket", label] = sum(point.bucket_counts[:number])
    return found


def scraped(hub: HubServer) -> dict[Series, float]:
    return {series: number for series, number in scrape(hub).items() if series[0].startswith("headgate_")}


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is given up because the machine stands still for a while."""
    for name, value in PATIENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(telemetry, "_LOOP_TIMEOUT", PATIENCE)
    monkeypatch.setattr(telemetry, "_LAST_EXPORT_TIMEOUT", PATIENCE)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch, unhurried: None) -> None:
    """Metrics are sent all the time."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


def sdk_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the SDK has logged, without that the last collection took longer than the interval, very short here."""
    found = [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry")]
    return [line for line in found if "collection timed out" not in line]


def wait_for_end_of_threads() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("Otel")]


@pytest.mark.usefixtures("often")
def test_a_collector_gets_what_prometheus_gets(collector: Collector) -> None:
    with hub_server(otel_endpoint=collector.base) as hub, hub.agent("planner") as planner:
        for number in range(12):
            planner.say("session_open", session=number)
        planner.say("ping", id="last")
        while planner.hear().get("id") != "last":
            pass
        request = collector.next()
        assert as_in_prometheus(metrics(request)) == scraped(hub)
    assert len(metrics(request)) == len(METRICS)
    assert {metric.name: metric.description for metric in metrics(request)} == {
        telemetry.name_and_unit(metric)[0]: metric.about for metric in METRICS
    }
    assert {one.path for one in collector.heard} == {"/v1/metrics"}
    assert wait_for_end_of_threads()
    log = logging.getLogger("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    assert log.filters == []  # others that use it are still heard


@pytest.mark.usefixtures("often")
def test_figures_are_read_in_the_hubs_event_loop(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def connections(_relay: Relay) -> int:
        seen.add(threading.get_ident())
        return 0

    monkeypatch.setattr(Relay, "connections", property(connections))
    with hub_server(otel_endpoint=collector.base) as hub:
        collector.next()
        assert seen == {hub.call(threading.get_ident)}


def test_names_and_units_follow_the_opentelemetry_conventions() -> None:
    named = {metric.name: telemetry.name_and_unit(metric) for metric in METRICS}
    assert named["headgate_checks_total"] == ("headgate.checks", "")
    assert named["headgate_decision_seconds"] == ("headgate.decision", "s")
    assert named["headgate_store_outage_seconds_total"] == ("headgate.store_outage", "s")
    assert len({name for name, _ in named.values()}) == len(METRICS)


@pytest.mark.usefixtures("often")
def test_the_resource_identifies_the_hub(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server(otel_endpoint=collector.base):
        first = resource(collector.newest)
    assert first["service.name"] == "headgate"
    assert first["service.version"]
    monkeypatch.setenv("OTEL_SERVICE_NAME", "gatekeeper")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=water")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    with hub_server(otel_endpoint=f"{collector.base}/"):
        collector.next()
    second = resource(collector.newest)
    assert (second["service.name"], second["team"]) == ("gatekeeper", "water")
    assert first["service.instance.id"] != second["service.instance.id"]
    assert collector.heard[-1].headers["x-key"] == "secret"
    assert collector.heard[-1].path == "/v1/metrics"


@pytest.mark.usefixtures("often")
def test_a_path_in_the_endpoint_is_kept(collector: Collector) -> None:
    with hub_server(otel_endpoint=f"{collector.base}/some/where?key=1"):
        collector.next()
    assert {one.path for one in collector.heard} == {"/some/where?key=1"}


@pytest.mark.usefixtures("often")
def test_a_failing_collector_is_logged_once_and_again_when_it_recovers(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> list[tuple[Any, Any]]:
        return [(line["log_level"], line["event"]) for line in logged if "collector" in line["event"]]

    collector.answers.extend([400] * 6)
    with capture_logs() as logged, hub_server(otel_endpoint=collector.base) as hub, hub.agent("planner") as planner:
        wait_for(said, "the line in the log")
        assert planner.ask("ping")["type"] == "pong"
        wait_for(lambda: len(said()) == 2, "the second line")
        collector.next()
    gone, back = said()
    assert len(collector.heard) > 6
    assert gone == ("warning", "metrics can't be sent to the collector; retrying")
    assert back == ("info", "metrics are sent to the collector again")
    assert sdk_warnings(caplog) == []
    assert wait_for_end_of_threads()


@pytest.mark.usefixtures("often")
def test_the_logged_reason_of_a_failed_export_hides_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_LAST_EXPORT_TIMEOUT", 600)
    with (
        unused_port() as port,
        capture_logs() as logged,
        hub_server(otel_endpoint=f"http://127.0.0.1:{port}/v1/metrics?a-key"),
    ):
        wait_for(lambda: [line for line in logged if "reason" in line], "the line in the log")
    (reason,) = [line["reason"] for line in logged if "reason" in line]
    assert "refused" in reason
    assert "a-key" not in str(logged)
    assert wait_for_end_of_threads()  # though it would have gone on trying


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("farewell", [0.0, 0.5], ids=["at all", "long"])
def test_stopping_does_not_wait_for_a_hanging_collector(
    collector: Collector, farewell: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(telemetry, "_LAST_EXPORT_TIMEOUT", farewell)
    collector.answers.extend([collector.hang] * 2)
    with hub_server(otel_endpoint=collector.base):
        wait_for(lambda: collector.heard, "metrics")
    assert not wait_for_end_of_threads()  # it waits for the answer, and the hub has not waited for it
    collector.let_go.set()
    wait_for(wait_for_end_of_threads, "the end of the thread")
    assert sdk_warnings(caplog) == []


@pytest.mark.long
def test_the_program_sends_the_last_figures_when_it_stops(collector: Collector, tmp_path: Path) -> None:
    patient = "from headgate.hub.monitoring import telemetry\n"
    patient += f"telemetry._LOOP_TIMEOUT = telemetry._LAST_EXPORT_TIMEOUT = {PATIENCE}\n"
    (tmp_path / "sitecustomize.py").write_text(patient)
    surroundings = {"PYTHONPATH": f"{tmp_path}:{PACKAGES}", "OTEL_METRIC_EXPORT_INTERVAL": "3600000", **PATIENT}
    with hub_process(tmp_path / "data", "--otel-endpoint", collector.base, environment=surroundings) as hub:
        with hub.http("") as anyone:
            anyone.get("/api/agents")
        assert collector.heard == []  # an hour isn't over
    found = as_in_prometheus(metrics(collector.newest))
    labels = frozenset({("purpose", "request"), ("outcome", "allow")})
    assert found["headgate_address_checks_total", labels] == 1
    assert len(collector.heard) == 1
    assert "Traceback" not in "".join(hub.err)


async def test_without_the_packages_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.metrics", None)
    monkeypatch.delitem(sys.modules, "headgate.hub.monitoring.telemetry")
    with pytest.raises(
        HeadgateError, match=r"expected OpenTelemetry's packages, .*in a checkout: pip install '\.\[otel\]'"
    ):
        await Hub(hub_settings(otel_endpoint="http://localhost:4318")).__aenter__()


async def test_an_interval_of_zero_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "0")
    with pytest.raises(HeadgateError, match="OTEL_METRIC_EXPORT_INTERVAL: expected milliseconds above 0"):
        await Hub(hub_settings(otel_endpoint="http://localhost:4318")).__aenter__()


@pytest.mark.parametrize(
    "given",
    ["localhost:4318", "ftp://localhost", "http://", "http:///v1", "http://a:port", "http://[::1", "//localhost"],
)
def test_an_endpoint_that_is_not_a_url_is_refused(given: str) -> None:
    with pytest.raises(PolicyError) as refused:
        HubSettings.load({"otel_endpoint": given}, {})
    (mistake,) = refused.value.mistakes
    assert mistake == "--otel-endpoint: expected an http:// or https:// URL"  # there may be a key in what was given


@pytest.mark.parametrize("given", ["http://localhost:4318", "https://user:password@collector/v1/metrics", ""])
def test_the_endpoint_is_never_shown(given: str) -> None:
    settings = HubSettings.load({}, {"HEADGATE_OTEL_ENDPOINT": given})
    assert settings.otel_endpoint == given
    assert not given or given not in repr(settings)
