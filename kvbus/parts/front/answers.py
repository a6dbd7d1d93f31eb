"""Rewrite an engine's answer that lists the endpoints of its events, so that it lists kvbus's endpoints.

:mod:`kvbus.parts.discovery.engine_answers` describes the forms of these answers. All other fields of an answer stay
unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvbus.config import parse_endpoint
from kvbus.parts.discovery.contract import DiscoveryError
from kvbus.parts.discovery.engine_answers import mapping, number, rank_of

_KVBUS: Final = {"publisher": "zmq", "topic": "", "encoding": "msgpack", "schema_version": 1}


class UnanswerableError(DiscoveryError):
    """kvbus cannot say at which of its endpoints the engine's events are. The error's text is for the operator."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The endpoints at which a router gets the events of one rank from kvbus.

    Attributes:
        endpoint: the endpoint of the live stream, as it is configured for kvbus's output.
        replay_endpoint: the endpoint of the replay; None if kvbus offers no replay.
        topic: the topic under which kvbus publishes; None if kvbus keeps the engine's topic.
        host: the host that replaces a wildcard in an endpoint.
    """

    endpoint: str
    replay_endpoint: str | None
    topic: str | None
    host: str

    @property
    def reached(self) -> str:
        """The endpoint of the live stream, with a host to which other hosts can connect."""
        return _reached(self.endpoint, self.host)

    @property
    def replay_reached(self) -> str | None:
        """The endpoint of the replay, with a host to which other hosts can connect; None if kvbus offers no replay."""
        return None if self.replay_endpoint is None else _reached(self.replay_endpoint, self.host)


Offers = Mapping[int, Offer]
"""By rank: the endpoints at which a router gets the rank's events from kvbus."""


def of_kvbus(offers: Offers) -> dict[str, Any]:
    """Return an answer to ``/kv_event_sources`` that lists kvbus's endpoints. It is for an engine that lacks this path.

    The answer has the form that vLLM's router reads.
    """
    return {str(rank): _announced(_KVBUS, offer) for rank, offer in sorted(offers.items())}


def of_vllm(answer: Any, offers: Offers) -> Any:
    """Replace the endpoints in an engine's answer to ``/kv_event_sources`` by kvbus's endpoints.

    Raises:
        DiscoveryError: the answer has none of the known forms, or it lists a rank that kvbus does not have.
    """
    if isinstance(answer, list):
        return [_entry(each, offers) for each in answer]
    if isinstance(answer, dict) and isinstance(answer.get("sources"), list):
        return {**answer, "sources": [_entry(each, offers) for each in answer["sources"]]}
    if isinstance(answer, dict):
        return {rank: _entry(each, offers, rank) for rank, each in answer.items()}
    raise UnanswerableError(f"the engine's answer is not a list of publishers: {answer!r:.100}")


def of_sglang(answer: Any, offers: Offers) -> Any:
    """Replace the endpoints in an engine's answer to ``/server_info`` by kvbus's endpoints.

    If the answer does not mention KV events, return ``answer`` itself.

    Raises:
        DiscoveryError: the answer has an unknown form, or its form cannot express kvbus's endpoints.
    """
    if not isinstance(answer, dict) or not (answer.get("kv_events") or answer.get("kv_event_sources")):
        return answer
    answer = dict(answer)
    sources, described = answer.get("kv_event_sources"), answer.get("kv_events")
    if isinstance(sources, list):
        answer["kv_event_sources"] = [_entry(each, offers) for each in sources]
    if described:
        described = mapping(described)
        # Use the ranks of the publishers in the answer's list, if it has one: `dp_size` also counts other nodes' ranks.
        ranks = sorted(map(rank_of, sources)) if sources else list(range(number(described.get("dp_size", 1)) or 1))
        answer["kv_events"] = _described(described, ranks, offers)
    return answer


def _described(described: dict[str, Any], ranks: list[int], offers: Offers) -> dict[str, Any]:
    """Replace the endpoints in ``kv_events``, an object in SGLang's answer, by kvbus's endpoints.

    The object has only a base port: the port of rank r is the base port plus r.
    """
    first = offer_of(ranks[0], offers)
    announced = {
        **described,
        # Do not replace a wildcard here. Routers replace it by the host in the worker's URL, which is kvbus's host.
        "endpoint_host": parse_endpoint(first.endpoint).host,
        "endpoint_port_base": _base(ranks, [offer_of(rank, offers).endpoint for rank in ranks]),
        "replay_endpoint_port_base": None
        if first.replay_endpoint is None
        else _base(ranks, [str(offer_of(rank, offers).replay_endpoint) for rank in ranks]),
    }
    if first.topic is not None:
        announced["topic"] = first.topic
        if len({offer_of(rank, offers).topic for rank in ranks}) > 1:
            raise UnanswerableError("the ranks have different topics, and SGLang's answer has one topic for all ranks")
    if isinstance(described.get("publishers"), list):
        announced["publishers"] = [_entry(each, offers) for each in described["publishers"]]
    return announced


def _base(ranks: list[int], endpoints: list[str]) -> int:
    ports = [parse_endpoint(each).port for each in endpoints]
    bases = {port - rank for rank, port in zip(ranks, ports, strict=True)}
    if len(bases) > 1:
        raise UnanswerableError(f"in SGLang's answer the port of rank r is the base port + r, but kvbus has {ports}")
    return bases.pop()


def _entry(entry: Any, offers: Offers, rank: object = None) -> dict[str, Any]:
    """Replace the endpoints in one publisher's entry of an engine's answer by kvbus's endpoints.

    An entry of a publisher that does not use ZeroMQ stays unchanged. If ``rank`` is None, the entry itself names the
    rank.
    """
    publisher = mapping(entry)
    if publisher.get("publisher", "zmq") != "zmq":
        return publisher
    number_of = rank_of(publisher) if rank is None else number(rank)
    return _announced(publisher, offer_of(number_of, offers))


def _announced(entry: Mapping[str, Any], offer: Offer) -> dict[str, Any]:
    announced = {**entry, "endpoint": offer.reached, "replay_endpoint": offer.replay_reached}
    return announced if offer.topic is None else {**announced, "topic": offer.topic}


def offer_of(rank: int, offers: Offers) -> Offer:
    """Return the endpoints at which a router gets this rank's events from kvbus.

    Raises:
        UnanswerableError: kvbus does not have this rank.
    """
    try:
        return offers[rank]
    except KeyError:
        have = ", ".join(map(str, sorted(offers)))
        raise UnanswerableError(
            f"the engine publishes rank {rank}, and kvbus has only these of its ranks: {have}"
        ) from None


def _reached(endpoint: str, host: str) -> str:
    address = parse_endpoint(endpoint)
    return f"tcp://{host}:{address.port}" if address.is_wildcard else endpoint
