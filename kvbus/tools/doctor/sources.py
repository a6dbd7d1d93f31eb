"""The findings about one source, derived from the probes of its publishers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from kvbus.config import Config, SourceConfig
from kvbus.core.findings import engine as catalogue
from kvbus.core.findings.finding import Finding
from kvbus.core.findings.source import shown, stream_findings
from kvbus.core.source import MAX_SKEW_S
from kvbus.tools.doctor.findings import Report, Seen
from kvbus.tools.doctor.probes import NEWEST, Looked
from kvbus.transport.reach import PUBLISHERS, SUBSCRIBERS, Stop

ALIKE: Final = 2
"""Number of seqs with two different payloads that proves two publishers on one endpoint.

A restart of one publisher causes only one such seq.
"""

NETWORK: Final = frozenset({Stop.NAME, Stop.REFUSED, Stop.NO_ROUTE, Stop.DROPPED, Stop.OTHER_ADDRESS})


@dataclass(frozen=True, slots=True)
class SourceJudge:
    """The judge of one source. It derives findings (problems) and observations from the probe results.

    Attributes:
        config: the configuration.
        index: the source's position in ``sources``.
        ranks: the probe results of each rank.
        beyond: the probe results of the port after the last rank's port; None if that port was not probed.
        history: whether the doctor requested the replay of each rank from seq 0.
        spoke: endpoints from which the running kvbus has received a batch; empty if no kvbus runs.
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
        """Return the findings about the source's connections, replays and streams, and an observation for each rank."""
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
        return catalogue.SWAPPED_PORTS(at=self._at, endpoint=stream.endpoint, replay=stream.replay_endpoint)

    def _connections(self) -> Iterator[Finding]:
        failed = [looked for looked in self.ranks if looked.live is not None and looked.live.stop is not Stop.OPEN]
        connected = [looked for looked in self.ranks if looked not in failed]
        if failed and connected and all(_stop(looked) is Stop.REFUSED for looked in failed) and not self._source.bind:
            yield self._missing_ranks(failed, connected)
        else:
            seen: set[Stop] = set()
            for looked in failed:
                if _stop(looked) not in seen:
                    yield self._no_connection(looked, [each for each in failed if _stop(each) is _stop(looked)])
                seen.add(_stop(looked))
        for looked in self.ranks:
            yield from self._bound(looked) if self._source.bind else self._type(looked)

    def _missing_ranks(self, failed: Sequence[Looked], connected: Sequence[Looked]) -> Finding:
        names = ", ".join(str(looked.stream.rank) for looked in failed)
        where = f"{failed[0].stream.endpoint}{' and other ports' if len(failed) > 1 else ''}"
        facts = {"ranks": names, "size": len(self.ranks), "endpoint": where, "there": len(connected)}
        return catalogue.RANKS_MISSING(at=self._at, **facts)

    def _no_connection(self, looked: Looked, alike: Sequence[Looked]) -> Finding:
        outcome = looked.live
        assert outcome is not None  # noqa: S101 - a dial that failed
        replies = looked.replay is not None and looked.replay.socket_type == "ROUTER"
        if outcome.stop is Stop.REFUSED and replies:
            port = looked.stream.endpoint.rpartition(":")[2]
            return catalogue.BOTH_DIAL(at=self._at, endpoint=looked.stream.endpoint, port=port)
        finding = outcome.finding(self._at)
        if len(alike) > 1:
            finding = structs.replace(finding, text=f"{finding.text} (the same for {len(alike)} ranks)")
        return finding

    def _type(self, looked: Looked) -> Iterator[Finding]:
        outcome = looked.live
        if outcome is not None and outcome.stop is Stop.OPEN and (finding := outcome.no_publisher(self._at)):
            yield finding

    def _bound(self, looked: Looked) -> Iterator[Finding]:
        stream, outcome = looked.stream, looked.live
        if outcome is not None and outcome.socket_type in PUBLISHERS:
            yield catalogue.BOTH_BIND(at=self._at, endpoint=stream.endpoint)
        elif outcome is not None and outcome.stop is Stop.OPEN and outcome.socket_type not in SUBSCRIBERS:
            detail = f" by a {outcome.socket_type} socket"
            yield catalogue.ENGINE_PORT_TAKEN(at=self._at, endpoint=stream.endpoint, detail=detail)
        elif looked.taken and looked.taken != "bus":
            facts = {"name": "endpoint", "endpoint": stream.endpoint, "why": looked.taken.lower()}
            yield catalogue.CANNOT_LISTEN(at=self._at, **facts)
        elif outcome is None and not looked.taken and not looked.dialled_in:
            yield catalogue.NO_ENGINE_DIALLED_IN(at=self._at, endpoint=stream.endpoint)
        publishers = [each for each in looked.dialled_in if each.socket_type in PUBLISHERS]
        if len(publishers) > 1:
            who = ", ".join(each.addresses[0] for each in publishers)
            yield catalogue.CONFLICT(at=self._at, endpoint=f"{stream.endpoint} ({who} dialled in)")
        for each in looked.dialled_in:
            if each.stop is not Stop.OPEN:
                yield each.finding(self._at)
            elif each.socket_type not in (PUBLISHERS | SUBSCRIBERS if stream.interposed else PUBLISHERS):
                facts = {"type": each.socket_type, "endpoint": stream.endpoint}
                yield catalogue.NO_PUBLISHER_DIALLED_IN(at=self._at, **facts)

    def _rank_count(self) -> Iterator[Finding]:
        size = self._source.data_parallel_size
        published = {rank for looked in self.ranks for rank in looked.heard.ranks}
        beyond = self.beyond
        if beyond is not None and beyond.live is not None and beyond.live.socket_type in PUBLISHERS:
            yield catalogue.MORE_RANKS_PERHAPS(at=self._at, endpoint=beyond.stream.endpoint, rank=size)
        if size > 1:
            for looked in self.ranks:
                ours, theirs = looked.stream.rank, looked.heard.ranks
                if theirs and ours not in theirs:
                    facts = {"theirs": min(theirs), "ours": ours, "endpoint": looked.stream.endpoint}
                    yield catalogue.RANK_SHIFTED(at=self._at, **facts)
                    return
            if published and max(published) >= size:
                yield catalogue.RANK_OUT_OF_RANGE(at=self._at, rank=max(published), size=size)

    # -- the replay --------------------------------------------------------------------------------------------------

    def _replay(self, looked: Looked) -> Iterator[Finding]:
        outcome, endpoint = looked.replay, looked.stream.replay_endpoint
        if looked.snapshot is not None and looked.snapshot.stop is not Stop.OPEN:
            finding = looked.snapshot.finding(self._at, "snapshot_endpoint")
            remedy = "correct the endpoint, or leave it out, because few engines answer snapshot requests"
            yield structs.replace(finding, remedy=remedy)
        if outcome is None:
            return
        if outcome.stop is not Stop.OPEN:
            same = looked.live is not None and looked.live.stop is outcome.stop
            if not same or outcome.stop not in NETWORK | {Stop.MECHANISM, Stop.KEYS, Stop.NO_CURVE}:
                yield outcome.finding(self._at, "replay_endpoint")
            return
        if outcome.socket_type != "ROUTER":
            what = "publishes" if outcome.socket_type in PUBLISHERS else f"is a {outcome.socket_type} socket"
            yield catalogue.REPLAY_NOT_ROUTER(at=self._at, endpoint=endpoint, what=what)
            return
        answer = looked.answer
        if answer is None or (not answer.ended and not answer.batches):
            yield catalogue.REPLAY_SILENT(at=self._at, endpoint=endpoint)
            return
        yield from self._answer(looked)

    def _answer(self, looked: Looked) -> Iterator[Finding]:
        answer, heard, stream = looked.answer, looked.heard, looked.stream
        assert answer is not None  # noqa: S101 - as asked
        facts = {"at": self._at, "endpoint": stream.endpoint, "replay": stream.replay_endpoint}
        both = answer.batches.keys() & heard.batches.keys()
        if any(answer.batches[seq] != heard.batches[seq] for seq in both):
            yield catalogue.REPLAY_OF_ANOTHER(**facts)
        elif heard.newest is not None and answer.start <= heard.newest and answer.ended and not answer.batches:
            yield catalogue.REPLAY_EMPTY(**facts)
        if self.history and answer.ended and not heard.messages:
            yield catalogue.NO_EVENTS(**facts)

    # -- the stream --------------------------------------------------------------------------------------------------

    def _stream(self, looked: Looked) -> Iterator[Finding]:
        heard, stream = looked.heard, looked.stream
        facts = {"at": self._at, "endpoint": stream.endpoint}
        if heard.topics and not heard.wanted:
            topics = " or ".join(map(shown, list(heard.topics)[:3]))
            yield catalogue.TOPIC(at=self._at, prefix=shown(self._source.topic.encode()), elsewhere=topics)
        if heard.contested >= ALIKE and not [each for each in looked.dialled_in if each.socket_type in PUBLISHERS][1:]:
            yield catalogue.CONFLICT(**facts)
        else:
            yield from stream_findings(heard.source)
        if heard.stores == 0 and heard.wanted and heard.messages > 1 and self.history:
            yield catalogue.NO_STORES(**facts)
        if heard.skew is not None and abs(heard.skew) > MAX_SKEW_S:
            which = "behind" if heard.skew > 0 else "ahead"
            yield catalogue.CLOCK_OFF(**facts, seconds=abs(heard.skew), which=which)
        addresses = looked.live.addresses if looked.live is not None and not self._source.bind else ()
        if sum("." in each for each in addresses) > 1 and not stream.endpoint.startswith("ipc://"):
            yield catalogue.SEVERAL_ADDRESSES(**facts, count=len(addresses))
        if (
            not heard.messages
            and stream.endpoint not in self.spoke
            and looked.live is not None
            and looked.live.socket_type in PUBLISHERS
            and not self.history
        ):
            yield catalogue.ENGINE_IDLE(**facts)

    # -- what was seen -----------------------------------------------------------------------------------------------

    def _seen(self, looked: Looked) -> str:
        heard, outcome = looked.heard, looked.live
        if looked.taken == "bus":
            return f"{looked.stream.endpoint}; the running bus listens here, so only its /sources shows the engine"
        parts: list[str] = [looked.stream.endpoint]
        if outcome is not None and outcome.stop is Stop.OPEN:
            major, minor = outcome.version
            parts.append(f"{outcome.socket_type}, ZMTP {major}.{minor}, {outcome.mechanism}")
        elif looked.dialled_in:
            parts.append(f"{len(looked.dialled_in)} peers dialled in")
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
            return "no replay_endpoint: lost batches cannot be recovered"
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
