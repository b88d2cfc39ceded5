"""A hub's metrics, as Prometheus reads them."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.support.hub import VIEWER, HubServer

DOCS = Path(__file__).parents[2] / "docs"
Series = tuple[str, frozenset[tuple[str, str]]]


def samples(text: str) -> dict[Series, float]:
    """Every series of an exposition, with its value."""
    found: dict[Series, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series = (sample.name, frozenset(sample.labels.items()))
            assert series not in found, f"{series} is there twice"
            found[series] = sample.value
    return found


def scrape(hub: HubServer) -> dict[Series, float]:
    with hub.http(VIEWER) as viewer:
        answer = viewer.get("/metrics")
    assert answer.status_code == 200
    return samples(answer.text)


def value(found: dict[Series, float], name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def histogram_counts(found: dict[Series, float], name: str) -> dict[str, float]:
    """The counts of a histogram, by the upper ends of its buckets."""
    buckets = {dict(labels)["le"]: count for (series, labels), count in found.items() if series == f"{name}_bucket"}
    return dict(sorted(buckets.items(), key=lambda one: float(one[0])))
