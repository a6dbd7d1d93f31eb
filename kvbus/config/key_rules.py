"""Keys of CURVE and TLS: refuse what is incomplete, and what nothing here can use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbus.config import parts
from kvbus.config.paths import Path

if TYPE_CHECKING:
    from kvbus.config.findings import Findings
    from kvbus.config.outputs import OutputConfig
    from kvbus.config.sources import SourceConfig


def curve(found: Findings) -> None:
    """Refuse an incomplete CURVE configuration: it would be open to everybody, or reach nobody."""
    for i, source in enumerate(found.config.sources):
        dials = not source.bind or source.replay_endpoint is not None or source.snapshot_endpoint is not None
        _curve_keys(found, ("sources", i), source, dials=dials, binds=source.bind)
    for i, output in enumerate(found.config.outputs):
        binds = output.bind or output.replay_endpoint is not None or output.snapshot_endpoint is not None
        _curve_keys(found, ("outputs", i), output, dials=not output.bind, binds=binds)


def _curve_keys(found: Findings, section: Path, at: SourceConfig | OutputConfig, *, dials: bool, binds: bool) -> None:
    """Check the three keys of one source or output; ``dials`` and ``binds`` say which of them it needs."""
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
            found.report(own, f"needed too, with {name}", example=f"{own[-1]}: /etc/kvbus/keys/kvbus.key_secret")
            return
        if value is not None and not needed:
            found.report(key, f"there is nothing here that {why}", value=str(value))
        if value is None and needed and given:
            example = f"{name}: /etc/kvbus/keys/{'peer.key' if name.endswith('file') else 'clients'}"
            found.report(key, f"needed with curve_secret_key_file, for what {why}", example=example)


def libsodium(found: Findings) -> None:
    """Refuse CURVE keys of an output where nothing can use them."""
    if parts.has_libsodium():
        return
    for i, output in enumerate(found.config.outputs):
        key: Path = ("outputs", i, "curve_secret_key_file")
        if output.type == "zmq" and output.curve_secret_key_file is not None and found.sound(key):
            wrong = "CURVE keys of an output need libsodium, which is not installed"
            found.report(key, wrong, value=str(output.curve_secret_key_file), example="pip install kvbus[curve]")


def tls(found: Findings) -> None:
    """Refuse half of a TLS configuration."""
    needed = {
        "http_tls_certificate_file": ("http_tls_key_file",),
        "http_tls_key_file": ("http_tls_certificate_file",),
    }
    for name, others in needed.items():
        given = [other for other in others if getattr(found.config, other) is not None]
        if given and getattr(found.config, name) is None and found.sound((name,), *((each,) for each in given)):
            example = f"{name}: /etc/kvbus/tls/{'tls.crt' if 'certificate' in name else 'tls.key'}"
            found.report((name,), f"needed with {given[0]}", example=example)
