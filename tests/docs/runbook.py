"""Write the findings of docs/RUNBOOK.md from the catalogue of findings: ``python -m tests.docs.runbook``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbus.core.findings import bus, engine
from kvbus.core.findings.finding import Kind

PAGE = Path(__file__).parents[2] / "docs" / "RUNBOOK.md"
BEGIN, END = "## Findings\n", "\n## Alerts\n"

INTRO = """
A finding is a problem that kvbus has noticed. It has the same id and wording in the log, in `/findings`, on the status page, in `kvbus top`, in `kvbus doctor` and here. A finding whose text begins with "note" may be intended, or
ends by itself. All other findings are certainly problems. If a text begins with "partial", the engine has, or may have, blocks
that no router knows. A finding about refused messages ends ten minutes after the last refused message.

Each section shows the finding's text with example values, and the remedy. In the log, the configuration key to change stands
between them in brackets. `python -m tests.docs.runbook` writes the sections.
"""

RESTART = "the engine restarts, or its cache is reset"
EXAMPLE: dict[str, Any] = {
    "api": "http://engine-0:8000",
    "at": "sources[0]",
    "before": 3,
    "blocks": 20_000,
    "copies": 70,
    "count": 12,
    "detail": "",
    "do": "write the password of kvbus's user into the password file, or set it at the log's servers",
    "dropped": 120,
    "elsewhere": "'kv@engine-0'",
    "endpoint": "tcp://engine-0:5557",
    "ends": RESTART,
    "engine": "engine-7",
    "epoch": 4,
    "groups": 64,
    "key": "sources[0].curve_server_key_file",
    "limit": 1_000_000,
    "mode": 0o755,
    "name": "endpoint",
    "needs": "topics of the form kv@POD@MODEL",
    "one": "engine-0",
    "other": "engine-1",
    "ours": 0,
    "output": "kv",
    "outputs": "kv",
    "own": "'kv@a'",
    "owners": 64,
    "path": "/var/lib/kvbus",
    "port": 5557,
    "prefix": "'kv@vllm'",
    "rank": 4,
    "ranks": "2, 3",
    "reason": "max_sources",
    "reasons": "token_count",
    "replay": "tcp://engine-0:5558",
    "router": "llm-d",
    "second": "'kv@b'",
    "seconds": 42,
    "since": "it got the state again at 12:00:00 UTC and is exact again",
    "size": 4,
    "stores": 40,
    "theirs": 1,
    "them": "them",
    "there": 2,
    "topic": "'kv@engine-0'",
    "topics": "'kv@vllm'",
    "type": "SUB",
    "url": "http://127.0.0.1:9477",
    "value": "/etc/kvbus/engine.pub",
    "what": "batches 0 to 99 were",
    "where": "",
    "which": "behind",
    "who": "router 10.0.0.9:40112 of output kv",
    "why": "connection refused",
}
"""An example value for each placeholder in the texts of the catalogue."""

OUTPUT: dict[str, Any] = {"at": "outputs[0]", "endpoint": "tcp://0.0.0.0:5657", "type": "PUB"}
DIALLED: dict[str, Any] = {**OUTPUT, "endpoint": "tcp://router-0:5557"}
DISCOVER: dict[str, Any] = {"at": "sources[0].discover", "name": "workers"}
OWN: dict[str, dict[str, Any]] = {
    "endpoint_is_other": {"type": "PULL"},
    "cannot_listen": {"why": "not an address of this machine"},
    "ranks_missing": {"endpoint": "tcp://engine-0:5559 and other ports"},
    "more_ranks_perhaps": {"endpoint": "tcp://engine-0:5561"},
    "replay_not_router": {"endpoint": "tcp://engine-0:5558", "what": "publishes"},
    "replay_silent": {"endpoint": "tcp://engine-0:5558"},
    "not_events": {"why": "the messages are not msgpack, so they are not KV-cache events"},
    "unknown_events": {"types": "BlockMoved"},
    "events_refused": {"why": "reason token_count, see docs/PROTOCOL.md"},
    "block_size": {"size": 32, "own": " of 16 tokens"},
    "block_size_too_large": {"size": 32},
    "several_addresses": {"count": 4},
    "api_unusable": {"why": "its /metrics has no vllm:engine_sleep_state"},
    "history_unanswered": {"what": "the engine"},
    "index_full": {"blocks": 1_000_000, "size": 1 << 30},
    "listens_elsewhere": OUTPUT,
    "port_taken": {**OUTPUT, "who": "process 4711 (python3)"},
    "our_replay_silent": {**OUTPUT, "endpoint": "tcp://0.0.0.0:5658"},
    "no_router_listens": DIALLED,
    "not_a_subscriber": DIALLED,
    "router_topic": OUTPUT,
    "router_stalled": OUTPUT,
    "router_behind": OUTPUT,
    "router_lost_batches": OUTPUT,
    "router_misreads": OUTPUT,
    "output_not_probed": {**OUTPUT, "type": "mqtt"},
    "log_away": {**OUTPUT, "name": "kafka.password_file", "where": "kafka-0:9092", "why": "authentication failed"},
    "no_engine_found": {**DISCOVER, "where": 'the discovery "workers" lists no engine'},
    "discovery_fails": DISCOVER,
    "engine_invalid": {
        "at": "sources[0].discover, pod-1",
        "name": "workers",
        "engine": "pod-1",
        "problem": """annotation kvbus/data-parallel-size = 'auto': must be a whole number from 1 to 4096; """
        """for example "2\"""",
        "more": "",
    },
    "engine_left_out": {**DISCOVER, "do": "raise limits.max_sources"},
    "log_other_schema": {**DISCOVER, "name": "fleet"},
    "state_not_written": {"where": "/var/lib/kvbus", "why": "No space left on device"},
    "state_dir_not_found": {"why": "no candidate exists"},
    "file_unusable": {"why": "No such file or directory"},
    "libzmq_too_old": {"why": "libzmq 4.2.5 is too old: 4.3.5 or newer is needed (pyzmq 26 includes it)"},
    "http_taken": {"what": "the server at http://127.0.0.1:9477 is not a kvbus"},
    "reload_refused": {
        "key": "block_size",
        "what": "the configuration",
        "why": "block_size changed, and needs a restart",
        "do": "restart kvbus, or take the change back",
    },
    "no_bus": {"what": "the server at http://127.0.0.1:9477 is not a kvbus"},
    "other_configuration": {"theirs": "tcp://engine-1:5557"},
}
"""Example values that only one finding uses."""


def section(kind: Kind) -> str:
    """Return the section of docs/RUNBOOK.md about one finding, whose text has example values."""
    found = kind(**EXAMPLE | OWN.get(kind.id, {}))
    means = f"{kind.means}\n\n" if kind.means else ""
    text = str(found).removesuffix(f" [{found.key}]: {found.remedy}")
    return f"### {kind.id}\n\n{means}* **Says:** {text}\n* **Do:** {found.remedy}.\n"


def rows() -> list[Kind]:
    """Return all kinds of findings that kvbus can report."""
    return [each for module in (engine, bus) for each in vars(module).values() if isinstance(each, Kind)]


def findings() -> str:
    """Return the text of docs/RUNBOOK.md about all findings: one section for each."""
    return BEGIN + INTRO + "\n" + "\n".join(map(section, rows()))


def page(text: str) -> str:
    """Return the text of docs/RUNBOOK.md with newly generated findings."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + findings() + END + after


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
