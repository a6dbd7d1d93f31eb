"""Tests that the relay accepts every kind of relay event, whatever frames the relay event contains."""

from collections.abc import Sequence
from typing import get_args

import msgspec
import pytest

from kvbus.core.events import RelayEvent
from kvbus.core.findings.engine import NO_PREFIX
from kvbus.core.findings.finding import Finding
from kvbus.core.outputs.spec import NewStream, OutputSpec
from kvbus.core.source_spec import SourceLocation, SourceSpec
from kvbus.core.types import Reason, Refused
from kvbus.core.wire.profiles import PROFILES
from tests.core.dsl import Script

HOSTILE = [[], [b""], [b"\xff" * 8] * 2, [b"id", b"", b"\x00" * 8], [b"", b"\xff" * 8, b"\x90"], [b""] * 20]


def made(kind, frames):
    """Return an event of this kind for the relay, about source or output 0, with these frames if the kind has
    frames.
    """
    values = {
        int: 0,
        int | None: 0,
        Finding: NO_PREFIX(),
        Finding | None: NO_PREFIX(),
        dict[int, SourceLocation]: {0: SourceLocation("sources[1]")},
        float: 0.0,
        bool: False,
        bytes: b"".join(frames),
        list[bytes]: frames,
        tuple[int, ...]: (1,),
        SourceSpec: SourceSpec("other", 0),
        Sequence[NewStream]: [NewStream()],
        OutputSpec: OutputSpec("other", PROFILES["vllm"], [None]),
        Refused: Refused.KEY,
        Reason: Reason.ZMTP,
    }
    return kind(**{field.name: values[field.type] for field in msgspec.structs.fields(kind)})


@pytest.mark.parametrize("kind", get_args(RelayEvent), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("frames", HOSTILE, ids=range(len(HOSTILE)))
def test_the_relay_handles_every_kind_of_event(kind, frames):
    relay = Script(replay=True).relay
    assert isinstance(relay.handle(made(kind, frames), 1.0), list)
