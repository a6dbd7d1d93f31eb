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

from typing import Any, Final, NamedTuple

from kvbus.common.errors import Problem
from kvbus.config import parse_endpoint
from kvbus.config.problems import shown
from kvbus.parts.discovery.contract import DiscoveryError, Engine, EntryError, Publisher, host_in_url


class Answer(NamedTuple):
    """The parsed answer of an engine.

    Attributes:
        publishers: the valid publishers, in ascending order of the ranks; empty if the engine publishes no events.
        topic: the publishers' common topic; None if their topics differ.
        faults: the invalid values in the answer, one for each rank that has one.
    """

    publishers: tuple[Publisher, ...]
    topic: str | None
    faults: tuple[Problem, ...] = ()

    def engines(self, name: str, where: str, api: str | None = None) -> tuple[Engine, ...]:
        """Return a tuple with the engine that the answer describes; an empty one if the engine publishes no events."""
        size = len(self.publishers) + len(self.faults)
        return (Engine(name, self.publishers, where, self.topic, api, self.faults, size),) if size else ()


MAX_RANKS: Final = 4096
"""Maximum number of ranks that an engine's answer may list."""
_EXAMPLE: Final = '{"data_parallel_rank": 0, "endpoint": "tcp://10.0.0.3:5557"}'
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
        listed = [
            {**each, "data_parallel_rank": rank} if isinstance(each, dict) else each for rank, each in answer.items()
        ]
    else:
        listed = _listed(answer, "/kv_event_sources")
    return _sources(
        [each for each in listed if not isinstance(each, dict) or each.get("publisher", "zmq") == "zmq"], host
    )


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
    base = described.get("replay_endpoint_port_base")
    replay = None if base is None else number(base)
    if sources is None and not described:
        return Answer((), None)
    if sources is None:
        at = host_in_url(str(described.get("endpoint_host", "*")))
        port = number(described.get("endpoint_port_base"))
        size = number(described.get("dp_size", 1))
        _check_size(size)
        by_rank = {rank: {"dp_rank": rank, "endpoint": f"tcp://{at}:{port + rank}"} for rank in range(size)}
        own = {rank_of(mapping(each)): each for each in _listed(described.get("publishers") or [], "/server_info")}
        found = _sources(list((by_rank | own).values()), host, replay)
        return found._replace(topic=str(described.get("topic") or ""))
    return _sources(_listed(sources, "/server_info"), host, replay)


def _listed(value: object, path: str) -> list[Any]:
    """Check that ``value`` is a list, and return it.

    ``value`` is the part of an engine's answer to ``path`` that lists publishers. If it is not a list, raise a
    DiscoveryError that names ``path``.
    """
    if not isinstance(value, list):
        raise DiscoveryError(f"{path}: {value!r:.100} is not a list of publishers")
    _check_size(len(value))
    return value


def _check_size(ranks: int) -> None:
    """Raise a DiscoveryError if an engine's answer lists more ranks than :data:`MAX_RANKS`.

    To parse more would block the event loop.
    """
    if ranks > MAX_RANKS:
        raise DiscoveryError(f"the engine names {ranks} ranks, and the maximum is {MAX_RANKS}")


def _sources(sources: list[Any], host: str, replay: int | None = None) -> Answer:
    """Parse the list of publishers in an engine's answer, in which each entry has the endpoint of its own rank.

    Args:
        sources: the entries.
        host: the host that kvbus has asked.
        replay: the port of rank 0's replay, for entries that name no replay; None if the answer has no such port.
    """
    ranks: dict[int, Publisher] = {}
    faults: list[Problem] = []
    topics: set[str] = set()
    for position, source in enumerate(sources):
        try:
            each = _publisher(mapping(source), host, replay)
        except EntryError as error:
            faults.append(error.problem)
        except DiscoveryError as error:
            faults.append(Problem(f"entry [{position}]", str(error), example=_EXAMPLE))
        else:
            if each.rank in ranks:
                faults.append(Problem(f"entry [{position}]", f"an earlier entry has rank {each.rank}, too"))
            ranks.setdefault(each.rank, each)
            topics.add(str(source.get("topic") or ""))
    topic = topics.pop() if len(topics) == 1 else None
    return Answer(tuple(ranks[rank] for rank in sorted(ranks)), topic, tuple(faults))


def _publisher(source: dict[str, Any], host: str, replay: int | None) -> Publisher:
    """Return the publisher that one entry of an engine's answer describes. See :func:`_sources` for the arguments.

    Raises:
        EntryError: an endpoint of the entry is not valid.
        DiscoveryError: the rank of the entry is not valid.
    """
    rank = rank_of(source)
    endpoint = _reached(f"endpoint of rank {rank}", source.get("endpoint"), host)
    back = source.get("replay_endpoint")
    if not back and replay is not None:
        back = f"{endpoint.rpartition(':')[0]}:{replay + rank}"
    return Publisher(rank, endpoint, None if back is None else _reached(f"replay_endpoint of rank {rank}", back, host))


def _reached(key: str, endpoint: object, host: str) -> str:
    """Return the endpoint at which kvbus reaches a publisher. ``key`` says where the answer has the endpoint.

    A wildcard or a loopback address is replaced by ``host``, because kvbus may run on another host than the engine.
    """
    try:
        address = parse_endpoint(str(endpoint))
    except ValueError as error:
        raise EntryError(Problem(key, str(error), shown(endpoint), f"tcp://{host_in_url(host)}:5557")) from error
    if not address.is_ipc and (address.is_wildcard or address.is_loopback):
        return f"tcp://{host_in_url(host)}:{address.port}"
    return str(endpoint)


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
