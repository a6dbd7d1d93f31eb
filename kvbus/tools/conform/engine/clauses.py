"""The clauses of docs/spec that bind publishers, and the ledger that collects observations about each clause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvbus.tools.conform.report import Clause, Evidence, Level, Outcome, Verdict, clause


@dataclass(frozen=True, slots=True)
class Asked:
    """A clause that the kit judges by watching a publisher.

    Attributes:
        clause: the clause.
        noun: plural noun for what the verdict counts, such as ``messages`` in "120 messages".
        unseen: the usual reason why the kit could not observe whether the publisher keeps the clause. It often names
            the option of ``kvbus conform engine`` with which the kit can observe it.
        level: the usual requirement level of the clause.
    """

    clause: Clause
    noun: str
    unseen: str
    level: Level = Level.MUST


_MUST, _SHOULD = Level.MUST, Level.SHOULD
_REPLAY: Final = "no replay endpoint was given (--replay-endpoint)"
_ANSWERED: Final = "no replay answer had a batch (--replay-endpoint)"
_API: Final = "no API was given (--api)"
_BATCH: Final = "no batch was seen"
_STORE: Final = "no store was seen"
_LATE: Final = "no second subscriber got a state while blocks were live"
_FEW: Final = "fewer than two batches were seen"
_REMOVAL: Final = "no removal was seen from the start"

_ROWS: Final = (
    ("1.1", "batches come from a PUB socket, over ZMTP 3.0 or later", "connections",
     "a recording shows no socket", _MUST),
    ("1.2", "each rank has its own publisher", "batches with a rank", "no batch had a rank", _MUST),
    ("1.3", "the engine's API names the event endpoints", "answers", _API, _SHOULD),
    ("1.4", "the publisher publishes while it answers a replay request", "batches during an answer",
     "nothing was published during an answer", _MUST),
    ("1.5", "a peer that sends no PONG is not disconnected", "PINGs", "no PING came", _MUST),
    ("2.1", "a message has three frames", "messages", _BATCH, _MUST),
    ("2.2", "the sequence number has 8 bytes and is below 2^63", "messages", _BATCH, _MUST),
    ("2.3", "all batches of an epoch have one topic", "messages", _FEW, _SHOULD),
    ("3.1", "sequence numbers have no gap and no repetition", "batches", _FEW, _MUST),
    ("3.3", "an epoch begins with 0, or continues the numbers", "restarts",
     "no restart was seen (--await-restart)", _SHOULD),
    ("3.6", "an idle publisher sends an empty batch each second", "silent seconds",
     "the publisher was never silent", _SHOULD),
    ("4.1", "a replay request without the empty frame is answered", "answers", _REPLAY, _SHOULD),
    ("4.2", "an answer and its END have the right frames", "messages of answers", _REPLAY, _MUST),
    ("4.3", "each answer ends with END and loses no batch", "answers", _REPLAY, _MUST),
    ("4.4", "an answer has no hole, and has the state if it begins late", "answers", _ANSWERED, _MUST),
    ("4.6", "an answer is not filled with empty batches", "long answers", "no answer had a thousand messages", _SHOULD),
    ("4.8", "a requester that does not read delays no other requester", "answers",
     "no answer was long enough to delay another", _MUST),
    ("5.1", "a new subscriber gets the state", "subscriptions", _LATE, _SHOULD),
    ("5.2", "other subscribers get empty batches for a state", "batches of a state", _LATE, _MUST),
    ("5.3", "a replay from inside a state has the complete state", "answers", "no state had several batches", _MUST),
    ("5.4", "a batch of a state has at most 4,096 events and 4 MiB", "batches of a state", _LATE, _SHOULD),
    ("5.5", "a snapshot has the right form", "snapshots",
     "no snapshot endpoint was given (--snapshot-endpoint)", _MUST),
    ("6.1", "a payload is [ts, events, rank]", "payloads", _BATCH, _MUST),
    ("6.2", "events are maps with a type", "events", "no event was seen", _MUST),
    ("6.3", "a key that one store has is in every store", "stores", "fewer than two stores were seen", _SHOULD),
    ("6.4", "a store has hashes, parent, tokens and block size", "stores", _STORE, _MUST),
    ("6.5", "a store has all tokens of its blocks", "stores", "no store with tokens was seen", _MUST),
    ("6.6", "hashes have 64 bits or up to 64 bytes, and one type", "hashes", "no hash was seen", _MUST),
    ("6.7", "a hash identifies a block and all blocks before it", "hashes",
     "no block came twice or after two parents", _MUST),
    ("6.8", "the engine computes the same hashes after a restart", "hashes",
     "no content was stored before and after a restart", _SHOULD),
    ("6.9", "token ids are from 0 to 2^32 - 1", "stores", "no store with tokens was seen", _MUST),
    ("6.11", "the parent of a stored block is live", "stores",
     "no store with a parent was seen from the start", _SHOULD),
    ("6.12", "children are removed before their parents", "removed blocks", _REMOVAL, _SHOULD),
    ("7.1", "a block is stored once and removed once", "blocks", _REMOVAL, _MUST),
    ("7.2", "a publisher that counts copies says so", "removals of copies", "no live block was stored again", _MUST),
    ("7.3", "a live block is stored again only for a new copy", "blocks", "no prompt was sent twice (--api)", _MUST),
    ("8.1", "groups can be distinguished", "events with a group", "no event had a group", _MUST),
    ("8.2", "all blocks of a group have one size", "stores", _STORE, _MUST),
    ("9.1", "media have known names", "events", "no event with a medium was seen", _MUST),
    ("9.2", "a removal affects only its own medium", "removed blocks", "no block on two media was removed", _MUST),
    ("10.1", "all batches of an epoch have one rank", "batches with a rank", "no batch had a rank", _MUST),
    ("11.1", "a clear affects all media", "clears", "no batch after a clear of live blocks was seen", _MUST),
    ("11.2", "a clear is sent as soon as the cache is emptied", "resets and sleeps",
     "no cache was emptied (--api)", _MUST),
    ("11.3", "each epoch or subscription begins with a clear", "epochs", "no batch 0 was seen", _SHOULD),
    ("12.1", "a batch has at most 65,536 events and 16 MiB", "batches", _BATCH, _MUST),
    ("12.3", "numbers of groups, windows and adapters are in range", "values", "no event had such a value", _MUST),
    ("14.1", "the publisher offers CURVE encryption", "connections", "only on this machine, or a recording", _SHOULD),
)  # fmt: skip

WATCHED: Final[dict[str, Asked]] = {
    number: Asked(clause(number, title), noun, unseen, level) for number, title, noun, unseen, level in _ROWS
}
"""By number: the clauses that the kit judges by watching a publisher, in the order of the specification."""


@dataclass(slots=True)
class _Entry:
    """The observations about one clause: how many show that the publisher keeps it, and how many that it breaks it.

    If the publisher breaks the clause, ``message``, ``level`` and ``evidence`` are those of the observation that the
    verdict shows. ``unseen`` is the reason why the clause could not be judged.
    """

    kept: int = 0
    broken: int = 0
    message: str = ""
    level: Level = Level.SHOULD
    evidence: tuple[Evidence, ...] = ()
    unseen: str = ""


class Ledger:
    """The collected observations of a publisher, by clause.

    The verdict on a broken clause shows the first observation in which the publisher breaks it. But if the publisher
    breaks a MUST part of the clause later, that observation replaces one that is only about a SHOULD part.
    """

    def __init__(self) -> None:
        self._entries: Final = {number: _Entry() for number in WATCHED}

    def kept(self, number: str, times: int = 1) -> None:
        """Record one or more observations in which the publisher keeps a clause."""
        self._entries[number].kept += times

    def broken(self, number: str, message: str, *evidence: Evidence, level: Level | None = None) -> None:
        """Record an observation in which the publisher breaks a clause.

        ``level`` is the requirement level of the broken part of the clause, by default the usual level of the clause.
        """
        entry, level = self._entries[number], level or WATCHED[number].level
        if not entry.broken or (level is Level.MUST and entry.level is Level.SHOULD):
            entry.message, entry.level, entry.evidence = message, level, evidence
        entry.broken += 1

    def judge(self, number: str, wrong: str, *evidence: Evidence, level: Level | None = None) -> None:
        """Record an observation about a clause.

        ``wrong`` says how the publisher breaks the clause; it is empty if the publisher keeps the clause.
        """
        if wrong:
            self.broken(number, wrong, *evidence, level=level)
        else:
            self.kept(number)

    def unseen(self, number: str, why: str) -> None:
        """Record the reason why the kit cannot judge a clause at this publisher."""
        self._entries[number].unseen = why

    def is_kept(self, number: str) -> bool:
        """Return whether the publisher has kept the clause in at least one observation, and has never broken it."""
        entry = self._entries[number]
        return entry.kept > 0 and not entry.broken

    def is_broken(self, number: str) -> bool:
        """Return whether the publisher has broken the clause in at least one observation."""
        return self._entries[number].broken > 0

    def verdicts(self) -> list[Verdict]:
        """Return a verdict on each clause of the specification that the conformance kit can judge."""
        return [self._verdict(number) for number in WATCHED]

    def _verdict(self, number: str) -> Verdict:
        entry, asked = self._entries[number], WATCHED[number]
        if entry.broken:
            more = f" ({entry.broken} times)" if entry.broken > 1 else ""
            return Verdict(asked.clause, Outcome.BROKEN, entry.message + more, entry.level, entry.evidence)
        if entry.kept and not entry.unseen:
            return Verdict(asked.clause, Outcome.KEPT, f"{entry.kept:,} {asked.noun}", asked.level)
        return Verdict(asked.clause, Outcome.NOT_SEEN, entry.unseen or asked.unseen, asked.level)
