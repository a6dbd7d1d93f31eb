"""What engines answer when they are asked where they publish: the spellings of vLLM and SGLang, in one form.

vLLM, ``GET /kv_event_sources``:

* 0.33, ``vllm/entrypoints/serve/instrumentator/basic.py``: the publisher's settings by rank,
  ``{"0": {"publisher": "zmq", "endpoint": "tcp://10.0.0.3:40123", "replay_endpoint": null, "topic": "", …}}``;
* ``vllm/entrypoints/serve/kv_events/api_router.py``: ``[{"data_parallel_rank": 0, "endpoint": …, "replay_endpoint": …,
  "topic": ""}]``, in another version of it as ``{"sources": […]}``.

SGLang, ``GET /server_info``, 0.5.23 (``describe_kv_events_publisher``): ``"kv_events": {"publisher": "zmq",
"endpoint_host": "*", "endpoint_port_base": 5557, "replay_endpoint_port_base": 5558, "topic": "", "dp_size": 2, …}``,
null where it publishes nothing; with sglang#38032 also ``"publishers": [{"dp_rank": 4, "endpoint": "tcp://a:5"}]``.
Beside it may stand ``"kv_event_sources": [{"dp_rank": 0, "endpoint": "tcp://127.0.0.1:5557", "topic": "", …}]``, the
publishers of this node alone. On several nodes ``dp_size`` counts the ranks of all nodes. So kvbus believes the list
where there is one. Rank r has its replay at ``replay_endpoint_port_base`` + r of its own host.
"""

from __future__ import annotations

from typing import Any, Final

from kvbus.config import endpoint_offset, parse_endpoint
from kvbus.parts.discovery.contract import DiscoveryError, Publisher, host_in_url

Answer = tuple[tuple[Publisher, ...], str | None]
"""The publishers, none where the engine publishes nothing, and the topic that all of them have."""

RANK: Final = ("data_parallel_rank", "dp_rank")


def of_vllm(answer: Any, host: str) -> Answer:
    """Read an answer of ``/kv_event_sources``.

    Args:
        answer: what the JSON says.
        host: the host that was asked. It stands for a wildcard, and for loopback.

    Raises:
        DiscoveryError: it is none of the known forms.
    """
    if isinstance(answer, dict) and isinstance(answer.get("sources"), list):
        answer = answer["sources"]
    if isinstance(answer, dict):
        answer = [{**mapping(each), "data_parallel_rank": number(rank)} for rank, each in answer.items()]
    if not isinstance(answer, list):
        raise DiscoveryError(f"/kv_event_sources: {answer!r:.100} is no list of publishers")
    return _sources([each for each in map(mapping, answer) if each.get("publisher", "zmq") == "zmq"], host)


def of_sglang(answer: Any, host: str) -> Answer:
    """Read an answer of ``/server_info``; the arguments are those of :func:`of_vllm`.

    Raises:
        DiscoveryError: it says nothing of KV events.
    """
    info = mapping(answer)
    if "kv_events" not in info and "kv_event_sources" not in info:
        raise DiscoveryError("/server_info says nothing of KV events")
    sources, described = info.get("kv_event_sources"), mapping(info.get("kv_events") or {})
    replay = described.get("replay_endpoint_port_base")
    if sources is None and not described:
        return (), None
    if sources is None:
        at = str(described.get("endpoint_host", "*"))
        base = f"tcp://{host_in_url(at)}:{described.get('endpoint_port_base')}"
        ranks = {rank: _at(base, host, rank) for rank in range(number(described.get("dp_size", 1)))}
        for each in map(mapping, described.get("publishers") or []):
            ranks[_rank(each)] = _at(str(each.get("endpoint")), host, 0)
        found = tuple(Publisher(rank, endpoint) for rank, endpoint in sorted(ranks.items()))
        topic: str | None = str(described.get("topic") or "")
    elif isinstance(sources, list):
        found, topic = _sources([mapping(each) for each in sources], host)
    else:
        raise DiscoveryError(f"/server_info: {sources!r:.100} is no list of publishers")
    return tuple(
        Publisher(
            rank,
            endpoint,
            own if own or replay is None else _at(f"{endpoint.rpartition(':')[0]}:{number(replay)}", host, rank),
        )
        for rank, endpoint, own in ((each.rank, each.endpoint, each.replay_endpoint) for each in found)
    ), topic


def _sources(sources: list[dict[str, Any]], host: str) -> Answer:
    """The publishers of a list in which each has its endpoints."""
    ranks = {
        _rank(each): Publisher(
            _rank(each),
            _at(str(each.get("endpoint")), host, 0),
            None if each.get("replay_endpoint") is None else _at(str(each["replay_endpoint"]), host, 0),
        )
        for each in sources
    }
    topics = {str(each.get("topic") or "") for each in sources}
    return tuple(ranks[rank] for rank in sorted(ranks)), topics.pop() if len(topics) == 1 else None


def _at(endpoint: str, host: str, rank: int) -> str:
    """An endpoint of rank 0 as it is reached from here, for another rank."""
    try:
        address = parse_endpoint(endpoint)
        if not address.is_ipc and (address.is_wildcard or address.is_loopback):
            endpoint = f"tcp://{host_in_url(host)}:{address.port}"
        return endpoint_offset(endpoint, rank)
    except ValueError as error:
        raise DiscoveryError(f"the engine's publisher is at {endpoint!r}: {error}") from error


def _rank(source: dict[str, Any]) -> int:
    return number(next((source[name] for name in RANK if name in source), 0))


def number(value: object) -> int:
    """Return a rank, size or port that an answer has.

    Raises:
        DiscoveryError: it is none.
    """
    try:
        number = int(str(value))
    except ValueError:
        number = -1
    if not 0 <= number <= 65535:
        raise DiscoveryError(f"{value!r:.100} is no rank, size or port")
    return number


def mapping(value: object) -> dict[str, Any]:
    """Return what has to be a JSON object.

    Raises:
        DiscoveryError: it is none.
    """
    if not isinstance(value, dict):
        raise DiscoveryError(f"{value!r:.100} is no mapping of keys")
    return value
