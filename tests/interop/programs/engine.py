"""Run the event publisher of a released engine: ``engine.py DIRECTORY RANK ENDPOINT REPLAY_ENDPOINT``.

``.ci/engines.sh`` makes the directory. Each line of the standard input is a batch in base64, which the program decodes
and publishes. The program ends with its standard input.
"""

from __future__ import annotations

import base64
import sys

import msgspec

from tests.conform.published import load


def main() -> None:
    directory, rank, endpoint, replay_endpoint = sys.argv[1:]
    module = load(directory)
    decode = msgspec.msgpack.Decoder(module.KVEventBatch).decode
    publisher = module.ZmqEventPublisher(int(rank), endpoint=endpoint, replay_endpoint=replay_endpoint)
    for line in sys.stdin:
        publisher.publish(decode(base64.b64decode(line)))
    publisher.shutdown()


if __name__ == "__main__":
    main()
