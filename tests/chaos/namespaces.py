"""Linux namespaces for the processes of a fault campaign.

There is a mount namespace with a small disk, and a network namespace with a veth pair. Both need root. A namespace
exists until its holder process ends, which is at the latest the end of the campaign.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import os
import shutil
import sys
from pathlib import Path
from typing import Final

from tests.doubles.child import Child

_NUMBERS: Final = itertools.count()
_ESTABLISHED: Final = "01"


async def _run(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    if process.returncode:
        raise OSError(f"{' '.join(command)}: {errors.decode().strip()}")


async def why_not(*, network: bool) -> str | None:
    """Return the reason why this machine cannot make a mount namespace with a small disk, or with ``network`` a network
    namespace. Return None if it can.
    """
    tools = ["unshare", "nsenter", "mount"] + (["ip", "iptables"] if network else [])
    lacking = [tool for tool in tools if shutil.which(tool) is None]
    if lacking:
        return f"no {', '.join(lacking)} on this machine"
    if os.geteuid():
        return "needs root"
    try:
        await _run("unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "none", "/mnt")
        if network:
            rule = (
                "iptables",
                "-A",
                "INPUT",
                "-m",
                "statistic",
                "--mode",
                "random",
                "--probability",
                "0.1",
                "-j",
                "DROP",
            )
            await _run("unshare", "--net", *rule)
            await _run("unshare", "--net", "ip", "link", "add", "kva", "type", "veth", "peer", "name", "kvb")
    except OSError as error:
        return str(error)
    return None


def connected_to(address: str, port: int) -> set[int]:
    """Return the local ports of this network namespace's connections to an IPv4 address and port."""
    wanted = f"{int.from_bytes(ipaddress.IPv4Address(address).packed, sys.byteorder):08X}:{port:04X}"
    found = set()
    for table in ("tcp", "tcp6"):  # the tcp6 table has IPv4 addresses mapped to IPv6
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, remote, state, *_ = line.split()
            if state == _ESTABLISHED and remote.endswith(wanted):
                found.add(int(local.rpartition(":")[2], 16))
    return found


class Namespaces:
    """A process that keeps Linux namespaces (mount or network) open, so that other processes can run in them."""

    def __init__(self, directory: Path, name: str) -> None:
        self._holder = Child(f"place-{name}", [], directory, piped=True)
        self._enter: list[str] = []

    async def _hold(self, kinds: list[str], prepare: str) -> None:
        script = f"{prepare} && echo ready && exec cat"
        flags = [f"--{kind}" for kind in kinds] + (["--propagation", "private"] if "mount" in kinds else [])
        self._holder.command = ["unshare", *flags, "sh", "-ec", script]
        await self._holder.start()
        process = self._holder.process
        assert process is not None
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = await process.stdout.readline()
        if line != b"ready\n":
            raise OSError(f"{prepare}: {self._holder.log.read_text().strip()}")
        names = {"mount": "mnt", "net": "net"}
        self._enter = ["nsenter"] + [f"--{kind}=/proc/{process.pid}/ns/{names[kind]}" for kind in kinds]

    @property
    def holder(self) -> int:
        return self._holder.pid

    def inside(self, command: list[str]) -> list[str]:
        """Return the command that runs a command in these namespaces."""
        return [*self._enter, "--", *command]

    async def run(self, *command: str) -> None:
        await _run(*self.inside(list(command)))

    async def close(self) -> None:
        await self._holder.close()


class SmallDisk(Namespaces):
    """A mount namespace with a tmpfs of ``size`` bytes at ``path``."""

    def __init__(self, directory: Path, path: Path, size: int) -> None:
        super().__init__(directory, "disk")
        self._path = path
        self._size = size

    async def open(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        await self._hold(["mount"], f"mount -t tmpfs -o size={self._size},mode=700 kvbus-chaos {self._path}")

    @property
    def _filler(self) -> Path:
        return Path(f"/proc/{self.holder}/root{self._path}/filler")

    def fill(self) -> int:
        """Write a file until the disk is full, and return the number of bytes written."""
        taken = 0
        with self._filler.open("ab", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                try:
                    while True:
                        taken += file.write(b"\0" * size)
                except OSError:
                    continue
        return taken

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)


class Network(Namespaces):
    """A network namespace with a veth pair to this process's namespace.

    ``outside`` is the address of the pair's end in this process's namespace, and ``address`` that of the other end.
    """

    def __init__(self, directory: Path, name: str) -> None:
        super().__init__(directory, f"net-{name}")
        number = next(_NUMBERS)
        own = (os.getpid() * 16 + number) % 16_000
        # Addresses in 198.18.0.0/15 are reserved for benchmarks and not routed, so no other network has them.
        self.outside = f"198.18.{own // 64}.{own % 64 * 4 + 1}"
        self.address = f"198.18.{own // 64}.{own % 64 * 4 + 2}"
        self.device = f"kvc{own:x}"
        self._rules: list[tuple[str, ...]] = []
        self.busy = asyncio.Lock()
        """A lock for the fault that has rules in the namespace, so that there is only one such fault at a time."""

    async def open(self) -> None:
        await self._hold(["net"], "ip link set lo up")
        inner = f"{self.device}i"
        await _run("ip", "link", "add", self.device, "type", "veth", "peer", "name", inner, "netns", str(self.holder))
        await _run("ip", "addr", "add", f"{self.outside}/30", "dev", self.device)
        await _run("ip", "link", "set", self.device, "up")
        await self.run("ip", "addr", "add", f"{self.address}/30", "dev", inner)
        await self.run("ip", "link", "set", inner, "up")

    async def rule(self, *rule: str) -> None:
        """Add an iptables rule inside the namespace, in addition to the existing rules."""
        await self.run("iptables", "-w", "-A", *rule)
        self._rules.append(rule)

    async def unrule(self, *rule: str) -> None:
        if rule in self._rules:
            self._rules.remove(rule)
            await self.run("iptables", "-w", "-D", *rule)

    async def hits(self) -> int:
        """Return the number of packets that the iptables rules inside the namespace have dropped or rejected."""
        process = await asyncio.create_subprocess_exec(
            *self.inside(["iptables", "-w", "-vxnL"]), stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        counts = [line.split()[0] for line in output.decode().splitlines() if "DROP" in line or "REJECT" in line]
        return sum(int(count) for count in counts if count.isdigit())

    async def link(self, *, up: bool) -> None:
        """Set the namespace's end of the veth pair up or down. The address of the other end stays."""
        await self.run("ip", "link", "set", f"{self.device}i", "up" if up else "down")

    async def close(self) -> None:
        await super().close()
        try:
            await _run("ip", "link", "del", self.device)
        except OSError:
            return  # the device was removed with its namespace
