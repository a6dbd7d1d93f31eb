"""Find contradictions between keys whose values are valid on their own. `check` runs all these checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from kvbus.common.errors import Problem
from kvbus.config import claims, logs, part_rules, parts
from kvbus.config.contradictions import Contradictions
from kvbus.config.endpoints import Address, endpoint_offset, is_loopback, parse_address, parse_endpoint
from kvbus.config.models import render_topic
from kvbus.config.paths import Path, show
from kvbus.config.problems import shown
from kvbus.config.values import placeholders, render_template
from kvbus.core.wire.profiles import PROFILES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvbus.config.front import Fronting
    from kvbus.config.models import Config
    from kvbus.config.outputs import OutputConfig
    from kvbus.config.sources import SourceConfig


_ONE_OF_EACH: Final = {
    "sources": "sources: [{endpoint: tcp://127.0.0.1:5557, replay_endpoint: tcp://127.0.0.1:5558}]",
    "outputs": "outputs: [{endpoint: 'tcp://*:5657', replay_endpoint: 'tcp://*:5658'}]",
}
_LLM_D_PARTS: Final = 3
_OF_ONE_ENGINE: Final = ("endpoint", "replay_endpoint", "snapshot_endpoint", "bind", "api", "slot")


def check(config: Config, origins: Mapping[Path, str], bad: frozenset[Path] = frozenset()) -> list[Problem]:
    """Return a problem for every contradiction in a configuration.

    Args:
        config: the configuration.
        origins: the origin of each key's value, by key path: a line of the file, a variable, or ``command line``.
        bad: the keys whose values are invalid. ``config`` has their defaults instead, and the checks skip these keys.
    """
    found = Contradictions(config, origins, bad)
    for rule in (
        _at_least_one,
        _names,
        claims.wildcards,
        claims.ports,
        _interposed,
        _fronted,
        _readable_topics,
        _tokens,
        _one_topic_each,
        _number_of_sources,
        _snapshots,
        _slots,
        _media,
        _discovery,
        part_rules.sources_of_a_log,
        _curve,
        _libsodium,
        _tls,
        part_rules.carriers,
    ):
        rule(found)
    return found.problems


def _at_least_one(found: Contradictions) -> None:
    for name, example in _ONE_OF_EACH.items():
        if not getattr(found.config, name) and found.sound((name,), ("interpose",)):
            found.report((name,), "at least one is needed", example=example)


def _names(found: Contradictions) -> None:
    for section in ("sources", "outputs"):
        first: dict[str, Path] = {}
        for i, item in enumerate(getattr(found.config, section)):
            key: Path = (section, i, "name")
            if not found.sound(key):
                continue
            if item.name in first:
                example = f"name: {item.name}-{i}"
                found.report(key, f"the same name as {show(first[item.name])}", value=item.name, example=example)
            first.setdefault(item.name, key)


def _media(found: Contradictions) -> None:
    """Reject a medium in both ``expiring_media`` and ``without_media``.

    Its blocks could not expire, because ``without_media`` removes them.
    """
    if found.sound(("without_media",), ("expiring_media",)):
        for i, medium in enumerate(found.config.expiring_media):
            if medium in found.config.without_media:
                found.report(
                    ("expiring_media", i),
                    "without_media already removes the blocks on it",
                    value=medium,
                    example="without_media: []",
                )


def _tokens(found: Contradictions) -> None:
    """Reject an output without token ids for routers that compute hashes from token ids.

    The index of such a router would be wrong, and the router would report no error.
    """
    for i, output in enumerate(found.config.outputs):
        key: Path = ("outputs", i, "token_ids")
        profile = PROFILES[output.profile]
        if output.token_ids == "drop" and profile.hashes_tokens and found.sound(key, (*key[:-1], "profile")):
            wrong = (
                f"routers of profile {output.profile} hash the token ids themselves: without token ids they would find "
                "no blocks, and report no error"
            )
            found.report(key, wrong, value="drop", example="token_ids: keep")


def _snapshots(found: Contradictions) -> None:
    """Reject snapshots of a source without a replay endpoint, and snapshots for routers that cannot read them.

    Without a replay endpoint, kvbus would have to request a complete snapshot for a gap of one batch. An output with
    snapshots sends sequence frames of 24 bytes, and some routers drop batches with such frames.
    """
    for i, source in enumerate(found.config.sources):
        keys: tuple[Path, Path] = (("sources", i, "snapshot_endpoint"), ("sources", i, "replay_endpoint"))
        if found.sound(*keys) and source.snapshot_endpoint is not None and source.replay_endpoint is None:
            example = "replay_endpoint: tcp://127.0.0.1:5558"
            found.report(keys[0], "needs replay_endpoint too", value=source.snapshot_endpoint, example=example)
    for i, output in enumerate(found.config.outputs):
        key = ("outputs", i, "snapshot_endpoint")
        if (
            output.snapshot_endpoint is not None
            and PROFILES[output.profile].short_seqs
            and found.sound((*key[:2], "profile"))
        ):
            wrong = f"it makes sequence frames 24 bytes long, and routers of profile {output.profile} drop such batches"
            found.report(key, wrong, value=output.snapshot_endpoint, example="snapshot_endpoint: null")


def _discovery(found: Contradictions) -> None:
    """Check a configuration in which an entry of ``sources`` has ``discover``.

    Such an entry may not have keys that are specific to one engine. The other entries may not have fixed slots, and
    outputs may not have a port for each source, because discovery assigns slots when it finds engines.
    """
    sources = found.config.sources
    finding = [i for i, source in enumerate(sources) if source.discover is not None]
    if not finding:
        return
    for i in finding:
        for name in _OF_ONE_ENGINE:
            value = getattr(sources[i], name)
            if value != type(sources[i]).model_fields[name].default:
                found.report(
                    ("sources", i, name), "discovery finds this for each engine, so it cannot be set", value=value
                )
    for i, source in enumerate(sources):
        if source.slot is not None and i not in finding:
            wrong = f"{show(('sources', finding[0], 'discover'))} assigns slots to engines when it finds them"
            found.report(("sources", i, "slot"), wrong, value=source.slot)
    for i, output in enumerate(found.config.outputs):
        if output.layout == "per_source":
            wrong = "the ports of discovered engines would change when engines come and go"
            found.report(("outputs", i, "layout"), wrong, value=output.layout, example="layout: merged")
        template: Path = ("outputs", i, "topic")
        named = {"source", "rank"} & placeholders(output.topic or "") if found.sound(template) else set()
        if output.layout == "merged" and named:
            wrong = f"all discovered engines share this topic, so it cannot have {{{min(named)}}}"
            found.report(template, wrong, value=output.topic, example="topic: kv@{worker}@{model}")


def _slots(found: Contradictions) -> None:
    """Reject two sources with the same slot.

    If no output has ``layout: per_source``, no port depends on a slot. Then only slots that the user has set are
    compared.
    """
    if not found.streams_sound():
        return
    taken: dict[int, str] = {}
    by_list = any(output.layout == "per_source" for output in found.config.outputs)
    slots = [each for each in found.config.slots() if by_list or found.config.sources[each[0]].slot is not None]
    for i, _, slot in slots:
        source = found.config.sources[i]
        if slot in taken:
            example = f"slot: {max(last for _, _, last in slots) + 1}"
            wrong = f"slot {slot} is taken by {taken[slot]}"
            found.report(("sources", i, "slot"), wrong, value=source.slot, example=example)
            return
        taken[slot] = source.name


def _number_of_sources(found: Contradictions) -> None:
    """Reject more sources than ``limits.max_sources``. Every rank counts as one source."""
    most, key = found.config.limits.max_sources, ("limits", "max_sources")
    if found.streams_sound() and found.sound(("limits",), key):
        count = len(found.config.slots())
        if count > most:
            wrong = f"there are {count} sources, counting every rank"
            found.report(key, wrong, value=most, example=f"max_sources: {count}")


def _curve(found: Contradictions) -> None:
    """Reject an incomplete set of CURVE keys. With an incomplete set, every peer could connect, or no peer could."""
    for i, source in enumerate(found.config.sources):
        dials = not source.bind or source.replay_endpoint is not None or source.snapshot_endpoint is not None
        _curve_keys(found, ("sources", i), source, dials=dials, binds=source.bind)
    for i, output in enumerate(found.config.outputs):
        binds = output.bind or output.replay_endpoint is not None or output.snapshot_endpoint is not None
        _curve_keys(found, ("outputs", i), output, dials=not output.bind, binds=binds)


def _curve_keys(
    found: Contradictions, section: Path, at: SourceConfig | OutputConfig, *, dials: bool, binds: bool
) -> None:
    """Check the CURVE keys of one source or output.

    Args:
        found: the configuration that is checked, and the list to which problems are added.
        section: the key path of the source or output, such as ``outputs[0]``.
        at: the source or output.
        dials: whether kvbus connects to an endpoint of this section. Then the peer's public key is needed.
        binds: whether kvbus binds an endpoint of this section. Then the public keys of the clients are needed.
    """
    own = (*section, "curve_secret_key_file")
    if not found.sound(own, (*section, "curve_server_key_file"), (*section, "curve_client_keys")):
        return
    given = at.curve_secret_key_file is not None
    for name, needed, why in (
        ("curve_server_key_file", dials, "kvbus connects to"),
        ("curve_client_keys", binds, "kvbus binds"),
    ):
        key = (*section, name)
        value = getattr(at, name)
        if value is not None and not given:
            found.report(own, f"needed if {name} is set", example=f"{own[-1]}: /etc/kvbus/keys/kvbus.key_secret")
            return
        if value is not None and not needed:
            found.report(key, f"has no effect, because there is no endpoint here that {why}", value=str(value))
        if value is None and needed and given:
            example = f"{name}: /etc/kvbus/keys/{'peer.key' if name.endswith('file') else 'clients'}"
            found.report(key, f"needed with curve_secret_key_file, for the endpoint that {why}", example=example)


def _libsodium(found: Contradictions) -> None:
    """Reject CURVE keys of a ZeroMQ output, and of a source, if libsodium is not installed.

    These endpoints use kvbus's own implementation of ZMTP, which needs libsodium for CURVE.
    """
    if parts.has_libsodium():
        return
    config = found.config
    uses: list[tuple[Path, SourceConfig | OutputConfig]] = [
        *((("sources", i), source) for i, source in enumerate(config.sources)),
        *((("outputs", i), output) for i, output in enumerate(config.outputs) if output.type == "zmq"),
    ]
    for section, at in uses:
        key = (*section, "curve_secret_key_file")
        if at.curve_secret_key_file is not None:
            wrong = "CURVE keys need libsodium, which is not installed"
            found.report(key, wrong, value=str(at.curve_secret_key_file), example="pip install 'kvbus[curve]'")


def _tls(found: Contradictions) -> None:
    """Reject a TLS certificate for the HTTP port without its private key, and a private key without a certificate."""
    certificate, key = "http_tls_certificate_file", "http_tls_key_file"
    for name, other, file in ((certificate, key, "tls.crt"), (key, certificate, "tls.key")):
        if getattr(found.config, other) is not None and getattr(found.config, name) is None and found.sound((other,)):
            found.report((name,), f"needed if {other} is set", example=f"{name}: /etc/kvbus/tls/{file}")


_KEYS: Final = ("curve_secret_key_file", "curve_server_key_file", "curve_client_keys")


def _interposed(found: Contradictions) -> None:
    """Check the outputs with ``interpose``.

    Engines must be able to connect to such an output, and there must be a source at each of its addresses.
    """
    for i, output in enumerate(found.config.outputs):
        at: Path = ("outputs", i)
        if not output.interpose or not found.sound((*at, "interpose")):
            continue
        _interposed_output(found, at)
        if found.streams_sound() and found.sound((*at, "endpoint")):
            _interposed_sources(found, at)


def _interposed_output(found: Contradictions, at: Path) -> None:
    output = found.config.outputs[int(at[1])]
    wrongs: list[tuple[str, bool, str, str | None]] = [
        ("type", output.type != "zmq", "interpose needs type zmq, because engines speak ZeroMQ", "type: zmq"),
        (
            "bind",
            not output.bind,
            "with interpose, engines and routers connect to kvbus, so it must listen",
            "bind: true",
        ),
        (
            "layout",
            output.layout != "per_source",
            "with interpose, each rank of an engine connects to its own port",
            "layout: per_source",
        ),
        (
            "endpoint",
            parse_endpoint(output.endpoint).is_ipc,
            "engines bind ipc:// endpoints, so no engine would connect to kvbus",
            "endpoint: tcp://127.0.0.1:5557",
        ),
    ]
    for name, wrong, text, example in wrongs:
        if wrong:
            found.report((*at, name), text, value=getattr(output, name), example=example)
    _no_keys(found, at, output)


def _no_keys(found: Contradictions, at: Path, section: object) -> None:
    for name in _KEYS:
        value = getattr(section, name)
        if value is not None:
            found.report(
                (*at, name), "engines do not support CURVE, so a port with interpose cannot use it", value=value
            )


def _interposed_sources(found: Contradictions, at: Path) -> None:
    config, output = found.config, found.config.outputs[int(at[1])]
    if parse_endpoint(output.endpoint).is_ipc:
        return
    reported: set[int] = set()
    for index, rank, slot in config.slots():
        source, key = config.sources[index], ("sources", index)
        if index in reported:
            continue
        try:
            here = endpoint_offset(output.endpoint, slot)
        except ValueError:
            continue  # the port would be above 65535, which `claims.ports` reports
        if found.sound((*key, "bind")) and not source.bind:
            wrong = f"engines connect to {show(at)}.endpoint, so kvbus must listen for this source"
            found.report((*key, "bind"), wrong, value=source.bind, example="bind: true")
            reported.add(index)
        elif found.sound((*key, "endpoint")) and source.rank_endpoints(rank)[0] != here:
            first = endpoint_offset(output.endpoint, slot - rank)
            wrong = f"{show(at)}.endpoint has the stream of this source at {here}, so its endpoint must be the same"
            found.report((*key, "endpoint"), wrong, value=source.endpoint, example=f"endpoint: {first}")
            reported.add(index)
        if rank == 0:
            _no_keys(found, key, source)


_PORTS = {"http": 80, "https": 443}


def _fronted(found: Contradictions) -> None:
    """Check the keys ``front`` and ``front_grpc``, which configure proxies in front of an engine's API.

    A proxy must not send requests to itself. It must be clear which source belongs to the engine behind the proxy. The
    output that the proxy announces must have endpoints that clients can use.
    """
    for key, front in (("front", found.config.front), ("front_grpc", found.config.front_grpc)):
        if front is None or not found.sound((key,)):
            continue
        if found.sound((key, "listen")):
            _front_loops(found, key, front)
        if found.streams_sound() and found.sound((key, "source")):
            _front_source(found, key, front)
            if found.sound(("outputs",), (key, "output")):
                _front_output(found, key, front)


def _front_loops(found: Contradictions, key: str, front: Fronting) -> None:
    asked: list[tuple[Path, str | None]] = [((key, "engine"), front.engine)]
    for i, source in enumerate(found.config.sources):
        asked.append((("sources", i, "api"), source.api))
        asked.append((("sources", i, "discover"), (source.discover or {}).get("http", {}).get("url")))
    for at, url in asked:
        if url is not None and found.sound(at) and _is_here(url if "://" in url else f"http://{url}", front.listen):
            found.report(at, f"this is the address of {key}.listen: kvbus would send requests to itself", value=url)


def _is_here(url: str, listen: str) -> bool:
    url_parts, (host, port) = urlsplit(url), parse_address(listen)
    asked, host = ("127.0.0.1" if each == "localhost" else each for each in (url_parts.hostname or "", host))
    here = asked == host or (is_loopback(asked) and Address(host, 1).is_wildcard)
    return here and port == (url_parts.port or _PORTS[url_parts.scheme])


def _front_source(found: Contradictions, key: str, front: Fronting) -> None:
    sources = found.config.sources
    names = [source.name for source in sources]
    if front.source is None and len(names) > 1:
        wrong = f"there are {len(names)} sources: name the one whose engine is behind this proxy"
        found.report((key, "source"), wrong, example=f"source: {names[0]}")
    if front.source is not None and front.source not in names and all(each.discover is None for each in sources):
        wrong = f"no source has this name; the sources are: {', '.join(names)}"
        found.report((key, "source"), wrong, value=front.source, example=f"source: {min(names, default='engine')}")


def _front_output(found: Contradictions, key: str, front: Fronting) -> None:
    outputs = found.config.outputs
    number = front.number_of_output(each.name for each in outputs)
    if number is None:
        if outputs:
            wrong = f"no output has this name; the outputs are: {', '.join(each.name for each in outputs)}"
            found.report((key, "output"), wrong, value=front.output, example=f"output: {outputs[0].name}")
        return
    at: Path = ("outputs", number)
    if not found.sound(*((*at, name) for name in ("type", "endpoint", "bind", "layout"))):
        return
    ranks = max(
        (each.data_parallel_size for each in found.config.sources if front.source in (None, each.name)), default=1
    )
    if wrong := _without_endpoints(outputs[number], ranks):
        found.report((key, "output"), f"{show(at)} {wrong}", value=outputs[number].name)


def _without_endpoints(output: OutputConfig, ranks: int) -> str:
    if output.type != "zmq":
        return f"is of type {output.type}, but clients that ask an engine for its event endpoints read ZeroMQ"
    if not output.bind:
        return "connects to a router, so it has no endpoint for other clients"
    if parse_endpoint(output.endpoint).is_ipc:
        return "has an ipc:// endpoint, but clients that ask an engine for its event endpoints use TCP"
    if output.layout == "merged" and ranks > 1:
        return f"has one stream for all {ranks} ranks (layout: merged), but clients ask for the stream of each rank"
    return ""


# -- topics: the routers of a profile must be able to read them, and they must distinguish the streams of an output


def _readable_topics(found: Contradictions) -> None:
    """Reject a topic that routers of the output's profile cannot read, and ``{model}`` without the key ``model``."""
    for i, output in enumerate(found.config.outputs):
        key: Path = ("outputs", i, "topic")
        if not found.sound(key):
            continue
        profile = PROFILES[output.profile if found.sound((*key[:-1], "profile")) else "vllm"]
        only, llm_d = profile.only_topic, profile.topics == "pod and model"
        if only is not None and output.topic not in (None, only):
            with_it = f"with the topic {only}" if only else "without a topic"
            wrong = f"profile {output.profile} accepts only batches {with_it}"
            found.report(key, wrong, value=output.topic, example="topic: null")
        elif output.topic is None:
            if llm_d:
                _llm_d_own(found, key)
        elif "model" in placeholders(output.topic) and not found.config.model:
            if found.sound(("model",)):
                example = "model: Qwen/Qwen3-32B"
                user = f"{show(key)} uses {{model}}" if output.topic != logs.TOPIC else f"{show(key[:-1])} needs it"
                found.report(("model",), user, value=found.config.model, example=example)
        elif llm_d and found.sound(("worker",), ("model",)):
            # Check one rendered topic for all streams. Their topics differ only in the source's name and the rank, and
            # neither can contain an @.
            model, worker = found.config.model or "", found.config.worker
            text = render_template(output.topic, model=model, worker=worker, source="engine", rank=0).decode()
            if not _names_pod_and_model(text):
                _llm_d(found, key, f"this template gives {text!r}")


def _one_topic_each(found: Contradictions) -> None:
    """Check the outputs with ``layout: per_topic``.

    Their topics must distinguish the streams, and a router that connects later must be able to get the state.
    """
    for i, output in enumerate(found.config.outputs):
        at: Path = ("outputs", i)
        if output.layout != "per_topic" or not found.sound((*at, "layout")):
            continue
        for name in ("replay_endpoint", "snapshot_endpoint"):
            if getattr(output, name) is not None:
                wrong = "requests do not contain a topic, so with layout: per_topic kvbus cannot know the stream"
                found.report((*at, name), wrong, value=getattr(output, name), example=f"{name}: null")
        if output.on_subscribe != "state":
            wrong = "with layout: per_topic there is no replay, so a router needs the state"
            found.report((*at, "on_subscribe"), wrong, value=output.on_subscribe, example="on_subscribe: state")
        why_not = PROFILES[output.profile].one_stream if found.sound((*at, "profile")) else ""
        if why_not:
            wrong = f"routers of profile {output.profile} {why_not}"
            found.report((*at, "layout"), wrong, value=output.layout, example="layout: merged")
        elif found.sound((*at, "topic")):
            _topic_of_each(found, (*at, "topic"), output.topic)


def _topic_of_each(found: Contradictions, key: Path, template: str | None) -> None:
    """Reject a topic template that gives two streams the same topic."""
    if not found.streams_sound() or not found.sound(("worker",), ("model",)):
        return
    several_ranks = any(source.data_parallel_size > 1 for source in found.config.sources)
    example = 'topic: "kv@{source}' + (".{rank}" if several_ranks else "") + '@{model}"'
    used = set() if template is None else placeholders(template)
    for needed in ("source", "rank") if several_ranks else ("source",):
        if template is None or needed not in used:
            wrong = f"with layout: per_topic each stream needs its own topic, so the topic needs {{{needed}}}"
            found.report(key, wrong, value=template, example=example)
            return
    first: dict[bytes, str] = {}
    for stream in found.config.streams():
        topic = render_topic(template or "", stream, found.config)
        other = first.setdefault(topic, stream.label)
        if other != stream.label:
            wrong = f"{other} and {stream.label} would both have the topic {topic.decode()!r}"
            found.report(key, wrong, value=template, example=example)
            return


def _llm_d_own(found: Contradictions, key: Path) -> None:
    """Reject an output that forwards the engines' own topics to llm-d if a source's ``topic`` is not a complete topic.

    ``sources[].topic`` is a prefix. If it is incomplete or empty, kvbus learns the engine's topic only from a batch, so
    it cannot check whether llm-d's routers can read the topic.
    """
    for i, source in enumerate(found.config.sources):
        prefix: Path = ("sources", i, "topic")
        if found.sound(prefix) and not _names_pod_and_model(source.topic):
            _llm_d(found, key, f"null means the source's own topic, and {show(prefix)} is {source.topic!r}")
            return


def _llm_d(found: Contradictions, key: Path, instead: str) -> None:
    profile = found.value((*key[:-1], "profile"))
    wrong = f"profile {profile} needs exactly three parts, kv@POD@MODEL; {instead}"
    value = shown(found.value(key))
    found.problems.append(Problem(show(key), wrong, value, 'topic: "kv@{worker}@{model}"', found.origins.get(key)))


def _names_pod_and_model(topic: str) -> bool:
    """Return whether llm-d's router finds a pod and a model in a topic, which must have the form ``kv@POD@MODEL``."""
    parts = topic.split("@")
    return len(parts) == _LLM_D_PARTS and parts[0] == "kv" and all(parts)
