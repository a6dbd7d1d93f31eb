"""Tests that a server which a test has started ends when the test's process ends.

The thread that started the server may have ended long before.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.ports import free_port

BEGINS = """
import sys, threading, time
from pathlib import Path
from tests.log.server import Server

port = int(sys.argv[2])
server = Server(Path(sys.argv[1]), port, (sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"))
thread = threading.Thread(target=server.start)
thread.start()
thread.join()
assert server.runs
print(server.pid, flush=True)
time.sleep(600)
"""


def test_a_server_ends_with_whoever_began_it_and_not_with_the_thread(tmp_path):
    begins = [sys.executable, "-c", BEGINS, str(tmp_path), str(free_port())]
    with subprocess.Popen(begins, stdout=subprocess.PIPE, text=True) as begun:
        try:
            assert begun.stdout is not None
            server = int(begun.stdout.readline())
            os.kill(server, 0)
        finally:
            begun.send_signal(signal.SIGKILL)
    until = time.monotonic() + 60
    while Path(f"/proc/{server}").exists():
        assert time.monotonic() < until, "it lives on"
        time.sleep(0.01)
