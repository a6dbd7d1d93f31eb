"""Generate the Grafana dashboards from a table of panels.

    python helm/dashboard.py kvbus > deploy/grafana/kvbus.json     # the same for each name in DASHBOARDS

The JSON files are committed, so that operators can import them into Grafana without Python. The two series named
``kvbus:…`` come from the recording rules in ``deploy/prometheus/kvbus.rules.yml``.
"""  # noqa: INP001 - a script beside its output, not a package

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
TARGET: Final = 'namespace=~"$namespace",job=~"$job",instance=~"$instance"'
SOURCE: Final = f'{TARGET},source=~"$source"'
OUTPUT: Final = f'{TARGET},output=~"$output"'
OURS: Final = f"and on (job, instance) kvbus_build_info{{{TARGET}}}"
"""Restricts metrics that many programs have (`process_*`) to the processes of kvbus."""

PER_SOURCE: Final = "instance, source"
PER_OUTPUT: Final = "instance, output"
OF_SOURCE: Final = "{{instance}} {{source}}"
OF_OUTPUT: Final = "{{instance}} {{output}}"

WIDTH: Final = 24

LEGEND: Final = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
DRAWN: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "timeseries": (
        {"fillOpacity": 10, "showPoints": "never"},
        {"legend": LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}},
    ),
    "state-timeline": (
        {"lineWidth": 0, "fillOpacity": 70},
        {
            "showValue": "never",
            "rowHeight": 0.9,
            "alignValue": "left",
            "mergeValues": True,
            "legend": LEGEND | {"showLegend": False},
            "tooltip": {"mode": "single", "sort": "asc"},
        },
    ),
    "stat": (
        {},
        {
            "colorMode": "value",
            "graphMode": "none",
            "textMode": "auto",
            "orientation": "auto",
            "justifyMode": "auto",
            "reduceOptions": {"values": False, "calcs": ["lastNotNull"]},
        },
    ),
    "table": (
        {},
        {
            "frameIndex": 0,
            "showHeader": True,
            "showTypeIcons": False,
            "cellHeight": "sm",
            "footer": {"show": False, "reducer": [], "countRows": False},
        },
    ),
}
"""The drawing options of each kind of panel, including the defaults, in the form in which Grafana saves them."""

Query = tuple[str, str]
"""A PromQL expression and its legend."""


def panel(kind: str, title: str, unit: str, about: str, *queries: Query, width: int = 8) -> dict[str, Any]:
    """Return one panel without its number and position."""
    instant = kind in {"stat", "table"}
    custom, options = DRAWN[kind]
    return {
        "type": kind,
        "title": title,
        "description": about,
        "datasource": DATASOURCE,
        "gridPos": {"w": width, "h": 4 if kind == "stat" else 8},
        "fieldConfig": {"defaults": {"unit": unit, "custom": custom}, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "expr": expr,
                "legendFormat": legend,
                "instant": instant,
                "range": not instant,
                "format": "table" if kind == "table" else "time_series",
            }
            for number, (expr, legend) in enumerate(queries)
        ],
    }


def rate(metric: str, labels: str, by: str) -> str:
    """Return an expression for a metric's increase per second, over the interval that Grafana chooses for the panel."""
    return f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"


def moved(metric: str) -> str:
    """Return an expression for a metric's increase per second: by each reason that occurs, and in total."""
    reasons, total = rate(metric, SOURCE, f"{PER_SOURCE}, reason"), rate(metric, SOURCE, PER_SOURCE)
    return f"{reasons} > 0 or {total}"


def quantile(q: float, metric: str) -> str:
    """Return an expression for a quantile of a histogram."""
    return f"histogram_quantile({q}, sum by (instance, le) (rate({metric}_bucket{{{TARGET}}}[$__rate_interval])))"


def stat(title: str, unit: str, about: str, expr: str) -> dict[str, Any]:
    """Return a panel that shows one number."""
    return panel("stat", title, unit, about, (expr, ""), width=4)


def graph(title: str, unit: str, about: str, *queries: Query, width: int = 8) -> dict[str, Any]:
    """Return a panel that shows series over time."""
    return panel("timeseries", title, unit, about, *queries, width=width)


EXACT: Final = (
    f"avg((kvbus_output_router_behind_seconds{{{OUTPUT}}} <= bool 5) * on (job, instance) group_left () "
    f"min by (job, instance) (kvbus_source_pending_batches{{{TARGET}}} == bool 0))"
)

ROWS: Final[dict[str, list[dict[str, Any]]]] = {
    "Overview": [
        stat(
            "kvbus running",
            "short",
            "Number of kvbus processes that Prometheus scrapes.",
            f"count(kvbus_build_info{{{TARGET}}})",
        ),
        stat(
            "Sources not live",
            "short",
            "Number of engine ranks that are connecting, syncing, in a gap or lost.",
            f'sum(kvbus_source_state{{{SOURCE},state!="live"}})',
        ),
        stat(
            "Live blocks",
            "short",
            "Number of blocks in the engines' caches that kvbus has announced to routers.",
            f"sum(kvbus_blocks{{{SOURCE}}})",
        ),
        stat(
            "Routers",
            "short",
            "Number of router subscriptions at all outputs.",
            f"sum(kvbus_output_subscribers{{{OUTPUT}}})",
        ),
        stat(
            "Batches lost",
            "short",
            "Batches in the shown time that kvbus missed and that no replay recovered.",
            f"sum(increase(kvbus_source_lost_batches_total{{{SOURCE}}}[$__range]))",
        ),
        stat(
            "Batches dropped for slow routers",
            "short",
            "Batches in the shown time that a router did not get live. A batch counts once for each such router.",
            f"sum(increase(kvbus_output_dropped_batches_total{{{OUTPUT}}}[$__range]))",
        ),
        graph(
            "Routers exact within 5 s",
            "percentunit",
            "Share of outputs without a router more than 5 s behind, on buses without a gap. The objective is 99.9 %.",
            (EXACT, "exact"),
            width=12,
        ),
        graph(
            "Slowest router's lag",
            "s",
            "Age of the oldest batch that some router lacks.",
            (f"max(kvbus_output_router_behind_seconds{{{OUTPUT}}})", "slowest router"),
            width=12,
        ),
        graph(
            "From the engine to the routers",
            "s",
            "Age of a batch by its engine's clock when kvbus sends it. The clocks of engine and kvbus must agree.",
            (quantile(0.5, "kvbus_batch_age_seconds"), "{{instance}} p50"),
            (quantile(0.99, "kvbus_batch_age_seconds"), "{{instance}} p99"),
            width=12,
        ),
        graph(
            "Slowest routers by name",
            "s",
            "Age of the oldest batch that a router lacks. Only routers whose CURVE key has a name are shown.",
            (f"topk(5, kvbus_router_behind_seconds{{{OUTPUT}}})", f"{OF_OUTPUT} {{{{router}}}}"),
            width=12,
        ),
        graph(
            "Batches in and out",
            "cps",
            "Live batches that kvbus received, and batches that it sent to each output, including heartbeats.",
            (rate("kvbus_source_batches_total", SOURCE, "instance"), "{{instance}} in"),
            (rate("kvbus_output_batches_total", OUTPUT, "instance"), "{{instance}} out"),
            width=12,
        ),
        panel(
            "table",
            "Alerts",
            "short",
            "Alerts that fire now. docs/RUNBOOK.md says what to do about each.",
            (f'ALERTS{{alertname=~"Kvbus.*",alertstate="firing",{TARGET}}}', ""),
            width=12,
        ),
    ],
    "Sources": [
        panel(
            "state-timeline",
            "State",
            "short",
            "State of each source: connecting, syncing, live, gap or lost.",
            (f"kvbus_source_state{{{SOURCE}}} == 1", f"{OF_SOURCE} {{{{state}}}}"),
        ),
        graph(
            "Batches received",
            "cps",
            "Messages of the engines' live streams.",
            (rate("kvbus_source_batches_total", SOURCE, PER_SOURCE), OF_SOURCE),
        ),
        graph(
            "Events received",
            "cps",
            "Events in the received batches, by type.",
            (rate("kvbus_source_events_total", SOURCE, f"{PER_SOURCE}, type"), f"{OF_SOURCE} {{{{type}}}}"),
        ),
        graph(
            "Since the last batch",
            "s",
            "Time since the newest batch, by the engine's own clock. An engine without requests publishes nothing.",
            (f"time() - (kvbus_source_last_batch_timestamp_seconds{{{SOURCE}}} > 0)", OF_SOURCE),
        ),
        graph(
            "Missing batches",
            "cps",
            "Missing batches that a replay recovered, and those that are lost. The others are pending.",
            (rate("kvbus_source_recovered_batches_total", SOURCE, PER_SOURCE), f"{OF_SOURCE} recovered"),
            (rate("kvbus_source_lost_batches_total", SOURCE, PER_SOURCE), f"{OF_SOURCE} lost"),
        ),
        graph(
            "Pending and held",
            "short",
            "Missing batches that kvbus has not counted as lost, and received batches that wait for them.",
            (f"kvbus_source_pending_batches{{{SOURCE}}}", f"{OF_SOURCE} pending"),
            (f"kvbus_source_queue_depth{{{SOURCE}}}", f"{OF_SOURCE} held"),
        ),
        graph(
            "Gaps, copies, restarts",
            "cps",
            "Gaps in the seqs, batches received again, and restarts of the engine.",
            (rate("kvbus_source_gaps_total", SOURCE, PER_SOURCE), f"{OF_SOURCE} gaps"),
            (rate("kvbus_source_duplicate_batches_total", SOURCE, PER_SOURCE), f"{OF_SOURCE} copies"),
            (rate("kvbus_source_restarts_total", SOURCE, PER_SOURCE), f"{OF_SOURCE} restarts"),
        ),
        graph(
            "Rejected",
            "cps",
            "Malformed batches and events that kvbus rejected, by reason.",
            (moved("kvbus_events_rejected_total"), f"{OF_SOURCE} {{{{reason}}}}"),
        ),
        graph(
            "Filtered",
            "cps",
            "Valid events and blocks that kvbus changed or did not send, by reason.",
            (moved("kvbus_events_filtered_total"), f"{OF_SOURCE} {{{{reason}}}}"),
            (moved("kvbus_source_reannounced_total"), f"{OF_SOURCE} announced again"),
        ),
        graph(
            "Live blocks",
            "short",
            "Blocks in the engine's cache, by medium.",
            (f"sum by ({PER_SOURCE}, medium) (kvbus_blocks{{{SOURCE}}})", f"{OF_SOURCE} {{{{medium}}}}"),
        ),
        graph(
            "Replay asked of the engine",
            "cps",
            "Replay requests (probes of an idle engine, too), and those that timed out, failed or had to wait.",
            (rate("kvbus_source_replays_total", SOURCE, PER_SOURCE), f"{OF_SOURCE} asked"),
            (rate("kvbus_source_replay_timeouts_total", SOURCE, PER_SOURCE), f"{OF_SOURCE} given up"),
            (rate("kvbus_source_requests_failed_total", SOURCE, PER_SOURCE), f"{OF_SOURCE} not sent"),
            (rate("kvbus_source_requests_waited_total", SOURCE, PER_SOURCE), f"{OF_SOURCE} waited"),
        ),
        graph(
            "Partial",
            "short",
            "1: the engine may hold blocks that kvbus does not know. Also kvbus's findings.",
            (f"kvbus_source_partial{{{SOURCE}}}", OF_SOURCE),
            (f"kvbus_finding{{{TARGET}}}", "{{instance}} {{kind}} {{name}} {{id}}"),
        ),
    ],
    "Outputs": [
        graph(
            "Batches sent",
            "cps",
            "All batches sent, and the heartbeats among them.",
            (rate("kvbus_output_batches_total", OUTPUT, PER_OUTPUT), OF_OUTPUT),
            (rate("kvbus_output_heartbeats_total", OUTPUT, PER_OUTPUT), f"{OF_OUTPUT} heartbeats"),
        ),
        graph(
            "Events sent",
            "cps",
            "Events sent to each router.",
            (rate("kvbus_output_events_total", OUTPUT, PER_OUTPUT), OF_OUTPUT),
        ),
        graph(
            "Bytes sent",
            "Bps",
            "Bytes of payloads sent to each router, and of states written to a log.",
            (rate("kvbus_output_bytes_total", OUTPUT, PER_OUTPUT), OF_OUTPUT),
            (rate("kvbus_output_state_bytes_total", OUTPUT, PER_OUTPUT), f"{OF_OUTPUT} states in a log"),
        ),
        graph(
            "Routers",
            "short",
            "Connected routers, subscriptions, engines that dial the same port, and records deleted from etcd.",
            (f"kvbus_output_routers{{{OUTPUT}}}", OF_OUTPUT),
            (f"kvbus_output_subscribers{{{OUTPUT}}}", f"{OF_OUTPUT} subscriptions"),
            (f"kvbus_output_records_gone_total{{{OUTPUT}}}", f"{OF_OUTPUT} records taken"),
            (f"kvbus_output_publishers{{{OUTPUT}}}", f"{OF_OUTPUT} engines"),
            (f"kvbus_output_publishers_limit{{{OUTPUT}}}", f"{OF_OUTPUT} engines at most"),
            (f"increase(kvbus_output_publishers_accepted_total{{{OUTPUT}}}[5m])", f"{OF_OUTPUT} engines accepted"),
        ),
        graph(
            "Furthest behind",
            "s",
            "Age of the oldest batch that some router lacks.",
            (f"kvbus_output_router_behind_seconds{{{OUTPUT}}}", OF_OUTPUT),
        ),
        graph(
            "Longest queue of a router",
            "short",
            "Number of batches. Beyond the limit, kvbus drops the oldest ones for that router.",
            (f"kvbus_output_router_queue_max{{{OUTPUT}}}", OF_OUTPUT),
            (f"kvbus_output_router_queue_limit{{{OUTPUT}}}", f"{OF_OUTPUT} limit"),
        ),
        graph(
            "Routers by name",
            "short",
            "Batches that wait for a router, and batches that it did not get live. Only CURVE keys have names.",
            (f"topk(5, kvbus_router_queue_batches{{{OUTPUT}}})", f"{OF_OUTPUT} {{{{router}}}} waiting"),
            (f"topk(5, kvbus_router_dropped_batches{{{OUTPUT}}})", f"{OF_OUTPUT} {{{{router}}}} dropped"),
        ),
        graph(
            "Longest queue",
            "short",
            "Batches that wait for the slowest router, or for a broker.",
            (f"kvbus_output_queue_depth{{{OUTPUT}}}", OF_OUTPUT),
        ),
        graph(
            "States sent",
            "cps",
            "States sent to routers because they subscribed, or because they lost batches.",
            (
                rate("kvbus_output_states_sent_total", OUTPUT, f"{PER_OUTPUT}, reason"),
                f"{OF_OUTPUT} {{{{reason}}}}",
            ),
        ),
        graph(
            "Streams written to logs",
            "short",
            "Streams that kvbus writes, streams that another writer has or that were erased, and overdue states.",
            (f"kvbus_output_streams_written{{{OUTPUT}}}", OF_OUTPUT),
            (f"kvbus_output_streams_fenced{{{OUTPUT}}}", f"{OF_OUTPUT} fenced"),
            (f"kvbus_output_states_overdue{{{OUTPUT}}}", f"{OF_OUTPUT} states overdue"),
        ),
        graph(
            "Routers that changed their state",
            "cps",
            "Routers that entered a state, by the state.",
            (
                rate("kvbus_output_router_states_total", OUTPUT, f"{PER_OUTPUT}, state"),
                f"{OF_OUTPUT} {{{{state}}}}",
            ),
        ),
        graph(
            "Routers that left",
            "cps",
            "Routers that disconnected, by reason.",
            (
                rate("kvbus_output_router_disconnects_total", OUTPUT, f"{PER_OUTPUT}, reason"),
                f"{OF_OUTPUT} {{{{reason}}}}",
            ),
        ),
        graph(
            "Not delivered live",
            "cps",
            "slow_router: batches dropped for one router that was too slow. queue_full: batches that no router got.",
            (
                rate("kvbus_output_dropped_batches_total", OUTPUT, f"{PER_OUTPUT}, reason"),
                f"{OF_OUTPUT} {{{{reason}}}}",
            ),
        ),
        graph(
            "Refused connections",
            "cps",
            "Refused connections of routers and engines, by reason. The reason closed is usually a probe of the port.",
            (
                rate("kvbus_output_handshakes_failed_total", OUTPUT, f"{PER_OUTPUT}, reason"),
                f"{OF_OUTPUT} {{{{reason}}}}",
            ),
            (
                rate("kvbus_source_handshakes_failed_total", SOURCE, f"{PER_SOURCE}, reason"),
                f"{OF_SOURCE} {{{{reason}}}}",
            ),
        ),
        graph(
            "Journal",
            "percentunit",
            "Share of the journal in use. A full journal is normal: it drops its oldest batches.",
            (
                f"kvbus_output_journal_batches{{{OUTPUT}}} / kvbus_output_journal_batches_limit{{{OUTPUT}}}",
                f"{OF_OUTPUT} batches",
            ),
            (
                f"kvbus_output_journal_bytes{{{OUTPUT}}} / kvbus_output_journal_bytes_limit{{{OUTPUT}}}",
                f"{OF_OUTPUT} bytes",
            ),
            (rate("kvbus_output_states_outgrown_total", OUTPUT, PER_OUTPUT), f"{OF_OUTPUT} states outgrown"),
        ),
    ],
    "Replay": [
        graph(
            "Requests of routers",
            "cps",
            "Replay requests of routers, by outcome.",
            (rate("kvbus_replay_requests_total", OUTPUT, f"{PER_OUTPUT}, outcome"), f"{OF_OUTPUT} {{{{outcome}}}}"),
        ),
        graph(
            "Messages sent",
            "cps",
            "Messages of replay answers.",
            (rate("kvbus_replay_batches_total", OUTPUT, PER_OUTPUT), OF_OUTPUT),
        ),
        graph(
            "Answers being sent",
            "short",
            "Replay answers that kvbus sends now, and requests that wait for one of them to end.",
            (f"kvbus_replay_sessions{{{OUTPUT}}}", f"{OF_OUTPUT} being sent"),
            (f"kvbus_replay_waiting{{{OUTPUT}}}", f"{OF_OUTPUT} waiting"),
        ),
    ],
    "Process": [
        graph(
            "Relay latency",
            "s",
            "Time from receiving a batch until kvbus hands it to its transport.",
            (quantile(0.5, "kvbus_relay_latency_seconds"), "{{instance}} p50"),
            (f"kvbus:relay_latency_seconds:p99_5m{{{TARGET}}}", "{{instance}} p99"),
        ),
        graph(
            "Event loop lag",
            "s",
            "Delay of a timer in the event loop. It grows when kvbus gets too little CPU.",
            (f"kvbus:event_loop_lag_seconds:p99_5m{{{TARGET}}}", "{{instance}} p99"),
        ),
        graph(
            "How full",
            "percentunit",
            "Share of each limit in use. kvbus drops and counts the excess.",
            (f"max by (instance, queue) (kvbus:queue_fill:ratio{{{TARGET}}})", "{{instance}} {{queue}}"),
        ),
        graph(
            "CPU",
            "percentunit",
            "CPU time of the process: 100 % is one core. kvbus relays on one core.",
            (f"rate(process_cpu_seconds_total{{{TARGET}}}[$__rate_interval]) {OURS}", "{{instance}}"),
        ),
        graph(
            "Memory",
            "bytes",
            "Resident memory of the process, and the part of it that waits for slow routers, with its limit.",
            (f"process_resident_memory_bytes{{{TARGET}}} {OURS}", "{{instance}}"),
            (f"kvbus_unsent_bytes{{{TARGET}}}", "{{instance}} unsent"),
            (f"kvbus_unsent_bytes_limit{{{TARGET}}}", "{{instance}} unsent, limit"),
        ),
        graph(
            "Open files",
            "percentunit",
            "Share of the process's limit of open files.",
            (
                f"(process_open_fds{{{TARGET}}} / process_max_fds{{{TARGET}}}) {OURS}",
                "{{instance}}",
            ),
        ),
        graph(
            "Running for",
            "s",
            "Time since the process started.",
            (f"(time() - process_start_time_seconds{{{TARGET}}}) {OURS}", "{{instance}}"),
        ),
        graph(
            "State on disk",
            "short",
            "1 while the state is written to state_dir, and files of saved states that could not be used.",
            (f"kvbus_state_writing{{{TARGET}}}", "{{instance}} writing"),
            (f"kvbus_state_refused_total{{{TARGET}}}", "{{instance}} refused"),
        ),
        graph(
            "Sources that have a slot",
            "short",
            "Slots of present and of remembered sources, their maximum, and slots that were given to other sources.",
            (f"kvbus_source_slots{{{TARGET}}}", "{{instance}} {{state}}"),
            (f"kvbus_source_slots_limit{{{TARGET}}}", "{{instance}} limit"),
            (f"kvbus_source_slots_reused_total{{{TARGET}}}", "{{instance}} reused"),
        ),
        graph(
            "Engines found",
            "short",
            "Engines that each discovery lists, engines that are left out, and whether the discovery fails (1).",
            (f"kvbus_discovery_engines{{{TARGET}}}", "{{instance}} {{discovery}} found"),
            (f"kvbus_discovery_left_out{{{TARGET}}}", "{{instance}} {{discovery}} left out: {{reason}}"),
            (f"kvbus_discovery_failing{{{TARGET}}}", "{{instance}} {{discovery}} failing"),
        ),
        graph(
            "Found engines that come and go",
            "short",
            "Sources that joined, left or moved to another address, refused changes, and failed requests.",
            (f"kvbus_discovery_changes_total{{{TARGET}}}", "{{instance}} {{discovery}} {{change}}"),
            (f"kvbus_discovery_failures_total{{{TARGET}}}", "{{instance}} {{discovery}} failed"),
            (f"kvbus_discovery_records_total{{{TARGET}}}", "{{instance}} {{discovery}} records {{reason}}"),
        ),
        graph(
            "Logs read for routers",
            "s",
            "Age of the newest moment up to which kvbus has read the complete log. About 1 s is normal.",
            (f"kvbus_discovery_lag_seconds{{{TARGET}}}", "{{instance}} {{discovery}}"),
        ),
        graph(
            "In front of the engine's API",
            "cps",
            "Requests by outcome, and connections that kvbus closed (too many, or a silent client).",
            (rate("kvbus_front_requests_total", TARGET, "instance, outcome"), "{{instance}} {{outcome}}"),
            (
                rate("kvbus_front_connections_closed_total", TARGET, "instance, reason"),
                "{{instance}} closed {{reason}}",
            ),
        ),
        graph(
            "Connections to the front",
            "short",
            "Open connections to kvbus's API proxy, and their maximum.",
            (f"kvbus_front_connections{{{TARGET}}}", "{{instance}} open"),
            (f"kvbus_front_connections_limit{{{TARGET}}}", "{{instance}} limit"),
        ),
        graph(
            "In front of the engine's gRPC API",
            "cps",
            "Calls to kvbus's gRPC proxy, by outcome.",
            (rate("kvbus_front_grpc_calls_total", TARGET, "instance, outcome"), "{{instance}} {{outcome}}"),
        ),
        graph(
            "Calls at the gRPC front",
            "short",
            "Open calls at kvbus's gRPC proxy, and their maximum.",
            (f"kvbus_front_grpc_calls{{{TARGET}}}", "{{instance}} under way"),
            (f"kvbus_front_grpc_calls_limit{{{TARGET}}}", "{{instance}} limit"),
        ),
        graph(
            "Views",
            "short",
            "Number of views, one for each set of rights, and stores withheld from views, per second.",
            (f"kvbus_output_views{{{OUTPUT}}}", f"{OF_OUTPUT}"),
            (f"kvbus_views_limit{{{TARGET}}}", "{{instance}} limit"),
            (
                rate("kvbus_output_withheld_events_total", OUTPUT, f"{PER_OUTPUT}, reason"),
                f"{OF_OUTPUT} {{{{reason}}}}",
            ),
        ),
        graph(
            "Reloads",
            "short",
            "Reloads of configuration and key files since the start, and whether the newest file is refused.",
            (f"kvbus_config_reloads_total{{{TARGET}}}", "{{instance}} configuration {{outcome}}"),
            (f"kvbus_config_refused{{{TARGET}}}", "{{instance}} configuration refused now"),
            (f"kvbus_key_reloads_total{{{TARGET}}}", "{{instance}} keys {{outcome}}"),
        ),
        graph(
            "HTTP closed and refused",
            "cps",
            "Connections that kvbus closed (too many, or a stalled client), and refused requests for token ids.",
            (rate("kvbus_http_connections_closed_total", TARGET, "instance, reason"), "{{instance}} closed {{reason}}"),
            (rate("kvbus_http_refused_total", TARGET, "instance, reason"), "{{instance}} refused {{reason}}"),
        ),
        panel("table", "Versions", "short", "", (f"kvbus_build_info{{{TARGET}}}", "")),
    ],
}


DASHBOARDS: Final = {
    "kvbus": ("kvbus", ("Overview",)),
    "kvbus-sources-routers": ("kvbus: sources and routers", ("Sources", "Outputs", "Replay")),
    "kvbus-internals": ("kvbus: internals", ("Process",)),
}
"""Title and rows of each dashboard, by the name of its file."""


def placed(titles: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Return the rows and their panels from left to right, each with its number and position."""
    numbers = itertools.count(1)
    top = 0
    for title in titles:
        panels = ROWS[title]
        yield {
            "type": "row",
            "title": title,
            "id": next(numbers),
            "collapsed": False,
            "panels": [],
            "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": top},
        }
        top += 1
        left = height = 0
        for each in panels:
            size = each["gridPos"]
            if left + size["w"] > WIDTH:
                top, left = top + height, 0
            yield each | {
                "id": next(numbers),
                "gridPos": {**size, "x": left, "y": top},
                "transparent": False,
                "repeatDirection": "h",
                "transformations": [],
            }
            left, height = left + size["w"], size["h"]
        top += height


EVERY_VARIABLE: Final = {
    "id": "00000000-0000-0000-0000-000000000000",
    "hide": 0,
    "skipUrlSync": False,
    "options": [],
    "auto": False,
    "auto_min": "10s",
    "auto_count": 30,
}
"""Fields that every variable has, in the form in which Grafana saves them."""


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    """Return a variable for the values of a label. By default all values are chosen.

    If no target has the label, the variable matches every series.
    """
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "query": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": "All", "value": "$__all"},
    } | EVERY_VARIABLE


def dashboard(name: str) -> dict[str, Any]:
    """Return one dashboard as a JSON object."""
    title, rows = DASHBOARDS[name]
    among = 'namespace=~"$namespace",job=~"$job"'
    return {
        "uid": name,
        "title": title,
        "description": "KV-cache events from LLM engines to KV-aware routers",
        "tags": ["kvbus", "kv-cache"],
        "style": "dark",
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "fiscalYearStartMonth": 0,
        "schemaVersion": 38,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "annotations": {},
        "templating": {
            "list": [
                {
                    "type": "datasource",
                    "name": "datasource",
                    "label": "Data source",
                    "query": "prometheus",
                    "current": {"text": "", "value": ""},
                    "includeAll": False,
                    "multi": False,
                    "refresh": 1,
                }
                | EVERY_VARIABLE,
                variable("namespace", "Namespace", "label_values(kvbus_build_info, namespace)"),
                variable("job", "Job", 'label_values(kvbus_build_info{namespace=~"$namespace"}, job)'),
                variable("instance", "Instance", f"label_values(kvbus_build_info{{{among}}}, instance)"),
                variable("source", "Source", f"label_values(kvbus_source_epoch{{{TARGET}}}, source)"),
                variable("output", "Output", f"label_values(kvbus_output_subscribers{{{TARGET}}}, output)"),
            ]
        },
        "panels": list(placed(rows)),
    }


if __name__ == "__main__":
    json.dump(dashboard(sys.argv[1]), sys.stdout, indent=1)
    sys.stdout.write("\n")
