"""A SUB of libzmq that prints the messages it receives as JSON, as the test programs on other ZeroMQ libraries do."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import zmq


def say(what: str, **more: Any) -> None:
    print(json.dumps({"what": what, **more}), flush=True)  # noqa: T201 - for the process that started this one


def end_with_input() -> None:
    while sys.stdin.read(1):
        pass
    os._exit(0)


def main() -> None:
    seconds, _, how, endpoint, topic = sys.argv[1:]
    threading.Thread(target=end_with_input, daemon=True).start()
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        poller = zmq.Poller()
        poller.register(sub, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        sub.subscribe(topic)
        (sub.bind if how == "bind" else sub.connect)(endpoint)
        say("started")
        until = time.monotonic() + float(seconds)
        while time.monotonic() < until:
            ready = dict(poller.poll(1000))
            if sub in ready:
                say("message", frames=[frame.hex() for frame in sub.recv_multipart()])
            if monitor in ready:
                event = int.from_bytes(monitor.recv_multipart()[0][:2], sys.byteorder)
                say("disconnected" if event == zmq.EVENT_DISCONNECTED else "connected")
        sub.disable_monitor()


if __name__ == "__main__":
    main()
