"""What a configuration opens to whom, in a sentence each: said by ``kvbus check``."""

from __future__ import annotations

from collections.abc import Iterator

from kvbus.config.endpoints import is_loopback, parse_address, parse_endpoint
from kvbus.config.logs import LogKeys
from kvbus.config.models import Config


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
