"""The notes of ``kvbus check`` about a valid configuration.

They state who has access to each port, and which routers may have a wrong view of the live blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvbus.config.endpoints import is_loopback, parse_address, parse_endpoint
from kvbus.config.logs import LogKeys
from kvbus.config.models import Config, render_topic
from kvbus.config.outputs import OutputConfig
from kvbus.core.wire.profiles import PROFILES


def notes(config: Config) -> list[str]:
    """Return a note for each output whose configuration may give routers a wrong view of the live blocks."""
    return [config.as_written(each) for each in (*_clears(config), *_replays(config))]


def _clears(config: Config) -> list[str]:
    return [
        f"outputs[{i}]: a router of profile {output.profile} applies AllBlocksCleared to all ranks of a pod. Each rank "
        "has its own connection here, so a clear may arrive before earlier batches of another rank. Then a router that "
        "missed batches may keep removed blocks, or lack live ones. With layout: merged its view is exact"
        for i, output in enumerate(config.outputs)
        if output.layout == "per_source"
        and PROFILES[output.profile].clears not in {"rank", "connection"}
        and _ranks_of_a_pod(config, output) > 1
    ]


def _replays(config: Config) -> list[str]:
    """Return notes about routers that may request replays from the engine itself in place of kvbus.

    With ``interpose``, routers connect to the engine's own address. If they also learn the engine's replay endpoint,
    they get replays with the engine's seqs, but live batches with kvbus's seqs.
    """
    engines = [source.replay_endpoint for source in config.sources if source.replay_endpoint is not None]
    return [
        f"outputs[{i}]: a router that learns the replay endpoint from the engine ({engines[0]}) gets replays with the "
        "engine's seqs, but live batches with kvbus's; start the engine without replay_endpoint, or give the router "
        + ("kvbus's replay" if output.replay_endpoint is None else output.replay_endpoint)
        for i, output in enumerate(config.outputs)
        if output.interpose and engines
    ]


def _ranks_of_a_pod(config: Config, output: OutputConfig) -> int:
    """Return the largest number of streams of an output that its routers treat as one pod.

    Routers that read the pod from the topic treat streams with the same topic as one pod. All other routers treat all
    streams as one pod.
    """
    by_topic = PROFILES[output.profile].topics == "pod and model"
    pods = Counter(
        (stream.topic if output.topic is None else render_topic(output.topic, stream, config)) if by_topic else b""
        for stream in config.streams()
    )
    return max(pods.values(), default=0)


def exposure(config: Config) -> list[str]:
    """Return sentences about who has access to HTTP, each output, each source that kvbus binds, and each proxy."""
    sentences = (*_http(config), *_outputs(config), *_sources(config), *_fronts(config))
    return [config.as_written(each) for each in sentences]


def _who(*, local: bool) -> str:
    return "programs on this machine" if local else "anyone who reaches it"


def _http(config: Config) -> Iterator[str]:
    address = config.http_address
    if address is None:
        yield "http: off"
        return
    local, tokens = is_loopback(address[0]), config.http_tokens_file
    readers = f" and anyone with a token of {tokens}" if tokens is not None else ""
    rest = f"{_who(local=local)} can read everything else"
    if config.http_open == "probes":
        rest = (
            f"{_who(local=local)} can read the probes and the page's files; all other paths need the right to "
            "read token ids, or a token for the status"
        )
    yield f"http {config.http}: programs on this machine{readers} can read token ids and hashes; {rest}"
    if tokens is not None and not local and config.http_tls_certificate_file is None:
        yield f"http {config.http}: tokens and token ids cross the network unencrypted; set http_tls_certificate_file"


def _outputs(config: Config) -> Iterator[str]:
    for i, output in enumerate(config.outputs):
        endpoints = [each for each in (output.endpoint, output.replay_endpoint, output.snapshot_endpoint) if each]
        reached = [each for each in endpoints if not parse_endpoint(each).is_loopback]
        what = "token ids" if output.token_ids == "keep" else "block hashes"
        who, how = _who(local=not reached), ", unencrypted" if reached else ""
        if output.log is not None:
            who, how = "anyone who may read the log", f", {_at_servers(output.log)}"
        elif output.curve_secret_key_file is not None:
            who, how = "anyone whose key is in curve_client_keys", ", encrypted"
        yield f"outputs[{i}] {output.name}: {who} can read {what}{how} ({', '.join(reached or endpoints)})"


def _at_servers(keys: LogKeys) -> str:
    if keys.tls_ca_file is None:
        return "unencrypted, and kvbus does not log in"
    if keys.username is not None:
        return f"encrypted, and kvbus logs in as {keys.username} by a password"
    return f"encrypted, and kvbus {'logs in by its certificate' if keys.tls_certificate_file else 'does not log in'}"


def _sources(config: Config) -> Iterator[str]:
    for i, source in enumerate(config.sources):
        if source.bind:
            who = _who(local=parse_endpoint(source.endpoint).is_loopback)
            if source.curve_secret_key_file is not None:
                who = "anyone whose key is in curve_client_keys"
            yield f"sources[{i}] {source.name}: {who} can publish as this engine ({source.endpoint})"


def _fronts(config: Config) -> Iterator[str]:
    for key, front in (("front", config.front), ("front_grpc", config.front_grpc)):
        if front is not None:
            who = _who(local=is_loopback(parse_address(front.listen)[0]))
            yield (
                f"{key} {front.listen}: {who} can use the complete API of {front.engine}, unencrypted and without a "
                "login; the engine sees kvbus as the client of every request"
            )
