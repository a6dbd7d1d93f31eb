"""CURVE keys for one demo, in a temporary directory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from kvbus.client import Curve
from kvbus.transport.curve import certificate, generate


class Keyring:
    """The key pairs of the bus and of a router, as an operator would distribute them."""

    def __init__(self) -> None:
        self._directory: Final = tempfile.TemporaryDirectory(prefix="kvbus-demo-")
        directory = Path(self._directory.name)  # nobody else can read it
        public, secret = generate()
        router_public, router_secret = generate()
        secret_file, allowed = directory / "kvbus.key_secret", directory / "routers.keys"
        secret_file.touch(mode=0o600)
        secret_file.write_text(certificate(public, secret))
        allowed.write_text(f"{router_public.decode()} the demo's routers\n")
        self.of_the_bus: Final = {"curve_secret_key_file": str(secret_file), "curve_client_keys": str(allowed)}
        """The key settings of an output's configuration."""
        self.of_a_router: Final = Curve(router_public, router_secret, public)

    def forget(self) -> None:
        """Remove the files."""
        self._directory.cleanup()
