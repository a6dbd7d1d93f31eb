"""Test that kvbus soon notices a router that does not read.

It must not wait until the kernel has buffered megabytes for the router.
"""

from kvbus.transport.live.stream import UNSENT
from kvbus.transport.zmtp.settings import DEFAULT_SETTINGS
from tests.doubles.bus import eventually
from tests.outputs.driven import driving
from tests.transport.loops import both_loops

SIZE = 4096


@both_loops
async def test_a_stalled_router_queues_batches_before_a_megabyte_is_written(tmp_path):
    async with driving("zmq", tmp_path) as driven:
        await driven.reader(slow=True)

        def behind():
            driven.send(1, size=SIZE)
            return driven.driver.queue_max

        await eventually(behind, "the router to be behind")
        read = 256 * 1024  # bytes in libzmq's buffers and in the receiving kernel
        assert SIZE * len(driven.sent[0]) < UNSENT + DEFAULT_SETTINGS.high_water + read
