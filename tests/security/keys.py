"""CURVE keys for tests: key pairs in files, as an operator keeps them, and sockets of peers that use these keys."""

from __future__ import annotations

from pathlib import Path

import zmq

from kvbus.transport.curve import Curve, certificate, generate


class Pair:
    """One CURVE key pair, in the two files that ``kvbus keygen`` writes: one for the public and one for the secret
    key.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.public, self.secret = generate()
        self.public_file = directory / f"{name}.key"
        self.secret_file = directory / f"{name}.key_secret"
        self.public_file.write_text(certificate(self.public))
        self.secret_file.touch(mode=0o600)
        self.secret_file.write_text(certificate(self.public, self.secret))

    def towards(self, server: Pair) -> Curve:
        """Return the CURVE keys of a client with this key pair that connects to ``server``."""
        return Curve(self.public, self.secret, server.public)


class Keyring:
    """The key pairs of kvbus, an engine, a router on the allow-list, and a router that is not on it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.bus, self.engine, self.router, self.stranger = (
            Pair(directory, name) for name in ("kvbus", "engine", "router", "stranger")
        )
        self.allowed = directory / "routers.keys"
        self.allow(self.router)

    def allow(self, *pairs: Pair) -> None:
        """Replace the allow-list of routers atomically by a list of these public keys."""
        new = self.directory / "routers.keys.new"
        new.write_text("".join(f"{pair.public.decode()} router\n" for pair in pairs))
        new.rename(self.allowed)

    @property
    def output(self) -> dict[str, str]:
        """The CURVE settings of an output: the file of kvbus's secret key, and the allow-list of routers."""
        return {"curve_secret_key_file": str(self.bus.secret_file), "curve_client_keys": str(self.allowed)}

    @property
    def source(self) -> dict[str, str]:
        """The CURVE settings of a source: the files of kvbus's secret key and of the engine's public key."""
        return {
            "curve_secret_key_file": str(self.bus.secret_file),
            "curve_server_key_file": str(self.engine.public_file),
        }


def client_context(client: Pair, server: Pair) -> zmq.Context[zmq.Socket[bytes]]:
    """Return a context in which every socket is a CURVE client."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.setsockopt(zmq.CURVE_SERVERKEY, server.public)
    context.setsockopt(zmq.CURVE_PUBLICKEY, client.public)
    context.setsockopt(zmq.CURVE_SECRETKEY, client.secret)
    return context


def server_context(server: Pair) -> zmq.Context[zmq.Socket[bytes]]:
    """Return a context in which every socket is a CURVE server that accepts all clients, as an engine's would."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.setsockopt(zmq.CURVE_SERVER, 1)
    context.setsockopt(zmq.CURVE_SECRETKEY, server.secret)
    return context
