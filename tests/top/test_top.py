"""Tests for ``kvbus top`` as a user runs it: on a terminal, and with a pipe."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from fcntl import ioctl

import pytest

from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store
from tests.http.test_http import relayed, web_and_engine
from tests.ports import free_port


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvbus", "top", *args], capture_output=True, text=True, timeout=60, check=False
    )


async def test_top_writes_lines_to_a_pipe():
    async with web_and_engine() as (client, engine):
        engine.publish(batch(store([1, 2])))
        await relayed(client, 1)
        done = await asyncio.to_thread(run, "--http", client.base, "--count", "2", "--interval", "0.1")
    assert (done.returncode, done.stderr) == (0, "")
    looks = done.stdout.split("\n\n")
    assert len(looks) == 2
    assert "source engine: live" in looks[1]
    assert "2 GPU blocks" in looks[1]
    assert "\x1b" not in done.stdout


async def test_top_with_count_1_shows_rates_and_may_print_json():
    async with web_and_engine() as (client, engine):
        asked = asyncio.create_task(asyncio.to_thread(run, "--http", client.base, "--count", "1", "--json"))
        while not asked.done():
            engine.publish(batch(store([1, 2])))
            await asyncio.wait((asked,), timeout=0.05)
        done = asked.result()
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert (done.returncode, found["sources"][0]["state"]) == (0, "live")
    assert found["sources"][0]["batches_per_second"] > 0
    assert found["outputs"][0]["name"] == "routers"


def test_top_fails_at_once_if_no_bus_answers():
    done = run("--http", f"127.0.0.1:{free_port()}")
    assert (done.returncode, "connection refused" in done.stderr) == (69, True)
    assert run("--http", "tcp://127.0.0.1:5557").returncode == 2


class Screen:
    """A running ``kvbus top`` on a pseudo-terminal, whose output a test reads."""

    def __init__(self, *args: str) -> None:
        self.seen = b""
        self.fd, theirs = pty.openpty()
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
        self.before = termios.tcgetattr(theirs)
        environment = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8", "COLUMNS": "140", "LINES": "40"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvbus", "top", "--interval", "0.1", *args],
            stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
        )  # fmt: skip
        self.theirs = theirs

    async def until(self, text: str) -> None:
        """Read until the terminal has received this text since the last call."""
        end = asyncio.get_running_loop().time() + 60
        while text.encode() not in self.seen:
            if asyncio.get_running_loop().time() > end:
                self.process.kill()
                raise AssertionError(f"{text!r} does not come: {self.seen[-4000:].decode(errors='replace')}")
            self.seen += await asyncio.wait_for(asyncio.to_thread(os.read, self.fd, 65_536), 60)
        self.seen = b""

    def press(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    async def end(self) -> int:
        code = await asyncio.to_thread(self.process.wait, 60)
        assert termios.tcgetattr(self.theirs) == self.before, "the terminal is as it was"
        os.close(self.fd)
        os.close(self.theirs)
        return code


@pytest.mark.parametrize("how", ["q", "Ctrl-C"])
async def test_top_shows_a_screen_on_a_terminal_and_obeys_its_keys(how):
    async with web_and_engine() as (client, engine):
        engine.publish(batch(store([1, 2])))
        screen = Screen("--http", client.base)
        await screen.until("● live")
        screen.press("s")
        await screen.until("sort by rate")
        screen.press("/no such\n")
        await screen.until("sources 0")
        screen.press("p")
        await screen.until("paused")
        screen.press("?")
        await screen.until("scroll the tables")
        screen.press("\x1b[B")  # the arrow down; any key closes the help
        await screen.until("sources 0")
        if how == "q":
            screen.press("q")
        else:
            screen.process.send_signal(signal.SIGINT)
        assert await screen.end() == 0


async def test_top_keeps_the_last_state_and_the_reason_if_the_bus_ends():
    async with web_and_engine() as (client, _):
        screen = Screen("--http", client.base)
        await screen.until("● live")
    await screen.until("connection refused")
    screen.press("q")
    assert await screen.end() == 0
