"""Sentences about a good configuration, for ``kvbus check``: what it opens to whom, and what it cannot give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvbus.config.endpoints import is_loopback, parse_address, parse_endpoint
from kvbus.config.logs import LogKeys
from kvbus.config.models import Config, render_topic
from kvbus.config.outputs import OutputConfig
from kvbus.core.wire.profiles import PROFILES


def notes(config: Config) -> list[str]:
    """A sentence for each output whose routers cannot always be exact."""
    return [*_clears(config), *_replays(config)]


def _clears(config: Config) -> list[str]:
    return [
        f"outputs[{i}]: routers of profile {output.profile} take AllBlocksCleared for all ranks of a pod, and here "
        "each rank has a connection of its own, which nothing orders against the others: a router that missed batches "
        "may keep blocks that are gone, or miss some that are there; layout: merged is exact"
        for i, output in enumerate(config.outputs)
        if output.layout == "per_source"
        and PROFILES[output.profile].clears != "rank"
        and _ranks_of_a_pod(config, output) > 1
    ]


def _replays(config: Config) -> list[str]:
    """Routers at an engine's own address may take its replay for that of the stream they read."""
    engines = [source.replay_endpoint for source in config.sources if source.replay_endpoint is not None]
    return [
        f"outputs[{i}]: a router that learns from the engine where its replay is ({engines[0]}) would get the engine's "
        "numbers there, and reads others here; give the engine of such a router no replay_endpoint, or the router "
        + ("kvbus's replay" if output.replay_endpoint is None else output.replay_endpoint)
        for i, output in enumerate(config.outputs)
        if output.interpose and engines
    ]


def _ranks_of_a_pod(config: Config, output: OutputConfig) -> int:
    """The most streams that are of one pod: those under one topic, where routers read the pod off it."""
    by_topic = PROFILES[output.profile].topics == "pod and model"
    pods = Counter(
        (stream.topic if output.topic is None else render_topic(output.topic, stream, config)) if by_topic else b""
        for stream in config.streams()
    )
    return max(pods.values(), default=0)


def exposure(config: Config) -> list[str]:
    """A sentence for HTTP, for each output, for each source that listens, and for each front."""
    return [*_http(config), *_outputs(config), *_sources(config), *_front(config)]


def _http(config: Config) -> Iterator[str]:
    address = config.http_address
    if address is None:
        yield "http: nobody reads anything, there is no port"
        return
    local = is_loopback(address[0])
    around = "this machine" if local else "whoever reaches it"
    tokens = config.http_tokens_file
    whoever = f" and whoever has a token of {tokens}" if tokens is not None else ""
    everything, others = "the rest", ""
    if config.http_open == "probes":
        everything = "the probes and the page's files"
        others = "; the rest for those who may read token ids, and tokens for status"
    yield (
        f"http {config.http}: token ids and hashes for programs on this machine{whoever}; {everything} for {around}"
        f"{others}"
    )
    if tokens is not None and not local and config.http_tls_certificate_file is None:
        yield f"http {config.http}: tokens and token ids cross the network in clear without http_tls_certificate_file"


def _outputs(config: Config) -> Iterator[str]:
    for i, output in enumerate(config.outputs):
        endpoints = [each for each in (output.endpoint, output.replay_endpoint, output.snapshot_endpoint) if each]
        reached = [each for each in endpoints if not parse_endpoint(each).is_loopback]
        at = ", ".join(reached or endpoints)
        what = "token ids" if output.token_ids == "keep" else "block hashes"
        if output.log is not None:
            who = f"whoever may read them there, {_at_servers(output.log)}"
        elif output.curve_secret_key_file is not None:
            who = "those whose key it knows, encrypted"
        else:
            who = "whoever reaches it, in clear" if reached else "programs on this machine"
        yield f"outputs[{i}] {output.name}: {what} for {who} ({at})"


def _at_servers(keys: LogKeys) -> str:
    if keys.tls_ca_file is None:
        return "in clear, and kvbus says to no server who it is"
    if keys.username is not None:
        return f"encrypted, kvbus as {keys.username} by its password"
    who = "says to no server who it is" if keys.tls_certificate_file is None else "by its certificate"
    return f"encrypted, kvbus {who}"


def _sources(config: Config) -> Iterator[str]:
    for i, source in enumerate(config.sources):
        if not source.bind:
            continue
        if source.curve_secret_key_file is not None:
            who = "those whose key it knows"
        else:
            who = "programs on this machine" if parse_endpoint(source.endpoint).is_loopback else "whoever reaches it"
        yield f"sources[{i}] {source.name}: {who} may publish as this engine ({source.endpoint})"


def _front(config: Config) -> Iterator[str]:
    for key, front in (("front", config.front), ("front_grpc", config.front_grpc)):
        if front is None:
            continue
        local = is_loopback(parse_address(front.listen)[0])
        who = "programs on this machine" if local else "whoever reaches it"
        yield (
            f"{key} {front.listen}: the whole API of {front.engine} for {who}, in clear; kvbus asks nobody who they "
            "are, and to the engine every request comes from kvbus"
        )
