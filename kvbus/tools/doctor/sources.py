"""What is wrong with one source, judged from what its publishers have shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvbus.config import Config, SourceConfig
from kvbus.core.remarks import ABOUT, TWO_PUBLISHERS, remarks
from kvbus.tools.doctor.findings import Finding, Report, Seen, Severity
from kvbus.tools.doctor.probes import NEWEST, Looked
from kvbus.transport.reach import PUBLISHERS, SUBSCRIBERS, Outcome, Stop

MAX_SKEW_S: Final = 5.0
"""Seconds that the clocks of engine and kvbus may differ."""
ALIKE: Final = 2
"""Contested seqs that prove two publishers; a restart contests one."""

_CORRECT: Final[dict[Stop, str]] = {
    Stop.NAME: "correct the host name, or the name server",
    Stop.REFUSED: "start the engine with its KV-cache events on, or correct host and port",
    Stop.NO_ROUTE: "correct the address, or the route to it",
    Stop.DROPPED: "open the firewall or NetworkPolicy for this port, or correct the address",
    Stop.OTHER_ADDRESS: "write that address in place of the name",
    Stop.SILENT: "correct the port; if it is the engine's, find out why its process stands still",
    Stop.STRANGER: "correct the port: the engine's HTTP port is not its event port",
    Stop.VERSION: "the peer needs libzmq 3 or newer",
    Stop.MECHANISM: "set the CURVE keys on both sides or on neither",
    Stop.KEYS: "curve_server_key_file must hold the public key of the peer, and the peer's list this bus's",
    Stop.NO_CURVE: "pip install kvbus[curve] to look at it",
    Stop.CLOSED: "correct the port; if it is the engine's, its log says why",
}
_CURVE_KEYS: Final = {Stop.MECHANISM: "curve_secret_key_file", Stop.KEYS: "curve_server_key_file"}
NETWORK: Final = frozenset({Stop.NAME, Stop.REFUSED, Stop.NO_ROUTE, Stop.DROPPED, Stop.OTHER_ADDRESS})


def wrong(outcome: Outcome, section: str, name: str, do: str = "") -> Finding:
    """Return the finding about an endpoint at which no connection opened."""
    severity = Severity.NOTE if outcome.stop is Stop.NO_CURVE else Severity.PROBLEM
    key = f"{section}.{_CURVE_KEYS.get(outcome.stop, name)}"
    return Finding(outcome.sentence, key, do or _CORRECT[outcome.stop], severity)


@dataclass(frozen=True, slots=True)
class SourceJudge:
    """Say what is wrong with a source, and what was seen of it.

    Attributes:
        config: the configuration.
        index: the source's position.
        ranks: what each rank has shown.
        beyond: what is at the port after the last rank's; None if that is an endpoint of the configuration.
        history: the replay was asked from seq 0.
        spoke: endpoints from which the running bus has got something.
    """

    config: Config
    index: int
    ranks: Sequence[Looked]
    beyond: Looked | None
    history: bool
    spoke: frozenset[str]

    @property
    def _source(self) -> SourceConfig:
        return self.config.sources[self.index]

    @property
    def _at(self) -> str:
        return f"sources[{self.index}]"

    def report(self) -> Report:
        """Judge the connections, the replays and the streams."""
        report = Report()
        swapped = [looked for looked in self.ranks if _swapped(looked)]
        if swapped:
            report.add([self._swapped(swapped[0])])
        else:
            report.add(self._connections())
            report.add(self._rank_count())
        for looked in self.ranks:
            if looked not in swapped:
                report.add(self._replay(looked))
                report.add(self._stream(looked))
            report.seen.append(Seen(self._at, looked.stream.label, self._seen(looked)))
        return report

    # -- the connections ---------------------------------------------------------------------------------------------

    def _swapped(self, looked: Looked) -> Finding:
        stream = looked.stream
        return Finding(
            f"endpoint and replay_endpoint are swapped: {stream.endpoint} answers replays and "
            f"{stream.replay_endpoint} publishes",
            f"{self._at}.endpoint",
            "exchange the two ports",
        )

    def _connections(self) -> Iterator[Finding]:
        failed = [looked for looked in self.ranks if looked.live is not None and looked.live.stop is not Stop.OPEN]
        there = [looked for looked in self.ranks if looked not in failed]
        if failed and there and all(_stop(looked) is Stop.REFUSED for looked in failed) and not self._source.bind:
            yield self._missing_ranks(failed, there)
        else:
            seen: set[Stop] = set()
            for looked in failed:
                if _stop(looked) not in seen:
                    yield self._no_connection(looked, [each for each in failed if _stop(each) is _stop(looked)])
                seen.add(_stop(looked))
        for looked in self.ranks:
            yield from self._bound(looked) if self._source.bind else self._type(looked)

    def _missing_ranks(self, failed: Sequence[Looked], there: Sequence[Looked]) -> Finding:
        names = ", ".join(str(looked.stream.rank) for looked in failed)
        where = f"{failed[0].stream.endpoint}{' and other ports' if len(failed) > 1 else ''}"
        return Finding(
            f"rank {names} of {len(self.ranks)} is missing: nothing listens at {where}, while {len(there)} answer",
            f"{self._at}.data_parallel_size",
            f"set it to {len(there)} if the engine has no more ranks, or start the rest",
        )

    def _no_connection(self, looked: Looked, alike: Sequence[Looked]) -> Finding:
        outcome = looked.live
        assert outcome is not None  # noqa: S101 - a dial that failed
        replies = looked.replay is not None and looked.replay.socket_type == "ROUTER"
        if outcome.stop is Stop.REFUSED and replies:
            port = looked.stream.endpoint.rpartition(":")[2]
            return Finding(
                f"the engine is there (its replay answers) and nothing listens at {looked.stream.endpoint}: it dials, "
                "and so does kvbus, or it publishes at another port",
                f"{self._at}.bind",
                f'set bind: true, or give the engine "endpoint": "tcp://*:{port}", or correct the port',
            )
        finding = wrong(outcome, self._at, "endpoint")
        if len(alike) > 1:
            finding = Finding(f"{finding.cause}, and so for {len(alike)} ranks", finding.key, finding.do)
        return finding

    def _type(self, looked: Looked) -> Iterator[Finding]:
        outcome = looked.live
        if outcome is None or outcome.stop is not Stop.OPEN or not outcome.no_publisher:
            return
        kind = outcome.socket_type
        if kind in SUBSCRIBERS:
            do = "this is a router's or kvbus's own port; name the engine's"
        elif kind == "ROUTER":
            do = "this looks like a replay; name the engine's publisher"
        else:
            do = "this is no engine's port; name the engine's publisher"
        yield Finding(outcome.no_publisher, f"{self._at}.endpoint", do)

    def _bound(self, looked: Looked) -> Iterator[Finding]:
        stream, outcome = looked.stream, looked.live
        if outcome is not None and outcome.socket_type in PUBLISHERS:
            yield Finding(
                f"a publisher listens at {stream.endpoint} already: the engine binds, and so does kvbus",
                f"{self._at}.bind",
                "set bind: false, or give the engine a concrete host in its endpoint",
            )
        elif outcome is not None and outcome.stop is Stop.OPEN and outcome.socket_type not in SUBSCRIBERS:
            yield Finding(
                f"{stream.endpoint} is in use by a {outcome.socket_type} socket",
                f"{self._at}.endpoint",
                "choose another port",
            )
        elif looked.taken and looked.taken != "bus":
            yield Finding(
                f"kvbus cannot listen on {stream.endpoint}: {looked.taken.lower()}",
                f"{self._at}.endpoint",
                "choose a free port and an address of this machine",
            )
        elif outcome is None and not looked.taken and not looked.dialled_in:
            yield Finding(
                f"no engine has dialled in at {stream.endpoint}",
                f"{self._at}.bind",
                "give the engine this endpoint with a concrete host; if it binds (tcp://*), set bind: false",
            )
        publishers = [each for each in looked.dialled_in if each.socket_type in PUBLISHERS]
        if len(publishers) > 1:
            who = ", ".join(each.addresses[0] for each in publishers)
            yield Finding(
                f"{TWO_PUBLISHERS}: {who} dialled in at {stream.endpoint}",
                f"{self._at}.endpoint",
                "give each engine and each rank a source and a port of its own",
            )
        for each in looked.dialled_in:
            if each.stop is not Stop.OPEN:
                yield wrong(each, self._at, "endpoint")
            elif each.socket_type not in (PUBLISHERS | SUBSCRIBERS if stream.interposed else PUBLISHERS):
                cause = f"a {each.socket_type} socket has dialled in at {stream.endpoint}, no publisher"
                yield Finding(cause, f"{self._at}.endpoint", "correct the endpoint of whoever dials")

    def _rank_count(self) -> Iterator[Finding]:
        size = self._source.data_parallel_size
        said = {rank for looked in self.ranks for rank in looked.heard.ranks}
        beyond = self.beyond
        if beyond is not None and beyond.live is not None and beyond.live.socket_type in PUBLISHERS:
            cause = (
                f"a publisher that no source names answers at {beyond.stream.endpoint}, the port behind the last rank's"
            )
            sure = size in beyond.heard.ranks
            yield Finding(
                f"{cause}: it is rank {size}" if sure else cause,
                f"{self._at}.data_parallel_size",
                f"if it is this engine's, it has more than {size} rank{'s' if size > 1 else ''}",
                Severity.PROBLEM if sure else Severity.NOTE,
            )
        if size > 1:
            for looked in self.ranks:
                ours, theirs = looked.stream.rank, looked.heard.ranks
                if theirs and ours not in theirs:
                    cause = f"rank {min(theirs)} publishes at {looked.stream.endpoint}, the port of rank {ours}"
                    yield Finding(cause, f"{self._at}.endpoint", "name the port of rank 0; rank r is at port + r")
                    return
            if said and max(said) >= size:
                cause = f"a batch names rank {max(said)}, and there are {size} ranks"
                yield Finding(cause, f"{self._at}.data_parallel_size", "set the number of ranks that the engine has")

    # -- the replay --------------------------------------------------------------------------------------------------

    def _replay(self, looked: Looked) -> Iterator[Finding]:
        outcome, endpoint = looked.replay, looked.stream.replay_endpoint
        if looked.snapshot is not None and looked.snapshot.stop is not Stop.OPEN:
            yield wrong(
                looked.snapshot, self._at, "snapshot_endpoint", "correct it, or leave it out: few engines have one"
            )
        if outcome is None:
            return
        key = f"{self._at}.replay_endpoint"
        if outcome.stop is not Stop.OPEN:
            same = looked.live is not None and looked.live.stop is outcome.stop
            if not same or outcome.stop not in NETWORK | {Stop.MECHANISM, Stop.KEYS, Stop.NO_CURVE}:
                do = (
                    "give the engine a replay_endpoint, or correct host and port"
                    if outcome.stop is Stop.REFUSED
                    else ""
                )
                yield wrong(outcome, self._at, "replay_endpoint", do)
            return
        if outcome.socket_type != "ROUTER":
            what = "publishes" if outcome.socket_type in PUBLISHERS else f"is a {outcome.socket_type} socket"
            yield Finding(f"{endpoint} {what} and answers no replay", key, "name the engine's replay port")
            return
        answer = looked.answer
        if answer is None or (not answer.ended and not answer.batches):
            yield Finding(
                f"the replay at {endpoint} does not answer",
                key,
                "name the engine's replay port; if it is that, its process stands still",
            )
            return
        yield from self._answer(looked)

    def _answer(self, looked: Looked) -> Iterator[Finding]:
        answer, heard, endpoint = looked.answer, looked.heard, looked.stream.replay_endpoint
        assert answer is not None  # noqa: S101 - as asked
        key = f"{self._at}.replay_endpoint"
        both = answer.batches.keys() & heard.batches.keys()
        if any(answer.batches[seq] != heard.batches[seq] for seq in both):
            yield Finding(
                f"the replay at {endpoint} answers with other batches than {looked.stream.endpoint} publishes",
                key,
                "name the replay port of the same engine and rank",
            )
        elif heard.newest is not None and answer.start <= heard.newest and answer.ended and not answer.batches:
            yield Finding(
                f"the replay at {endpoint} has none of the batches that {looked.stream.endpoint} publishes",
                key,
                "name the replay port of the same engine and rank, and give it buffer_steps",
            )
        if self.history and answer.ended and not heard.messages:
            yield Finding(
                f"the engine at {looked.stream.endpoint} has published nothing so far: its replay is empty",
                f"{self._at}.endpoint",
                "prefix caching and KV-cache events must be on in the engine; then send it a new, long prompt",
            )

    # -- the stream --------------------------------------------------------------------------------------------------

    def _stream(self, looked: Looked) -> Iterator[Finding]:
        heard, stream = looked.heard, looked.stream
        if heard.oversize:
            cause = f"a frame of {stream.endpoint} is larger than limits.max_frame_bytes"
            yield Finding(cause, "limits.max_frame_bytes", "raise it, if the engine is right")
        if heard.topics and not heard.wanted:
            topics = ", ".join(repr(topic.decode("utf-8", "replace")) for topic in list(heard.topics)[:3])
            yield Finding(
                f"topic {self._source.topic!r} keeps everything away: {stream.endpoint} publishes under {topics}",
                f"{self._at}.topic",
                'set topic: "" or a prefix of those',
            )
        if heard.contested >= ALIKE and not [each for each in looked.dialled_in if each.socket_type in PUBLISHERS][1:]:
            yield Finding(
                f"{TWO_PUBLISHERS}: {stream.endpoint} sends different batches under the same numbers",
                f"{self._at}.endpoint",
                "name each engine and rank itself, and no Service or proxy in front of several",
            )
        else:
            for remark, text in remarks(heard.source).items():
                about = ABOUT[remark]
                key = about.key.replace("sources[]", self._at)
                yield Finding(f"{text} ({stream.endpoint})", key, about.do)
        if heard.stores == 0 and heard.wanted and heard.messages > 1 and self.history:
            yield Finding(
                f"batches of {stream.endpoint} hold no stores, its history included",
                f"{self._at}.endpoint",
                "prefix caching must be on in the engine",
            )
        if heard.skew is not None and abs(heard.skew) > MAX_SKEW_S:
            which = "behind" if heard.skew > 0 else "ahead"
            cause = f"the clock of the engine at {stream.endpoint} is {abs(heard.skew):,.0f} s {which}"
            yield Finding(cause, f"{self._at}.endpoint", "set the clocks of both machines (NTP)", Severity.NOTE)
        addresses = looked.live.addresses if looked.live is not None and not self._source.bind else ()
        if sum("." in each for each in addresses) > 1 and not stream.endpoint.startswith("ipc://"):
            cause = f"the name in {stream.endpoint} means {len(addresses)} addresses, and kvbus follows one of them"
            yield Finding(cause, f"{self._at}.endpoint", "name each engine by an address of its own", Severity.NOTE)
        if (
            not heard.messages
            and stream.endpoint not in self.spoke
            and looked.live is not None
            and looked.live.socket_type in PUBLISHERS
            and not self.history
        ):
            yield Finding(
                f"nothing has come from {stream.endpoint} so far: the engine is idle, or publishes no events",
                f"{self._at}.endpoint",
                "send it a new, long prompt; --history looks at what it has sent before",
                Severity.NOTE,
            )

    # -- what was seen -----------------------------------------------------------------------------------------------

    def _seen(self, looked: Looked) -> str:
        heard, outcome = looked.heard, looked.live
        parts: list[str] = [looked.stream.endpoint]
        if outcome is not None and outcome.stop is Stop.OPEN:
            major, minor = outcome.version
            parts.append(f"{outcome.socket_type}, ZMTP {major}.{minor}, {outcome.mechanism}")
        elif looked.dialled_in:
            parts.append(f"{len(looked.dialled_in)} dialled in")
        else:
            parts.append("no connection" if outcome is None else f"no connection ({outcome.stop})")
        if heard.messages:
            newest = "" if heard.newest is None else f" up to seq {heard.newest:,}"
            parts.append(f"{heard.messages:,} batches{newest}, {heard.stores:,} stores")
        source = heard.source
        if source.dialect.name:
            parts.append(source.dialect.name)
        if heard.kinds:
            parts.append(f"{' and '.join(sorted(heard.kinds))} hashes")
        if size := source.normalizer.engine_block_size or source.normalizer.block_size:
            parts.append(f"block size {size}")
        parts.append(self._seen_replay(looked))
        return "; ".join(parts)

    def _seen_replay(self, looked: Looked) -> str:
        answer = looked.answer
        if looked.stream.replay_endpoint is None:
            return "no replay_endpoint: a lost batch is lost"
        if answer is None or not (answer.ended or answer.batches):
            return "no replay"
        if answer.first is None:
            return "its replay answers" if answer.start == NEWEST else "its replay is empty"
        if not self.history:
            return f"its replay answers from seq {answer.first:,}"
        back = "to its start" if answer.first == 0 else f"to seq {answer.first:,}: older batches are trimmed"
        return f"its replay reaches back {back} ({len(answer.batches):,} batches)"


def _swapped(looked: Looked) -> bool:
    live, replay = looked.live, looked.replay
    return bool(live and replay and live.socket_type == "ROUTER" and replay.socket_type in PUBLISHERS)


def _stop(looked: Looked) -> Stop:
    return Stop.OPEN if looked.live is None else looked.live.stop
