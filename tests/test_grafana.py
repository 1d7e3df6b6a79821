"""docs/grafana: the dashboard shows numbers that a server has, and the files that belong together name each other."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import yaml
from prometheus_client.parser import text_string_to_metric_families

from dcpjax.api.outputs import StreamEvent
from dcpjax.engine.stats import EngineStats
from dcpjax.frontend.completion import RunningPrompt
from dcpjax.server.metrics import Metrics
from dcpjax.server.options import ServeOptions

FOLDER = Path(__file__).parent.parent / "docs" / "grafana"
DASHBOARD = json.loads((FOLDER / "dcpjax.json").read_text())
SERVICES = yaml.safe_load((FOLDER / "docker-compose.yml").read_text())["services"]


def settings(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings(inner)


def samples_of_a_server() -> dict[str, set[str]]:
    """The labels of every sample at /metrics, by its name."""
    values: dict[str, Any] = dict.fromkeys(EngineStats.__dataclass_fields__, 1)
    values["tokens_per_rank"] = (1, 1)
    stats = EngineStats(**values)
    metrics = Metrics("tiny", lambda: stats)
    refused = cast(RunningPrompt, SimpleNamespace(completions=[]))
    metrics.observe(refused, StreamEvent(0, 0, "", [], "error"))
    families = text_string_to_metric_families(metrics.text().decode())
    samples = [sample for family in families for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples}


def test_the_dashboard_asks_only_for_numbers_that_a_server_has():
    known = samples_of_a_server()
    asked = [text for text in strings(DASHBOARD) if "vllm:" in text or "dcpjax:" in text]
    assert len(asked) > 20
    for expression in asked:
        for name in re.findall(r"\b(?:vllm|dcpjax):\w+", expression):
            assert name in known, expression
            used = re.findall(r"by \((\w+)\)", expression) + re.findall(r"(\w+)=~", expression)
            assert set(used) <= known[name], expression


def test_every_number_of_a_server_is_on_the_dashboard():
    text = "\n".join(strings(DASHBOARD))
    left = {re.sub(r"_(total|created|bucket|sum|count)$", "", name) for name in samples_of_a_server()}
    assert [name for name in left if name not in text] == []


def test_panels_do_not_overlap_and_each_has_a_title_a_unit_and_a_question():
    taken = set[tuple[int, int]]()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = {(column, row) for column in columns for row in rows}
        assert not cells & taken
        assert max(columns) < 24
        taken |= cells
        texts = [panel["title"], panel["description"], panel["fieldConfig"]["defaults"]["unit"]]
        questions = [target["expr"] for target in panel["targets"]]
        assert questions
        assert all(texts + questions)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_what_the_containers_mount_exists_and_is_where_their_settings_say():
    mounted = dict[str, Path]()
    for service in SERVICES.values():
        for source, target in (volume.split(":")[:2] for volume in service["volumes"]):
            if source.startswith("."):
                assert (FOLDER / source).exists(), source
                mounted[target] = FOLDER / source
    (config,) = (part for part in SERVICES["prometheus"]["command"] if part.startswith("--config.file="))
    assert mounted[config.partition("=")[2]] == FOLDER / "prometheus.yml"
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert mounted[home] == FOLDER / "dcpjax.json"
    (provider,) = settings("provisioning/dashboards/dcpjax.yml")["providers"]
    assert provider["options"]["path"] == str(Path(home).parent)


def test_each_part_is_sent_to_the_address_of_the_next():
    (job,) = settings("prometheus.yml")["scrape_configs"]
    usual = ServeOptions()
    assert job["static_configs"] == [{"targets": [f"{usual.host}:{usual.port}"]}]
    assert job.get("metrics_path", "/metrics") == "/metrics"
    (source,) = settings("provisioning/datasources/prometheus.yml")["datasources"]
    assert f"--web.listen-address={source['url'].removeprefix('http://')}" in SERVICES["prometheus"]["command"]
    assert source["jsonData"]["timeInterval"] == job["scrape_interval"]
