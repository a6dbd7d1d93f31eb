"""Tests for the findings about a source after kvbus has received a stream.

The captured streams of healthy engines cause no finding.
"""

import pytest

from kvbus.core.events import (
    ReplayAsked,
    ReplayReceived,
    SourceDown,
    SourceUnreachable,
    SourceUp,
    Tick,
)
from kvbus.core.findings import bus, engine
from kvbus.core.findings.engine import NOTHING_LISTENS
from kvbus.core.findings.finding import Findings, Kind, Severity
from kvbus.core.findings.source import MIN_COPIES, MIN_LEFT_OUT, source_findings
from kvbus.core.source import RECENT_S
from kvbus.core.types import Reason
from kvbus.core.wire.frames import END_SEQ, replay_request
from tests.core.dsl import Script, live, replay_end, tick, up
from tests.doubles.payloads import payload, store

PREFIX = store([1, 2, 3])


def findings_of(source):
    """Return the texts of kvbus's findings about a source, by the ids of the findings."""
    return {each.id: each.text for each in source_findings(source)}


def fed(*batches, **rules):
    script = Script(**rules)
    script.after(*(live(seq, *events) for seq, events in enumerate(batches)))
    return script.source


def fed_again(*batches):
    script = Script()
    script.after(*(live(0, *events) for events in batches))
    return script.source


def window(block):
    return store([block], group=1, kv_cache_spec_kind="sliding_window")


def test_a_finding_reports_a_model_with_only_sliding_windows():
    source = fed(*([window(n)] for n in range(MIN_LEFT_OUT)))
    assert list(findings_of(source)) == ["no_prefix"]
    assert source_findings(source)[0].remedy.startswith("set groups: all")


@pytest.mark.parametrize("settled", [0, 8], ids=["from the start", "later"])
def test_a_finding_reports_an_engine_that_announces_hits_again(settled):
    first = [[store([100 + 2 * n, 101 + 2 * n])] for n in range(settled)]
    source = fed(*first, [PREFIX], *([PREFIX] for _ in range(MIN_COPIES)))
    assert source.stats.reannounced == MIN_COPIES
    assert list(findings_of(source)) == ["reannounced"]
    assert source_findings(source)[0].remedy.startswith("set duplicates: ignore")


def test_repeated_stores_cause_no_finding_with_duplicates_ignore():
    source = fed([PREFIX], *([PREFIX] for _ in range(2 * MIN_COPIES)), duplicates="ignore")
    assert source.stats.reannounced == 2 * MIN_COPIES
    assert findings_of(source) == {}


def test_a_finding_reports_blocks_of_another_size_than_configured():
    source = fed(*([store([2 * n + 1, 2 * n + 2], block_size=16)] for n in range(3)), block_size=24)
    assert (
        findings_of(source)["block_size"]
        == "events refused (3): block_size is 24, but the engine has blocks of 16 tokens"
    )


def test_a_finding_reports_a_block_size_above_that_of_the_engine():
    source = fed(*([store([n], block_size=16)] for n in range(1, MIN_LEFT_OUT + 1)), block_size=64)
    assert findings_of(source)["block_size_too_large"].startswith("no block is announced to routers: block_size is 64")
    assert findings_of(fed([store([1], block_size=16)], block_size=16)) == {}


def test_a_finding_lists_all_reasons_of_refused_events():
    source = fed()
    source.stats.rejected = type(source.stats.rejected)({Reason.FRAME_COUNT: 1, Reason.HASH_COLLISION: 7})
    assert findings_of(source)["not_events"].startswith(
        "events or batches refused (1): the messages have no sequence number"
    )
    source.stats.rejected.update({Reason.SEQ_RANGE: 1, Reason.NESTING: 1})
    assert findings_of(source)["not_events"].endswith(" stream; reason nesting, seq_range, see docs/PROTOCOL.md")


def test_a_note_names_the_types_of_unknown_events():
    unheard = {"type": "Unheard"}
    source = fed([store([1, 2])], [unheard, store([3], 2)], [unheard, {"type": "Other"}, {}])
    (found,) = source_findings(source)
    assert (found.id, found.severity) == ("unknown_events", Severity.NOTE)
    assert found.text.startswith("events left out (4), because this version of kvbus does not know their types: Other,")
    assert found.text.endswith("Other, Unheard, without a name")
    many = fed([{"type": f"Type{n}"} for n in range(9)])
    assert source_findings(many)[0].text.endswith("Type0, Type1, Type2 and 6 more")


def test_a_finding_does_not_change_when_reasons_swap_their_ranks():
    source, findings, changes = fed(), Findings(), []
    for tick_ in range(6):
        source.stats.rejected[(Reason.TOKEN_COUNT, Reason.DUPLICATE_HASH)[tick_ % 2]] += 1 + (tick_ > 0)
        source.look_at_counts(float(tick_))
        changes += [each.word for each in findings.update(source_findings(source), float(tick_))]
    assert changes == ["begins", "changes"], "a change is the second reason"


@pytest.mark.parametrize(
    ("refused", "id_", "rules"),
    [
        ([{"type": "Unheard"}], "unknown_events", {}),
        ([store([1, 2], block_size=16)], "block_size", {"block_size": 24}),
        ([store([1], tokens=[1])], "events_refused", {}),
    ],
)
def test_a_finding_about_refused_messages_ends_if_no_more_are_refused(refused, id_, rules):
    script = Script(**rules)
    script.after(live(0, *refused))
    script.after(tick(1))
    assert id_ in findings_of(script.source)
    script.after(tick(RECENT_S - 2))
    assert id_ in findings_of(script.source)
    script.after(live(1, *refused))
    script.after(tick(RECENT_S - 2))
    assert id_ in findings_of(script.source), "one was refused meanwhile"
    script.after(tick(RECENT_S))
    assert id_ not in findings_of(script.source)
    script.after(live(2, *refused))
    assert id_ in findings_of(script.source), "at once, not with the next tick"


def test_the_reason_of_a_failed_connection_is_a_finding_until_a_connection():
    script = Script()
    why = NOTHING_LISTENS(at="sources[0]", name="endpoint", endpoint="tcp://engine:5557", detail="")
    script.relay.handle(SourceUnreachable(0, why), 1.0)
    assert source_findings(script.source) == [why]
    script.relay.handle(SourceUp(0), 2.0)
    assert findings_of(script.source) == {}
    script.relay.handle(SourceDown(0), 3.0)
    assert findings_of(script.source) == {}


def test_a_finding_reports_several_publishers_on_one_endpoint():
    # Each batch is of another publisher, and begins a new epoch on the same connection.
    source = fed_again(*([store([n])] for n in range(1, 8)))
    assert findings_of(source)["conflict"].startswith("several publishers send on one endpoint")
    assert list(findings_of(source)) == ["conflict"]


def test_a_finding_reports_a_replay_that_does_not_answer():
    script = Script(replay=True)
    script.relay.handle(SourceUp(0), 1.0)
    for now in (100.0, 200.0, 300.0):
        script.relay.handle(Tick(now), now)
    assert list(findings_of(script.source)) == ["replay_silent"]
    assert source_findings(script.source)[0].key == "sources[].replay_endpoint"


def answered(script, **options):
    """Let a router request a replay from 0 at the first output, and return how the relay answers it."""
    (command,) = script.relay.handle(ReplayAsked(0, 0, [b"id", *replay_request(0)], **options), script.now)
    next(command.answer.messages())
    script.relay.take_commands()
    return command.answer.outcome


def test_a_finding_reports_a_replay_answer_that_llm_d_refuses(monkeypatch):
    monkeypatch.setattr("kvbus.core.answering.MAX_FILLER", 10)
    script = Script(profiles=("llm-d",), journal_batches=1)
    script.after(*(live(seq, store([seq])) for seq in range(5)))
    assert answered(script) == "compacted"
    script.after(*(live(seq, store([seq])) for seq in range(5, 20)))
    assert answered(script, rebuilds=True) == "late"
    assert findings_of(script.source) == {}, "kvbus's own readers take it"
    assert answered(script) == "late"
    assert list(findings_of(script.source)) == ["replay_too_long"]
    assert "output out-0" in findings_of(script.source)["replay_too_long"]
    assert answered(script, routers=(1,)) == "subscription"
    assert findings_of(script.source) == {}


def test_a_finding_reports_a_trimmed_history():
    script = Script(replay=True)
    script.relay.handle(SourceUp(0), 1.0)
    script.relay.handle(ReplayReceived(0, 1, [b"", b"", (5).to_bytes(8, "big"), payload(store([1]))]), 1.0)
    script.relay.handle(ReplayReceived(0, 1, [b"", b"", END_SEQ, b""]), 1.0)
    (partial,) = source_findings(script.source)
    assert partial.id == "history_trimmed"
    assert partial.text.startswith("partial: batches 0 to 4 were trimmed")
    assert partial.remedy.startswith("the finding ends when the engine restarts")


def test_the_finding_about_a_silent_replay_ends_with_an_answer():
    script = Script(replay=True)
    script.after(up(), live(7, store([1])), tick(100.0), tick(100.0))
    assert "replay_silent" in findings_of(script.source)
    script.after(tick(100.0), replay_end())
    assert "replay_silent" not in findings_of(script.source)


def test_the_ids_of_findings_match_their_names():
    rows = [(name, each) for module in (engine, bus) for name, each in vars(module).items() if isinstance(each, Kind)]
    assert [name.lower() for name, _ in rows] == [each.id for _, each in rows]
    assert len({name for name, _ in rows}) == len(rows)
