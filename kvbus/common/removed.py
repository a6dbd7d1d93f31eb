"""The configuration keys, commands, options and HTTP paths that kvbus no longer has, and what to use in place of them.

If a user gives a name that does not exist, kvbus looks it up here. If kvbus once had this name, it shows "gone: " and
the sentence for the name, and not "unknown key" or "no such command".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

KEYS: Final[Mapping[str, str]] = {
    "analytics": "use `kvbus record`, and count in the capture how long blocks live",
    "on_partial": "use the engine's own API to reset its cache, or restart it; kvbus waits for either",
    "http_client_ca_file": "use bearer tokens in http_tokens_file (`kvbus token` makes one)",
    "http_token_review": "use bearer tokens in http_tokens_file (`kvbus token` makes one)",
    "http_access_review": "use bearer tokens in http_tokens_file (`kvbus token` makes one)",
    "dns.family": "leave it out: kvbus uses IPv4, or IPv6 where a host has no IPv4 address",
    "kubernetes.resource": "leave it out and select the pods, or use discover.dns with a Service",
    "state_key_file": "use a state_dir in memory (the default), or on an encrypted volume",
}
"""Removed keys of the configuration, each with a sentence that says what to use in place of it.

A key is a dotted path without list positions, such as ``outputs.layout``. For a key below ``sources[].discover``, the
path begins with the kind of discovery, such as ``dns.family``.
"""

COMMANDS: Final[Mapping[str, str]] = {
    "log": "use the broker's own commands (see LOG.md)",
    "conform engine --junit": "use --json",
    "conform router --dynamo-indexer": "use --driver with a program that registers the streams at the indexer",
    "conform router --junit": "use --json",
    "conform router --score-url": "use --driver with a program that asks the URL",
    "conform router --view-command": "use --driver with a program that runs the command",
    "demo --curve": "use `kvbus run` with curve_secret_key_file (see SECURITY.md)",
    "demo --plain": "use `kvbus demo | cat`",
    "demo --seed": "leave it out: the engines' requests are the same each time",
    "dump --snapshot": "use --snapshot-endpoint",
    "play --delay": "use --subscribers, which waits until a router is there",
    "play --wait": "use --subscribers, which waits until a router is there",
    "query --analytics": "use `kvbus record`, and count in the capture how long blocks live",
    "sim --reset-every": "use --restart-every, which empties the cache too",
    "sim --tenants": "use `kvbus play` with a capture of an engine that has them",
}
"""Removed commands and options, each with a sentence that says what to use in place of it.

A command is written like ``log``, and an option with its command, like ``query --analytics``.
"""

PATHS: Final[Mapping[str, str]] = {
    "/query": "use `kvbus index`, which answers POST /query",
    "/openapi.json": "use `kvbus index`, which describes its questions at /openapi.json",
}
"""Removed paths of the HTTP port, such as ``/query``, each with a sentence that says what to use in place of it."""


def gone(instead: str) -> str:
    """Return the error message for a removed key, command or path: "gone: " and the sentence ``instead``.

    ``instead`` says what to use in place of the removed name.
    """
    return f"gone: {instead}"


def removed_key(path: Iterable[str | int]) -> str | None:
    """Return the error message for a removed key of the configuration; None if no such key was removed."""
    names = [piece for piece in path if isinstance(piece, str)]
    # Look the last name up, too: if the user wrote a removed key in the wrong section, the path is not in the table.
    instead = KEYS.get(".".join(names)) or KEYS.get(names[-1] if names else "")
    return None if instead is None else gone(instead)


def removed_command(words: str) -> str | None:
    """Return the error message for a removed command or option; None if there was no such command or option."""
    instead = COMMANDS.get(words)
    return None if instead is None else gone(instead)
