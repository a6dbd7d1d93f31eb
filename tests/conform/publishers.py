"""Run the real publishers of vLLM and SGLang, and let them send a capture of their engine. This program needs no kvbus.

``python -m tests.conform.publishers DIRECTORY PORT REPLAY_PORT CAPTURE [TIMES]`` uses the engine in DIRECTORY, where
``.ci/engines.sh`` has put it. It publishes half of the capture, or the complete capture TIMES times. After a line on
standard input it publishes the rest. It ends at the end of standard input.
"""

from __future__ import annotations

import base64
import json
import sys

import msgspec

from tests.conform.published import load


def main() -> None:
    directory, port, replay_port, capture, *times = sys.argv[1:]
    module = load(directory)
    batch = module.KVEventBatch
    decode = msgspec.msgpack.Decoder(batch).decode
    publisher = module.ZmqEventPublisher(
        0, endpoint=f"tcp://*:{port}", replay_endpoint=f"tcp://*:{replay_port}", topic="", buffer_steps=10_000
    )
    with open(capture, encoding="utf-8") as lines:  # noqa: PTH123 - the least that runs everywhere
        payloads = [base64.b64decode(json.loads(line)["payload"]) for line in lines]
    payloads *= int(times[0]) if times else 1
    half = len(payloads) // (1 if times else 2)
    for payload in payloads[:half]:
        publisher.publish(decode(payload))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if sys.stdin.readline():
        for payload in payloads[half:]:
            publisher.publish(decode(payload))
    sys.stdin.read()
    publisher.shutdown()


if __name__ == "__main__":
    main()
