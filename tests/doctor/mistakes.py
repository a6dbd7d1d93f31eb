"""Mistakes of operators for tests of `kvbus doctor`, made on real sockets.

Each mistake is listed with the configuration key and the words that doctor's first line must have.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import zmq

from kvbus.transport.curve import certificate, generate
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.disk import room_for
from tests.doubles.payloads import payload, store
from tests.ports import free_port, ports_in_a_row

HOST = "tcp://127.0.0.1"


@dataclass
class Scene:
    """The sockets of a test, and a configuration with a mistake that doctor has to find.

    ``over`` has configuration keys that are added to ``outputs``, or replace it.
    """

    stack: AsyncExitStack
    tmp: Path
    over: dict[str, Any] = field(default_factory=dict)
    context: zmq.Context = field(default_factory=zmq.Context)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.stack.callback(lambda: self.context.destroy(0))
        self.source = {
            "name": "engine",
            "endpoint": f"{HOST}:{free_port()}",
            "replay_endpoint": f"{HOST}:{free_port()}",
        }
        out = ports_in_a_row(64)
        self.output: dict[str, Any] = {
            "name": "routers",
            "endpoint": f"{HOST}:{out}",
            "replay_endpoint": f"{HOST}:{out + 32}",
        }
        self.over = {"http": f"127.0.0.1:{free_port()}", "state_dir": None}

    def config(self) -> dict[str, Any]:
        self.over.setdefault("sources", [self.source])
        return {"outputs": [self.output], **self.over}

    async def publishes(
        self, engine: EnginePublisher, what: Callable[[int], list[Any]] | None = None, **more: Any
    ) -> None:
        """Let an engine publish a batch every 20 ms from now on."""
        task = asyncio.ensure_future(_publish(engine, what or (lambda n: [store([n + 1])]), **more))
        self.stack.callback(task.cancel)

    async def engine(self, live: Any = None, replay: Any = None, **more: Any) -> EnginePublisher:
        """Start an engine that publishes batches. By default its endpoints are those of the configured source."""
        what, rank, ts = more.pop("what", None), more.pop("rank", 0), more.pop("ts", None)
        silent = more.pop("silent", False)
        publisher = EnginePublisher(
            live or self.source["endpoint"],
            self.source["replay_endpoint"] if replay is None else replay or None,
            bind=more.pop("bind", True),
            **more,
        )
        await self.stack.enter_async_context(publisher)
        if not silent:
            await self.publishes(publisher, what, rank=rank, ts=ts)
        return publisher

    def socket(self, kind: int, endpoint: str, *, bind: bool = True, **options: Any) -> zmq.Socket:
        made = self.context.socket(kind)
        self.stack.callback(made.close, 0)
        for name, value in options.items():
            setattr(made, name, value)
        (made.bind if bind else made.connect)(endpoint)
        return made

    async def server(self, endpoint: str, greeting: bytes = b"", context: ssl.SSLContext | None = None) -> None:
        """Start a TCP server that sends these bytes to each client at once, and then nothing more."""

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(greeting)
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                while await reader.read(1024):
                    pass
            writer.close()

        port = int(endpoint.rpartition(":")[2])
        server = await asyncio.start_server(accepted, "127.0.0.1", port, ssl=context)
        self.stack.callback(server.close)

    def curve_files(self, mode: int = 0o600) -> tuple[dict[str, str], tuple[bytes, bytes], bytes]:
        """Return the settings of kvbus's CURVE files, the engine's key pair, and kvbus's public key."""
        theirs, ours = generate(), generate()
        secret, server = self.tmp / "kvbus.key_secret", self.tmp / "engine.key"
        secret.write_text(certificate(*ours))
        secret.chmod(mode)
        server.write_text(certificate(theirs[0]))
        return {"curve_secret_key_file": str(secret), "curve_server_key_file": str(server)}, theirs, ours[0]


def tls_context(directory: Path) -> ssl.SSLContext:
    """Return the TLS context of a server with a self-signed certificate."""
    made, key = directory / "cert.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=engine", "-days", "1"]
    subprocess.run([*command, "-keyout", key, "-out", made], check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made, key)
    return context


async def _publish(
    engine: EnginePublisher, what: Callable[[int], list[Any]], *, rank: int = 0, ts: float | None = None
) -> None:
    for n in range(10**9):
        engine.publish(payload(*what(n), ts=time.time() if ts is None else ts, rank=rank))
        await asyncio.sleep(0.02)


@dataclass(frozen=True)
class Mistake:
    """One mistake, described in the words of the documentation.

    Attributes:
        key: the configuration key in doctor's first line.
        says: words in doctor's first line; empty if only a running bus notices the mistake.
        running: the first finding of a running bus; empty if the bus does not start, or does not notice the mistake.
        number: the mistake's number in `NUMBERED` (test_score.py); 0 if it is not counted there.
    """

    what: str
    key: str
    says: str
    make: Callable[[Scene], Any]
    running: str
    number: int


MISTAKES: list[Mistake] = []


def mistake(what: str, *, key: str, says: str = "", running: str = "", number: int = 0):
    def add(make):
        MISTAKES.append(Mistake(what, key, says, make, running, number))
        return make

    return add


# -- the way to the engine


@mistake(
    "the engine does not run, or its events are off",
    key="sources[0].endpoint",
    says="nothing listens at",
    running="nothing_listens",
    number=6,
)
async def nobody(_scene):
    pass


@mistake(
    "the host name is wrong", key="sources[0].endpoint", says="does not resolve", running="host_unknown", number=26
)
async def name(scene):
    scene.source |= {"endpoint": "tcp://engine.invalid:5557", "replay_endpoint": "tcp://engine.invalid:5558"}


@mistake("a firewall drops what goes to the port", key="sources[0].endpoint", says="a firewall drops")
async def dropped(scene):
    await scene.engine(f"{HOST}:{free_port()}")
    # No process accepts connections and the kernel's queue is full, so the kernel drops SYNs, as a firewall does.
    full = scene.stack.enter_context(socket.socket())
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    for _ in range(3):
        filler = scene.stack.enter_context(socket.socket())
        filler.setblocking(False)
        filler.connect_ex(full.getsockname())
    scene.source["endpoint"] = f"{HOST}:{full.getsockname()[1]}"


@mistake(
    "the two ports are swapped",
    key="sources[0].endpoint",
    says="endpoint and replay_endpoint are swapped",
    running="swapped_ports",
    number=1,
)
async def swapped(scene):
    await scene.engine(scene.source["replay_endpoint"], scene.source["endpoint"])


@mistake("both ends dial", key="sources[0].bind", says="the engine and kvbus both dial", running="both_dial", number=27)
async def both_dial(scene):
    await scene.engine(f"{HOST}:{free_port()}", bind=False)


@mistake("both ends bind", key="sources[0].bind", says="the engine and kvbus both bind", number=3)
async def both_bind(scene):
    await scene.engine()
    scene.source["bind"] = True


@mistake(
    "`bind: true`, and no engine dials in",
    key="sources[0].bind",
    says="no engine has dialled in",
    running="no_engine_dialled_in",
    number=28,
)
async def nobody_dials(scene):
    await scene.engine(f"{HOST}:{free_port()}")
    scene.source["bind"] = True


@mistake(
    "`interpose`, and no engine dials in",
    key="interpose.endpoint",
    says="no engine has dialled in",
    running="no_engine_dialled_in",
)
async def interposed(scene):
    scene.over |= {"interpose": {"endpoint": scene.source["endpoint"]}, "sources": [], "outputs": []}


@mistake(
    "two engines dial one port",
    key="sources[0].endpoint",
    says="several publishers send on one endpoint",
    running="conflict",
    number=29,
)
async def two_dial(scene):
    scene.source["bind"] = True
    await scene.engine(bind=False)
    await scene.engine(replay="", bind=False)


@mistake(
    "the endpoint is the engine's HTTP port",
    key="sources[0].endpoint",
    says="an HTTP server",
    running="not_zeromq",
    number=8,
)
async def http(scene):
    class Silent(BaseHTTPRequestHandler):
        def log_message(self, *_args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Silent)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    scene.stack.callback(server.server_close)
    scene.stack.callback(server.shutdown)
    await scene.engine(f"{HOST}:{free_port()}")
    scene.source["endpoint"] = f"{HOST}:{server.server_port}"


@mistake("TLS where plain ZeroMQ is expected", key="sources[0].endpoint", says="a TLS server", running="not_zeromq")
async def tls(scene):
    await scene.server(scene.source["endpoint"], context=tls_context(scene.tmp))
    await scene.engine(f"{HOST}:{free_port()}")


@mistake("the port is an SSH server's", key="sources[0].endpoint", says="an SSH server", running="not_zeromq")
async def ssh(scene):
    await scene.server(scene.source["endpoint"], b"SSH-2.0-OpenSSH_9.6\r\n")
    await scene.engine(f"{HOST}:{free_port()}")


@mistake(
    "the port accepts and says nothing",
    key="sources[0].endpoint",
    says="sends nothing",
    running="silent_port",
    number=7,
)
async def silent(scene):
    await scene.server(scene.source["endpoint"])
    await scene.engine(f"{HOST}:{free_port()}")


@mistake("a peer of ZMTP 1.0 (libzmq 2)", key="sources[0].endpoint", says="ZMTP 1.0 or 2.0")
async def zmtp_1(scene):
    await scene.server(scene.source["endpoint"], b"\x01\x00")
    await scene.engine(f"{HOST}:{free_port()}")


@mistake(
    "the endpoint is a router's SUB",
    key="sources[0].endpoint",
    says="is a subscriber (SUB) socket; expected a publisher",
    running="endpoint_is_subscriber",
    number=30,
)
async def a_router(scene):
    scene.socket(zmq.SUB, scene.source["endpoint"])
    await scene.engine(f"{HOST}:{free_port()}")


@mistake(
    "the endpoint is some other ZeroMQ service",
    key="sources[0].endpoint",
    says="is a PULL socket; expected a publisher",
    running="endpoint_is_other",
)
async def a_service(scene):
    scene.socket(zmq.PULL, scene.source["endpoint"])
    await scene.engine(f"{HOST}:{free_port()}")


# -- CURVE


@mistake(
    "CURVE on the engine's side alone",
    key="sources[0].curve_secret_key_file",
    says="only one side of the connection",
    running="curve_one_side",
    number=22,
)
async def curve_there(scene):
    _, theirs, _ = scene.curve_files()
    for at, kind in (("endpoint", zmq.PUB), ("replay_endpoint", zmq.ROUTER)):
        scene.socket(kind, scene.source[at], curve_server=1, curve_secretkey=theirs[1], curve_publickey=theirs[0])


@mistake(
    "CURVE on kvbus's side alone",
    key="sources[0].curve_secret_key_file",
    says="only one side of the connection",
    running="curve_one_side",
)
async def curve_here(scene):
    files, _, _ = scene.curve_files()
    scene.source |= files
    await scene.engine()


@mistake(
    "the engine has another CURVE key",
    key="sources[0].curve_server_key_file",
    says="the CURVE keys of kvbus and",
    running="curve_keys_differ",
)
async def curve_other(scene):
    files, _, _ = scene.curve_files()
    scene.source |= files
    public, secret = generate()
    for at, kind in (("endpoint", zmq.PUB), ("replay_endpoint", zmq.ROUTER)):
        scene.socket(kind, scene.source[at], curve_server=1, curve_secretkey=secret, curve_publickey=public)


@mistake("others may read a secret key", key="sources[0].curve_secret_key_file", says="other users can read it")
async def readable_key(scene):
    files, _, _ = scene.curve_files(mode=0o644)
    scene.source |= files


# -- the replay


@mistake("`replay_endpoint` is a publisher's", key="sources[0].replay_endpoint", says="does not answer replay requests")
async def replay_publishes(scene):
    await scene.engine(replay="")
    await scene.engine(scene.source["replay_endpoint"], "")


@mistake(
    "the engine has no replay",
    key="sources[0].replay_endpoint",
    says="nothing listens at",
    running="replay_silent",
    number=9,
)
async def no_replay(scene):
    await scene.engine(replay="")


@mistake(
    "`replay_endpoint` is another engine's",
    key="sources[0].replay_endpoint",
    says="returns batches that differ",
    running="replay_of_another",
)
async def other_replay(scene):
    await scene.engine(replay="")
    await scene.engine(f"{HOST}:{free_port()}", what=lambda n: [store([10**6 + n])])


@mistake(
    "the engine's replay stands still",
    key="sources[0].replay_endpoint",
    says="does not answer",
    running="replay_silent",
    number=34,
)
async def mute_replay(scene):
    await scene.engine(replay="")
    scene.socket(zmq.ROUTER, scene.source["replay_endpoint"])


# -- ranks


@mistake(
    "the engine has fewer ranks",
    key="sources[0].data_parallel_size",
    says="(data-parallel rank 2, 3), but 2 of 4 ranks answer",
    running="ranks_missing",
    number=32,
)
async def ranks_missing(scene):
    live, replay = ports_in_a_row(8), ports_in_a_row(8)
    scene.source |= {"endpoint": f"{HOST}:{live}", "replay_endpoint": f"{HOST}:{replay}", "data_parallel_size": 4}
    for rank in range(2):
        await scene.engine(f"{HOST}:{live + rank}", f"{HOST}:{replay + rank}", rank=rank)


@mistake(
    "the engine has more ranks",
    key="sources[0].data_parallel_size",
    says="no source reads it",
    running="more_ranks_perhaps",
    number=4,
)
async def ranks_beyond(scene):
    live, replay = ports_in_a_row(8), ports_in_a_row(8)
    scene.source |= {"endpoint": f"{HOST}:{live}", "replay_endpoint": f"{HOST}:{replay}"}
    for rank in range(2):
        await scene.engine(f"{HOST}:{live + rank}", f"{HOST}:{replay + rank}", rank=rank)


@mistake("the ports begin at another rank's", key="sources[0].endpoint", says="rank 1 publishes at")
async def ranks_shifted(scene):
    live, replay = ports_in_a_row(8), ports_in_a_row(8)
    scene.source |= {"endpoint": f"{HOST}:{live}", "replay_endpoint": f"{HOST}:{replay}", "data_parallel_size": 2}
    for rank in range(2):
        await scene.engine(f"{HOST}:{live + rank}", f"{HOST}:{replay + rank}", rank=rank + 1)


# -- the stream


@mistake(
    "the wrong topic", key="sources[0].topic", says="no live batch comes under topic 'kv@'", running="topic", number=2
)
async def topic(scene):
    scene.source["topic"] = "kv@"
    await scene.engine(topic=b"kv-events")


@mistake(
    "the wrong block size",
    key="block_size",
    says="block_size is 24, but the engine has blocks of 16 tokens",
    running="block_size",
    number=5,
)
async def size(scene):
    scene.over["block_size"] = 24
    await scene.engine(what=lambda n: [store([2 * n + 1, 2 * n + 2])])


@mistake(
    "an engine that numbers no batches",
    key="sources[0].endpoint",
    says="have no sequence number",
    running="not_events",
    number=31,
)
async def unnumbered(scene):
    engine = await scene.engine(silent=True)
    scene.stack.callback(
        asyncio.ensure_future(_send(lambda n: engine.send_frames(b"", payload(store([n + 1]))))).cancel
    )


@mistake(
    "another publisher's port: no KV-cache events",
    key="sources[0].endpoint",
    says="are not msgpack",
    running="not_events",
)
async def no_events(scene):
    engine = await scene.engine(silent=True)
    scene.stack.callback(asyncio.ensure_future(_send(lambda _: engine.publish(b"\xc1metrics"))).cancel)


@mistake(
    "batches larger than kvbus takes",
    key="limits.max_frame_bytes",
    says="larger than limits.max_frame_bytes",
    running="frame_too_large",
    number=24,
)
async def too_large(scene):
    scene.over["limits"] = {"max_frame_bytes": 4096}
    await scene.engine(replay="", what=lambda n: [store(list(range(n, n + 200)))])
    scene.source["replay_endpoint"] = None


@mistake("two publishers behind one address", key="sources[0].endpoint", says="several publishers send on one endpoint")
async def two_publishers(scene):
    engine = await scene.engine(replay="", silent=True)
    scene.source["replay_endpoint"] = None

    def both(n):
        for who in (0, 10**6):
            engine.send_frames(b"", n.to_bytes(8, "big"), payload(store([who + n + 1]), ts=time.time()))

    scene.stack.callback(asyncio.ensure_future(_send(both)).cancel)


@mistake("prefix caching is off (`--history`)", key="sources[0].endpoint", says="has published nothing so far")
async def caching_off(scene):
    scene.options["history"] = True
    await scene.engine(silent=True)


@mistake("no traffic, or events are off", key="sources[0].endpoint", says="nothing has come from")
async def idle(scene):
    await scene.engine(silent=True)


@mistake(
    "`PYTHONHASHSEED` unset (two workers)", key="sources", says="PYTHONHASHSEED is unset, or not the same", number=10
)
async def hash_seed(scene):
    other = {"name": "other", "endpoint": f"{HOST}:{free_port()}", "replay_endpoint": f"{HOST}:{free_port()}"}
    scene.over["sources"] = [scene.source, other]
    prompt = list(range(16))
    await scene.engine(what=lambda n: [store([bytes([1]) * 32], tokens=prompt)])
    await scene.engine(
        other["endpoint"], other["replay_endpoint"], what=lambda n: [store([bytes([2]) * 32], tokens=prompt)]
    )


@mistake("the clocks differ", key="sources[0].endpoint", says="s behind", running="clock_off", number=23)
async def clock(scene):
    await scene.engine(ts=time.time() - 600)


@mistake(
    "an engine without prefix groups",
    key="groups",
    says="no group of this model has blocks that form prefixes",
    running="no_prefix",
)
async def no_prefix(scene):
    await scene.engine(what=lambda n: [store([n + 1], group=1, kv_cache_spec_kind="sliding_window")])


@mistake(
    "the engine publishes two streams",
    key="sources[0].topic",
    says="the engine publishes several streams",
    running="other_topic",
)
async def two_topics(scene):
    engine = await scene.engine(replay="", silent=True)
    scene.source["replay_endpoint"] = None

    def both(n):
        for topic in (b"one", b"two"):
            engine.send_frames(topic, n.to_bytes(8, "big"), payload(store([n + 1]), ts=time.time()))

    scene.stack.callback(asyncio.ensure_future(_send(both)).cancel)


# -- kvbus's own side


@mistake("an output's port is taken", key="outputs[0].endpoint", says="is in use by process", number=17)
async def port_taken(scene):
    await scene.engine()
    scene.socket(zmq.PULL, scene.output["endpoint"])


@mistake("an output's host is another machine's", key="outputs[0].endpoint", says="not an address of this machine")
async def not_ours(scene):
    await scene.engine()
    scene.output["endpoint"] = "tcp://192.0.2.7:5657"


@mistake("an output's host is a name", key="outputs[0].endpoint", says="neither an address nor an interface")
async def named_output(scene):
    await scene.engine()
    scene.output["endpoint"] = f"tcp://router.example:{free_port()}"


@mistake("`bind: false`, and no router listens", key="outputs[0].bind", says="no router listens at")
async def no_router(scene):
    await scene.engine()
    scene.output["bind"] = False


@mistake(
    "`bind: false`, and the peer is no router", key="outputs[0].endpoint", says="is a PUB socket; expected a subscriber"
)
async def no_subscriber(scene):
    await scene.engine()
    scene.output["bind"] = False
    scene.socket(zmq.PUB, scene.output["endpoint"])


@mistake(
    "the topic is not the one the router reads",
    key="outputs[0].topic",
    says="subscribes to 'kv@'",
    running="router_topic",
    number=33,
)
async def other_topic(scene):
    await scene.engine()
    scene.output |= {"bind": False, "topic": "events"}
    router = scene.socket(zmq.SUB, scene.output["endpoint"])
    router.subscribe("kv@")
    # libzmq sends the socket's subscriptions only when the application uses the socket.
    scene.stack.callback(asyncio.ensure_future(_send(lambda _: router.poll(0))).cancel)


@mistake("another service has kvbus's HTTP port", key="http", says="is not a kvbus")
async def http_taken(scene):
    class Silent(BaseHTTPRequestHandler):
        def log_message(self, *_args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Silent)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    scene.stack.callback(server.server_close)
    scene.stack.callback(server.shutdown)
    await scene.engine()
    scene.over["http"] = f"127.0.0.1:{server.server_port}"


@mistake("`state_dir` is not a directory", key="state_dir", says="it is not a directory")
async def state_file(scene):
    await scene.engine()
    path = scene.tmp / "state"
    path.write_text("")
    scene.over["state_dir"] = str(path)


@mistake("others may read `state_dir`", key="state_dir", says="other users may read state_dir")
async def state_open(scene):
    await scene.engine()
    path = scene.tmp / "open"
    path.mkdir()
    path.chmod(0o755)
    scene.over["state_dir"] = str(path)


@mistake("`api` is not the engine's", key="sources[0].api", says="the engine's API at")
async def api(scene):
    await scene.engine()
    scene.source["api"] = f"http://127.0.0.1:{free_port()}"


# -- only a running bus sees these


@mistake("the engine holds more blocks than `limits.max_blocks`", key="limits.max_blocks", running="index_full")
async def index_full(scene):
    scene.over["limits"] = {"max_blocks": 3}
    await scene.engine(what=lambda n: [store([n + 1])])


@mistake("the engine's replay buffer is short", key="sources[0].replay_endpoint", running="history_trimmed")
async def trimmed(scene):
    engine = await scene.engine(buffer_steps=2, silent=True)
    for n in range(9):
        engine.publish(payload(store([n + 1])))


@mistake("the file of `discover.file` has no engine", key="sources[0].discover", running="no_engine_found", number=35)
async def no_engine(scene):
    path = scene.tmp / "engines.json"
    path.write_text("[]")
    scene.over["sources"] = [{"name": "workers", "discover": {"file": {"path": str(path)}}}]
    scene.output |= {"layout": "merged"}


@mistake("the disk is full", key="state_dir", running="state_not_written", number=15)
async def full_disk(scene):
    scene.over["state_dir"] = str(scene.tmp / "state")
    scene.stack.enter_context(room_for(60_000))
    await scene.engine(what=lambda n: [store([n + 1], tokens=[n] * 4096, block_size=4096)])


async def _send(each: Callable[[int], object]) -> None:
    for n in range(10**9):
        each(n)
        await asyncio.sleep(0.02)


@asynccontextmanager
async def made(make: Callable[[Scene], Any], tmp: Path) -> AsyncIterator[Scene]:
    """Make an operator's mistake on real sockets, and undo it at the end."""
    async with AsyncExitStack() as stack:
        scene = Scene(stack, tmp)
        await make(scene)
        yield scene
