"""Parse the answers of vLLM and SGLang about where they publish.

vLLM, ``GET /kv_event_sources``:

* 0.33, ``vllm/entrypoints/serve/instrumentator/basic.py``: the publisher's settings by rank,
  ``{"0": {"publisher": "zmq", "endpoint": "tcp://10.0.0.3:40123", "replay_endpoint": null, "topic": "", …}}``;
* ``vllm/entrypoints/serve/kv_events/api_router.py``: ``[{"data_parallel_rank": 0, "endpoint": …, "replay_endpoint": …,
  "topic": ""}]``, in another version of this file ``{"sources": […]}``.

SGLang, ``GET /server_info``, 0.5.23 (``describe_kv_events_publisher``): ``"kv_events": {"publisher": "zmq",
"endpoint_host": "*", "endpoint_port_base": 5557, "replay_endpoint_port_base": 5558, "topic": "", "dp_size": 2, …}``. It
is null if the engine publishes nothing. With sglang#38032 it also has ``"publishers": [{"dp_rank": 4, "endpoint":
"tcp://a:5"}]``. The answer may also have ``"kv_event_sources": [{"dp_rank": 0, "endpoint": "tcp://127.0.0.1:5557",
"topic": "", …}]``, which lists only the publishers of this node. On several nodes ``dp_size`` counts the ranks of all
nodes. So kvbus uses the list if there is one. Rank r has its replay at ``replay_endpoint_port_base`` + r of its own
host.
"""

from __future__ import annotations

from typing import Any, Final

from kvbus.config import endpoint_offset, parse_endpoint
from kvbus.parts.discovery.contract import DiscoveryError, Publisher, host_in_url

Answer = tuple[tuple[Publisher, ...], str | None]
"""The publishers, and their common topic. No publishers: the engine publishes nothing. None: their topics differ."""

MAX_RANKS: Final = 4096
"""Maximum number of ranks in an answer."""
_RANK: Final = ("data_parallel_rank", "dp_rank")


def of_vllm(answer: Any, host: str) -> Answer:
    """Parse an answer to ``/kv_event_sources``.

    Args:
        answer: the decoded JSON.
        host: the host that was asked. It replaces a wildcard and loopback in an endpoint.

    Raises:
        DiscoveryError: the answer has no known form.
    """
    if isinstance(answer, dict) and isinstance(answer.get("sources"), list):
        answer = answer["sources"]
    if isinstance(answer, dict):
        _check_size(len(answer))
        answer = [{**mapping(each), "data_parallel_rank": number(rank)} for rank, each in answer.items()]
    listed = _listed(answer, "/kv_event_sources")
    return _sources([each for each in listed if each.get("publisher", "zmq") == "zmq"], host)


def of_sglang(answer: Any, host: str) -> Answer:
    """Parse an answer to ``/server_info``. The arguments are those of :func:`of_vllm`.

    Raises:
        DiscoveryError: the answer does not mention KV events, or has no known form.
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
    """Return a value of the answer to ``path`` that has to be a list of publishers."""
    if not isinstance(value, list):
        raise DiscoveryError(f"{path}: {value!r:.100} is no list of publishers")
    _check_size(len(value))
    return [mapping(each) for each in value]


def _check_size(ranks: int) -> None:
    """Refuse an answer with too many ranks before they are parsed, because parsing them blocks the event loop."""
    if ranks > MAX_RANKS:
        raise DiscoveryError(f"the engine names {ranks} ranks, and the maximum is {MAX_RANKS}")


def _sources(sources: list[dict[str, Any]], host: str) -> Answer:
    """Return the publishers in a list of sources with an endpoint each."""
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
    """Return the endpoint of a rank, from rank 0's, with a host that kvbus can reach."""
    try:
        address = parse_endpoint(endpoint)
        if not address.is_ipc and (address.is_wildcard or address.is_loopback):
            endpoint = f"tcp://{host_in_url(host)}:{address.port}"
        return endpoint_offset(endpoint, rank)
    except ValueError as error:
        raise DiscoveryError(f"the engine's publisher is at {endpoint!r}: {error}") from error


def rank_of(source: dict[str, Any]) -> int:
    """Return the rank in an entry of a list of publishers; 0 if the entry has none."""
    return number(next((source[name] for name in _RANK if name in source), 0))


def number(value: object) -> int:
    """Return a value of an answer as a rank, size or port.

    Raises:
        DiscoveryError: the value is not an integer from 0 to 65535.
    """
    try:
        number = int(str(value))
    except ValueError:
        number = -1
    if not 0 <= number <= 65535:
        raise DiscoveryError(f"{value!r:.100} is no rank, size or port")
    return number


def mapping(value: object) -> dict[str, Any]:
    """Return a value of an answer that has to be a JSON object.

    Raises:
        DiscoveryError: the value is not an object.
    """
    if not isinstance(value, dict):
        raise DiscoveryError(f"{value!r:.100} is no mapping of keys")
    return value
