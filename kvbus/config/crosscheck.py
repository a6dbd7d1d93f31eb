"""Contradictions between keys that are each valid on their own: names, ports, topics, slots and CURVE keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvbus.config import dynamo, parts, topics
from kvbus.config.endpoints import MAX_PORT, Address, parse_endpoint
from kvbus.config.models import render_topic
from kvbus.config.paths import Path, show
from kvbus.config.problems import shown
from kvbus.core.wire.profiles import PROFILES
from kvbus.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvbus.config.models import Config
    from kvbus.config.outputs import OutputConfig
    from kvbus.config.sources import SourceConfig

_ONE_OF_EACH: Final = {
    "sources": "sources: [{endpoint: tcp://127.0.0.1:5557, replay_endpoint: tcp://127.0.0.1:5558}]",
    "outputs": "outputs: [{endpoint: 'tcp://*:5657', replay_endpoint: 'tcp://*:5658'}]",
}
_LLM_D_PARTS: Final = 3
_OF_ONE_ENGINE: Final = ("endpoint", "replay_endpoint", "snapshot_endpoint", "bind", "api", "slot")
_NOT_BY_TOPIC: Final = {
    "aibrix": "know a worker by its connection, and need one for each",
    "vllm-router": "take batches without a topic alone",
    "smg": "keep one seq for each connection",
}
"""Profiles whose routers cannot read several streams on one connection, and why."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """An address with a listener: kvbus itself, or the peer that kvbus connects to."""

    key: Path
    who: str
    address: Address
    ours: bool

    def collides(self, other: _Claim) -> bool:
        mine, theirs = self.address, other.address
        if mine.port != theirs.port:
            return False
        if mine.host == theirs.host:
            return True
        # A wildcard takes the port on every interface. It collides with a peer only if the peer is on this machine.
        return (mine.is_wildcard and (other.ours or theirs.is_loopback)) or (
            theirs.is_wildcard and (self.ours or mine.is_loopback)
        )


def check(config: Config, origins: Mapping[Path, str], bad: frozenset[Path] = frozenset()) -> list[Problem]:
    """Return every contradiction in a configuration.

    Args:
        config: the configuration.
        origins: where the value of each key path came from.
        bad: keys that are reported already, for which ``config`` holds defaults; this function leaves them out.
    """
    checks = _Checks(config, origins, bad)
    checks.at_least_one()
    checks.names()
    checks.wildcards()
    checks.ports()
    checks.topics()
    checks.tokens()
    checks.one_topic_each()
    checks.sources()
    checks.snapshots()
    checks.apis()
    checks.slots()
    checks.discovery()
    checks.curve()
    checks.libsodium()
    checks.state()
    checks.tls()
    checks.dynamo()
    checks.reviews()
    return checks.problems


class _Checks:
    def __init__(self, config: Config, origins: Mapping[Path, str], bad: frozenset[Path]) -> None:
        self.config = config
        self.origins = origins
        self.bad = bad
        self.problems: list[Problem] = []

    def sound(self, *keys: Path) -> bool:
        """Return whether none of these keys, nor a section they are in, is reported already."""
        return not any(key[:length] in self.bad for key in keys for length in range(1, len(key) + 1))

    def report(self, key: Path, wrong: str, *, value: object = None, example: str | None = None) -> None:
        text = None if value is None else shown(value)
        self.problems.append(Problem(show(key), wrong, text, example, self.origins.get(key)))

    def at_least_one(self) -> None:
        for name, example in _ONE_OF_EACH.items():
            if not getattr(self.config, name) and self.sound((name,)):
                self.report((name,), "at least one is needed", example=example)

    def names(self) -> None:
        for section in ("sources", "outputs"):
            first: dict[str, Path] = {}
            for i, item in enumerate(getattr(self.config, section)):
                key: Path = (section, i, "name")
                if not self.sound(key):
                    continue
                if item.name in first:
                    example = f"name: {item.name}-{i}"
                    self.report(key, f"the same name as {show(first[item.name])}", value=item.name, example=example)
                first.setdefault(item.name, key)

    def tokens(self) -> None:
        """Refuse an output without tokens for routers that hash them: their index would be wrong in silence."""
        for i, output in enumerate(self.config.outputs):
            key: Path = ("outputs", i, "token_ids")
            profile = PROFILES[output.profile]
            if output.token_ids == "drop" and profile.hashes_tokens and self.sound(key, (*key[:-1], "profile")):
                wrong = (
                    f"routers of profile {output.profile} hash the tokens themselves: without them they would find no "
                    "prompt, and report nothing"
                )
                self.report(key, wrong, value="drop", example="token_ids: keep")

    def snapshots(self) -> None:
        """Refuse a snapshot endpoint without a replay endpoint: a gap of one batch must not cost a whole snapshot."""
        for i, source in enumerate(self.config.sources):
            keys: tuple[Path, Path] = (("sources", i, "snapshot_endpoint"), ("sources", i, "replay_endpoint"))
            if self.sound(*keys) and source.snapshot_endpoint is not None and source.replay_endpoint is None:
                example = "replay_endpoint: tcp://127.0.0.1:5558"
                self.report(keys[0], "needs replay_endpoint too", value=source.snapshot_endpoint, example=example)

    def apis(self) -> None:
        """Refuse ``on_partial: reset`` for a source without an API."""
        if self.config.on_partial != "reset" or not self.sound(("on_partial",)):
            return
        for i, source in enumerate(self.config.sources):
            key: Path = ("sources", i, "api")
            if source.api is None and source.discover is None and self.sound(key):
                wrong = "null, and on_partial: reset needs the engine's HTTP API"
                self.report(key, wrong, example="api: http://127.0.0.1:8000")

    def discovery(self) -> None:
        """Refuse what cannot be where engines are found: keys that only one engine can have, and ports of their own."""
        sources = self.config.sources
        finding = [i for i, source in enumerate(sources) if source.discover is not None]
        if not finding:
            return
        for i in finding:
            for name in _OF_ONE_ENGINE:
                value = getattr(sources[i], name)
                if value != type(sources[i]).model_fields[name].default and self.sound(("sources", i, name)):
                    self.report(("sources", i, name), "discover finds it out for each engine", value=value)
        for i, source in enumerate(sources):
            if source.slot is not None and i not in finding:
                wrong = f"{show(('sources', finding[0], 'discover'))} gives out slots as engines come"
                self.report(("sources", i, "slot"), wrong, value=source.slot)
        for i, output in enumerate(self.config.outputs):
            if output.layout == "per_source" and self.sound(("outputs", i, "layout")):
                wrong = "the ports of engines that are found would move as they come and go"
                self.report(("outputs", i, "layout"), wrong, value=output.layout, example="layout: merged")
            template: Path = ("outputs", i, "topic")
            named = {"source", "rank"} & topics.fields(output.topic or "") if self.sound(template) else set()
            if output.layout == "merged" and named:
                wrong = f"one topic for all engines that are found cannot have {{{min(named)}}}"
                self.report(template, wrong, value=output.topic, example="topic: kv@{worker}@{model}")

    def streams_sound(self) -> bool:
        """Return whether the slots of all sources are known."""
        several = range(len(self.config.sources))
        return self.sound(
            ("sources",), *(("sources", i, key) for i in several for key in ("data_parallel_size", "slot"))
        )

    def slots(self) -> None:
        """Refuse two sources in one slot. Where none has a port by its slot, only those that name one have it."""
        if not self.streams_sound():
            return
        taken: dict[int, str] = {}
        by_list = any(output.layout == "per_source" for output in self.config.outputs)
        slots = [each for each in self.config.slots() if by_list or self.config.sources[each[0]].slot is not None]
        for i, _, slot in slots:
            source = self.config.sources[i]
            if slot in taken:
                example = f"slot: {max(last for _, _, last in slots) + 1}"
                wrong = f"slot {slot} is taken by {taken[slot]}"
                self.report(("sources", i, "slot"), wrong, value=source.slot, example=example)
                return
            taken[slot] = source.name

    def curve(self) -> None:
        """Refuse an incomplete CURVE configuration: it would be open to everybody, or reach nobody."""
        for i, source in enumerate(self.config.sources):
            dials = not source.bind or source.replay_endpoint is not None or source.snapshot_endpoint is not None
            self.curve_keys(("sources", i), source, dials=dials, binds=source.bind)
        for i, output in enumerate(self.config.outputs):
            binds = output.bind or output.replay_endpoint is not None or output.snapshot_endpoint is not None
            self.curve_keys(("outputs", i), output, dials=not output.bind, binds=binds)

    def libsodium(self) -> None:
        """Refuse keys where nothing can use them: CURVE keys of an output, and those of the state."""
        if parts.has_libsodium():
            return
        if self.config.state_key_file is not None and self.sound(("state_key_file",)):
            wrong = "sealing needs libsodium, which is not installed"
            value = str(self.config.state_key_file)
            self.report(("state_key_file",), wrong, value=value, example="pip install kvbus[curve]")
        for i, output in enumerate(self.config.outputs):
            key: Path = ("outputs", i, "curve_secret_key_file")
            if output.type == "zmq" and output.curve_secret_key_file is not None and self.sound(key):
                wrong = "CURVE keys of an output need libsodium, which is not installed"
                self.report(key, wrong, value=str(output.curve_secret_key_file), example="pip install kvbus[curve]")

    def state(self) -> None:
        """Refuse a key where no state is kept."""
        config, key = self.config, ("state_key_file",)
        if config.state_key_file is not None and config.state_dir is None and self.sound(key, ("state_dir",)):
            self.report(key, "there is no state to seal with state_dir: null", value=str(config.state_key_file))

    def tls(self) -> None:
        """Refuse half of a TLS configuration: client certificates need it whole."""
        needed = {
            "http_tls_certificate_file": ("http_tls_key_file", "http_client_ca_file"),
            "http_tls_key_file": ("http_tls_certificate_file",),
        }
        for name, others in needed.items():
            given = [other for other in others if getattr(self.config, other) is not None]
            if given and getattr(self.config, name) is None and self.sound((name,), *((each,) for each in given)):
                example = f"{name}: /etc/kvbus/tls/{'tls.crt' if 'certificate' in name else 'tls.key'}"
                self.report((name,), f"needed with {given[0]}", example=example)

    def dynamo(self) -> None:
        """Refuse what Dynamo's event plane does not have, or cannot carry."""
        for i in range(len(self.config.outputs)):
            for name, wrong, value, example in dynamo.wrongs(self.config, i):
                if self.sound(("outputs", i, "type"), ("outputs", i, name)):
                    self.report(("outputs", i, name), wrong, value=value, example=example)

    def reviews(self) -> None:
        """Refuse tokens of service accounts where nothing can have them reviewed."""
        key: Path = ("http_token_review",)
        if self.config.http_token_review is not None and self.sound(key):
            if not self.config.http_token_review:
                self.report(key, "must name an audience, or be null", value="", example="http_token_review: kvbus")
            elif "kubernetes" not in parts.installed(parts.REVIEWS):
                self.report(key, "needs the part kvbus.reviews.kubernetes, which is not installed")

    def curve_keys(self, section: Path, at: SourceConfig | OutputConfig, *, dials: bool, binds: bool) -> None:
        """Check the three keys of one source or output; ``dials`` and ``binds`` say which of them it needs."""
        own = (*section, "curve_secret_key_file")
        if not self.sound(own, (*section, "curve_server_key_file"), (*section, "curve_client_keys")):
            return
        given = at.curve_secret_key_file is not None
        for name, needed, why in (
            ("curve_server_key_file", dials, "kvbus connects to"),
            ("curve_client_keys", binds, "kvbus binds"),
        ):
            key = (*section, name)
            value = getattr(at, name)
            if value is not None and not given:
                self.report(own, f"needed too, with {name}", example=f"{own[-1]}: /etc/kvbus/keys/kvbus.key_secret")
                return
            if value is not None and not needed:
                self.report(key, f"there is nothing here that {why}", value=str(value))
            if value is None and needed and given:
                example = f"{name}: /etc/kvbus/keys/{'peer.key' if name.endswith('file') else 'clients'}"
                self.report(key, f"needed with curve_secret_key_file, for what {why}", example=example)

    def wildcards(self) -> None:
        """Refuse ``*`` where kvbus connects, because it names no peer."""
        connected: list[tuple[Path, str | None]] = []
        for i, source in enumerate(self.config.sources):
            if source.discover is not None:
                continue
            if not source.bind and self.sound(("sources", i, "bind")):
                connected.append((("sources", i, "endpoint"), source.endpoint))
            connected.append((("sources", i, "replay_endpoint"), source.replay_endpoint))
            connected.append((("sources", i, "snapshot_endpoint"), source.snapshot_endpoint))
        for i, output in enumerate(self.config.outputs):
            if not output.bind and self.sound(("outputs", i, "bind")):
                connected.append((("outputs", i, "endpoint"), output.endpoint))
        for key, endpoint in connected:
            if endpoint is not None and self.sound(key) and parse_endpoint(endpoint).is_wildcard:
                name = key[-1]
                only = ", or set bind: true" if name == "endpoint" else ""
                example = f"{name}: tcp://127.0.0.1:{parse_endpoint(endpoint).port}"
                self.report(
                    key,
                    f"kvbus connects to it, so it must name a host{only}",
                    value=endpoint,
                    example=example,
                )

    def ports(self) -> None:
        """Refuse two listeners at one address, ranks and streams counted."""
        by_port: dict[tuple[int, str], list[_Claim]] = {}
        reported: set[tuple[Path, Path]] = set()
        for claim in self.claims():
            address = claim.address
            same = by_port.setdefault((address.port, address.host if address.is_ipc else ""), [])
            for other in same:
                pair = (other.key, claim.key)
                if pair in reported or not claim.collides(other):
                    continue
                reported.add(pair)
                where = f"ipc://{address.host}" if address.is_ipc else f"port {address.port}"
                wrong = f"{where} ({claim.who}) is taken by {show(other.key)} ({other.who})"
                self.report(claim.key, wrong, value=self.value(claim.key), example=self.free(claim.key))
            same.append(claim)

    def claims(self) -> Iterable[_Claim]:
        config = self.config
        for i, source in enumerate(config.sources):
            ranks = source.data_parallel_size
            if source.discover is None and self.sound(("sources", i, "data_parallel_size"), ("sources", i, "bind")):
                for name, ours in (("endpoint", source.bind), ("replay_endpoint", False), ("snapshot_endpoint", False)):
                    yield from self.run(("sources", i, name), range(ranks), "rank", ours=ours)
        slots = [slot for _, _, slot in config.slots()] if self.streams_sound() else [0]
        for i, output in enumerate(config.outputs):
            if not self.sound(("outputs", i, "layout"), ("outputs", i, "bind")):
                continue
            several = output.layout == "per_source"
            for name in ("endpoint", "replay_endpoint", "snapshot_endpoint"):
                if name != "endpoint" or output.bind:
                    yield from self.run(("outputs", i, name), slots if several else [0], "stream", ours=True)
        address = config.http_address
        if address is not None and address[1] != 0 and self.sound(("http",)):
            host = "127.0.0.1" if address[0] == "localhost" else address[0]
            yield _Claim(("http",), "HTTP", Address(host, address[1]), ours=True)

    def run(self, key: Path, numbers: Sequence[int], unit: str, *, ours: bool) -> Iterable[_Claim]:
        """Yield the claims of one endpoint key: one for each rank or stream."""
        endpoint = self.value(key)
        if endpoint is None or not self.sound(key):
            return
        base = parse_endpoint(endpoint)
        last = max(numbers, default=0)
        if not base.is_ipc and base.port + last > MAX_PORT:
            wrong = f"{unit} {last} would be at port {base.port + last}, the last one is {MAX_PORT}"
            self.report(key, wrong, value=endpoint, example=f"{key[-1]}: {endpoint.rpartition(':')[0]}:5557")
            return
        for n in numbers:
            who = f"{unit} {n}" if len(numbers) > 1 else str(key[0])[:-1]
            if base.is_ipc:
                path = base.host.replace("{rank}", str(n)) if "{rank}" in base.host or n == 0 else f"{base.host}-{n}"
                yield _Claim(key, who, Address(path, 0), ours)
            else:
                yield _Claim(key, who, Address(base.host, base.port + n), ours)

    def value(self, key: Path) -> str | None:
        node: object = self.config
        for piece in key:
            node = node[piece] if isinstance(node, tuple) and isinstance(piece, int) else getattr(node, str(piece))
        return None if node is None else str(node)

    def free(self, key: Path) -> str | None:
        """Return an example of the same key with another port."""
        value = self.value(key) or ""
        head, _, tail = value.rpartition(":")
        if value.startswith("ipc://") or not tail.isdigit():
            return f"{key[-1]}: {value}-other"
        port = int(tail)
        return f"{key[-1]}: {head}:{port + 100 if port + 200 < MAX_PORT else port - 200}"

    def topics(self) -> None:
        for i, output in enumerate(self.config.outputs):
            key: Path = ("outputs", i, "topic")
            if not self.sound(key):
                continue
            takes = PROFILES[output.profile].topics if self.sound((*key[:-1], "profile")) else "any"
            llm_d = takes == "pod and model"
            if takes == "empty" and output.topic:
                wrong = f"profile {output.profile} takes batches without a topic alone"
                self.report(key, wrong, value=output.topic, example="topic: null")
            elif output.topic is None:
                if llm_d:
                    self.llm_d_own(key)
            elif "model" in topics.fields(output.topic) and not self.config.model:
                if self.sound(("model",)):
                    example = "model: Qwen/Qwen3-32B"
                    self.report(("model",), f"{show(key)} uses {{model}}", value=self.config.model, example=example)
            elif llm_d and self.sound(("worker",), ("model",)):
                # one rendering stands for all: neither a source's name nor a rank can have an @
                model, worker = self.config.model or "", self.config.worker
                text = topics.render(output.topic, model=model, worker=worker, source="engine", rank=0).decode()
                if not _names_pod_and_model(text):
                    self.llm_d(key, f"this renders to {text!r}")

    def one_topic_each(self) -> None:
        """Refuse ``layout: per_topic`` where streams cannot be told from each other, or a late router is lost."""
        for i, output in enumerate(self.config.outputs):
            at: Path = ("outputs", i)
            if output.layout != "per_topic" or not self.sound((*at, "layout")):
                continue
            for name in ("replay_endpoint", "snapshot_endpoint"):
                if getattr(output, name) is not None and self.sound((*at, name)):
                    wrong = "a request names no topic, so with layout: per_topic nobody knows which stream is asked for"
                    self.report((*at, name), wrong, value=getattr(output, name), example=f"{name}: null")
            if output.on_subscribe != "state" and self.sound((*at, "on_subscribe")):
                wrong = "with layout: per_topic there is no replay, so a router needs the state"
                self.report((*at, "on_subscribe"), wrong, value=output.on_subscribe, example="on_subscribe: state")
            reads = _NOT_BY_TOPIC.get(output.profile)
            if reads is not None and self.sound((*at, "profile")):
                wrong = f"routers of profile {output.profile} {reads}"
                self.report((*at, "layout"), wrong, value=output.layout, example="layout: merged")
            elif self.sound((*at, "topic")):
                self.topic_of_each((*at, "topic"), output.topic)

    def topic_of_each(self, key: Path, template: str | None) -> None:
        """Refuse a template that is the same for two streams."""
        if not self.streams_sound() or not self.sound(("worker",), ("model",)):
            return
        several_ranks = any(source.data_parallel_size > 1 for source in self.config.sources)
        example = 'topic: "kv@{source}' + (".{rank}" if several_ranks else "") + '@{model}"'
        used = set() if template is None else topics.fields(template)
        for needed in ("source", "rank") if several_ranks else ("source",):
            if template is None or needed not in used:
                wrong = f"with layout: per_topic each stream needs a topic of its own, by {{{needed}}} in it"
                self.report(key, wrong, value=template, example=example)
                return
        first: dict[bytes, str] = {}
        for stream in self.config.streams():
            topic = render_topic(template or "", stream, self.config)
            other = first.setdefault(topic, stream.label)
            if other != stream.label:
                wrong = f"{other} and {stream.label} would both have the topic {topic.decode()!r}"
                self.report(key, wrong, value=template, example=example)
                return

    def sources(self) -> None:
        """Refuse more sources than there may be."""
        most, key = self.config.limits.max_sources, ("limits", "max_sources")
        if self.streams_sound() and self.sound(("limits",), key):
            count = len(self.config.slots())
            if count > most:
                wrong = f"there are {count} sources, all ranks counted"
                self.report(key, wrong, value=most, example=f"max_sources: {count}")

    def llm_d_own(self, key: Path) -> None:
        """Refuse the sources' own topics where they are known only once the engine publishes."""
        for i, source in enumerate(self.config.sources):
            prefix: Path = ("sources", i, "topic")
            if self.sound(prefix) and not _names_pod_and_model(source.topic):
                self.llm_d(key, f"null is the source's own, and {show(prefix)} is {source.topic!r}")
                return

    def llm_d(self, key: Path, found: str) -> None:
        profile = self.value((*key[:-1], "profile"))
        wrong = f"profile {profile} needs exactly three parts, kv@POD@MODEL; {found}"
        value = shown(self.value(key))
        self.problems.append(Problem(show(key), wrong, value, 'topic: "kv@{worker}@{model}"', self.origins.get(key)))


def _names_pod_and_model(topic: str) -> bool:
    """Whether llm-d's router, which listens to ``kv@``, finds a pod and a model in a topic."""
    parts = topic.split("@")
    return len(parts) == _LLM_D_PARTS and parts[0] == "kv" and all(parts)
