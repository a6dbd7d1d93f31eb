"""Parsers for the HTTP answers in which vLLM and SGLang list the endpoints of their event publishers.

vLLM answers ``GET /kv_event_sources``:

* 0.33, ``vllm/entrypoints/serve/instrumentator/basic.py``: the publisher's settings by rank, ``{"0": {"publisher":
  "zmq", "endpoint": "tcp://10.0.0.3:40123", "replay_endpoint": null, "topic": "", …}}``;
* ``vllm/entrypoints/serve/kv_events/api_router.py``: ``[{"data_parallel_rank": 0, "endpoint": …, "replay_endpoint": …,
  "topic": ""}]``. Another version of this file returns the same list as ``{"sources": […]}``.

SGLang answers ``GET /server_info``, 0.5.23 (``describe_kv_events_publisher``): ``"kv_events": {"publisher": "zmq",
"endpoint_host": "*", "endpoint_port_base": 5557, "replay_endpoint_port_base": 5558, "topic": "", "dp_size": 2, …}``.
``kv_events`` is null if the engine publishes nothing. With sglang#38032 it also has ``"publishers": [{"dp_rank": 4,
"endpoint": "tcp://a:5"}]``.

SGLang's answer may also have ``"kv_event_sources": [{"dp_rank": 0, "endpoint": "tcp://127.0.0.1:5557", "topic": "",
…}]``, which lists only the publishers of the node that answers. kvbus uses this list if there is one, because
``dp_size`` counts the ranks of all nodes. The replay of rank r is on the same host as the rank, at the port
``replay_endpoint_port_base`` + r.
"""

from __future__ import annotations

from typing import Any, Final

from kvbus.config import endpoint_offset, parse_endpoint
from kvbus.parts.discovery.contract import DiscoveryError, Publisher, host_in_url

Answer = tuple[tuple[Publisher, ...], str | None]
"""The parsed answer of an engine: a tuple of its publishers and their common topic.

The publishers are empty if the engine publishes no events. The topic is None if the publishers' topics differ.
"""

MAX_RANKS: Final = 4096
"""Maximum number of ranks that an engine's answer may list."""
_RANK: Final = ("data_parallel_rank", "dp_rank")


def of_vllm(answer: Any, host: str) -> Answer:
    """Parse vLLM's answer to ``/kv_event_sources``.

    Args:
        answer: the decoded JSON.
        host: the host that kvbus has asked. It replaces a wildcard or a loopback address in an endpoint.

    Raises:
        DiscoveryError: the answer has none of the known forms.
    """
    if isinstance(answer, dict) and isinstance(answer.get("sources"), list):
        answer = answer["sources"]
    if isinstance(answer, dict):
        _check_size(len(answer))
        answer = [{**mapping(each), "data_parallel_rank": number(rank)} for rank, each in answer.items()]
    listed = _listed(answer, "/kv_event_sources")
    return _sources([each for each in listed if each.get("publisher", "zmq") == "zmq"], host)


def of_sglang(answer: Any, host: str) -> Answer:
    """Parse SGLang's answer to ``/server_info``.

    Args:
        answer: the decoded JSON.
        host: the host that kvbus has asked. It replaces a wildcard or a loopback address in an endpoint.

    Raises:
        DiscoveryError: the answer does not mention KV events, or has none of the known forms.
    """
    info = mapping(answer)
    if "kv_events" not in info and "kv_event_sources" not in info:
        raise DiscoveryError("/server_info does not mention KV events")
    sources, described = info.get("kv_event_sources"), mapping(info.get("kv_events") or {})
    replay = described.get("replay_endpoint_port_base")
    if sources is None and not described:
        return (), None
    if sources is None:
        at = str(described.get("endpoint_host", "*"))
        base = f"tcp://{host_in_url(at)}:{described.get('endpoint_port_base')}"
        size = number(described.get("dp_size", 1))
        _check_size(size)
        ranks = {rank: _at(base, host, rank) for rank in range(size)}
        for each in _listed(described.get("publishers") or [], "/server_info"):
            ranks[rank_of(each)] = _at(str(each.get("endpoint")), host, 0)
        found = tuple(Publisher(rank, endpoint) for rank, endpoint in sorted(ranks.items()))
        topic: str | None = str(described.get("topic") or "")
    else:
        found, topic = _sources(_listed(sources, "/server_info"), host)
    return tuple(
        Publisher(
            rank,
            endpoint,
            own if own or replay is None else _at(f"{endpoint.rpartition(':')[0]}:{number(replay)}", host, rank),
        )
        for rank, endpoint, own in ((each.rank, each.endpoint, each.replay_endpoint) for each in found)
    ), topic


def _listed(value: object, path: str) -> list[dict[str, Any]]:
    """Check that ``value`` is a list of JSON objects, and return it.

    ``value`` is the part of an engine's answer to ``path`` that lists publishers. If it is not a list, raise a
    DiscoveryError that names ``path``.
    """
    if not isinstance(value, list):
        raise DiscoveryError(f"{path}: {value!r:.100} is not a list of publishers")
    _check_size(len(value))
    return [mapping(each) for each in value]


def _check_size(ranks: int) -> None:
    """Raise a DiscoveryError if an engine's answer lists more ranks than :data:`MAX_RANKS`.

    To parse more would block the event loop.
    """
    if ranks > MAX_RANKS:
        raise DiscoveryError(f"the engine names {ranks} ranks, and the maximum is {MAX_RANKS}")


def _sources(sources: list[dict[str, Any]], host: str) -> Answer:
    """Parse the list of publishers in an engine's answer, in which each entry has the endpoint of its own rank."""
    ranks = {
        rank_of(each): Publisher(
            rank_of(each),
            _at(str(each.get("endpoint")), host, 0),
            None if each.get("replay_endpoint") is None else _at(str(each["replay_endpoint"]), host, 0),
        )
        for each in sources
    }
    topics = {str(each.get("topic") or "") for each in sources}
    return tuple(ranks[rank] for rank in sorted(ranks)), topics.pop() if len(topics) == 1 else None


def _at(endpoint: str, host: str, rank: int) -> str:
    """Return the endpoint of a rank: ``endpoint``, which is that of rank 0, with a port that is higher by ``rank``.

    A wildcard or a loopback address is replaced by ``host``, because kvbus may run on another host than the engine.
    """
    try:
        address = parse_endpoint(endpoint)
        if not address.is_ipc and (address.is_wildcard or address.is_loopback):
            endpoint = f"tcp://{host_in_url(host)}:{address.port}"
        return endpoint_offset(endpoint, rank)
    except ValueError as error:
        raise DiscoveryError(f"the engine answers that its publisher is at {endpoint!r}: {error}") from error


def rank_of(source: dict[str, Any]) -> int:
    """Return the rank that an entry of a list of publishers names; 0 if the entry names none."""
    return number(next((source[name] for name in _RANK if name in source), 0))


def number(value: object) -> int:
    """Return a value from an engine's answer as an integer.

    The value is a rank, a number of ranks, or a port.

    Raises:
        DiscoveryError: the value is not an integer from 0 to 65535.
    """
    try:
        number = int(str(value))
    except ValueError:
        number = -1
    if not 0 <= number <= 65535:
        raise DiscoveryError(f"{value!r:.100} is not a rank, a number of ranks or a port")
    return number


def mapping(value: object) -> dict[str, Any]:
    """Check that a value from an engine's answer is a JSON object, and return it.

    Raises:
        DiscoveryError: the value is not a JSON object.
    """
    if not isinstance(value, dict):
        raise DiscoveryError(f"{value!r:.100} is not a JSON object")
    return value
