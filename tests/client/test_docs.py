"""The example of docs/CLIENT.md runs."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from kvbus.core.codec import encode_batch
from kvbus.core.schema import BlockStored
from kvbus.transport.publisher import EnginePublisher

PAGE = Path(__file__).parent.parent.parent / "docs" / "CLIENT.md"


async def test_the_example(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    exec(compile(example, str(PAGE), "exec"), names)  # noqa: S102 - our own page
    tokens = msgspec.Raw(msgspec.msgpack.encode([1, 2]))
    async with EnginePublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", bind=True) as publisher:
        publisher.publish(encode_batch([BlockStored([41, 42], None, msgspec.Raw(b"\x94\1\2\3\4"), 2)], 1.0, 0))
        found = await names["wait_for_block"](publisher.endpoint, publisher.replay_endpoint, 42)
        assert found == [3, 4]
        publisher.publish(encode_batch([BlockStored([43], None, tokens, 2)], 1.0, 0))
        assert await names["wait_for_block"](publisher.endpoint, publisher.replay_endpoint, 43) == [1, 2]
    assert capsys.readouterr().out == "in step: 2 blocks at seq 0\nin step: 3 blocks at seq 1\n"
