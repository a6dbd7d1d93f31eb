"""Processes of their own: start, pin, account for their CPU time and memory, and end them by their id."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]

CORES: Final = sorted(os.sched_getaffinity(0))
"""What this process may use."""

LOAD_CORE: Final = CORES[0]
"""Engine and routers: the load generator."""

MEASURED_CORE: Final = CORES[-1]
"""What is measured, alone (where there are two cores)."""


def pin(*cores: int) -> None:
    """Keep this process, and every thread it starts from now on, on these cores."""
    os.sched_setaffinity(0, cores or CORES)


def go_first(pid: int, priority: int) -> None:
    """Let a process run before ordinary ones on its core at once, not at the end of their turn; only root may say so.

    Of two such processes the one of the higher priority goes before the other.
    """
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(int(task.name), os.SCHED_RR, os.sched_param(priority))


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process, those that have ended included: to 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fine_cpu_seconds(pid: int) -> float:
    """CPU time of the threads a process has now, to the nanosecond; :func:`cpu_seconds` where the kernel has none."""
    try:
        return _scheduled(pid, 0)
    except (FileNotFoundError, ProcessLookupError):  # or one has ended in this moment
        return cpu_seconds(pid)


def waited_seconds(pid: int) -> float:
    """How long the threads a process has now were ready to run while others had the core; 0 where nobody counts it."""
    try:
        return _scheduled(pid, 1)
    except (FileNotFoundError, ProcessLookupError):  # or one has ended in this moment
        return 0.0


def _scheduled(pid: int, column: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[column]) for task in tasks) / 1e9


def rss_bytes(pid: int | str = "self") -> int:
    """Memory that a process has resident now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_rss_bytes(pid: int | str = "self") -> int:
    """The most memory it ever had resident, since the start or :func:`reset_peak`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no VmHWM of {pid}")


def reset_peak(pid: int | str) -> None:
    """Begin :func:`peak_rss_bytes` anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def wait_until(condition: Callable[[], object], what: str, patience: float = 120.0, every: float = 0.01) -> None:
    """Poll until the condition is true.

    Raises:
        TimeoutError: it did not become true.
    """
    until = time.monotonic() + patience
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"not within {patience:g} s: {what}")
        time.sleep(every)


def stop(process: subprocess.Popen[Any], patience: float = 10.0) -> None:
    """SIGTERM, then SIGKILL, to this one process."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(patience)


def many_descriptors() -> int:
    """Let this process, and those it starts, open as many files as they may; how many that is."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def environment(**more: str) -> dict[str, str]:
    """This environment without kvbus's variables, and with hashes that are the same in every run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVBUS_")}
    return {**kept, "PYTHONHASHSEED": "0", **more}


def run_child(
    module: str,
    *arguments: object,
    cores: tuple[int, ...] = (),
    patience: float = 900.0,
    env: Mapping[str, str] | None = None,
) -> Any:
    """Run ``python -m module`` in a fresh process, with ``env`` besides, and return the JSON it prints.

    Raises:
        CalledProcessError: it failed; what it said is on stderr.
        TimeoutExpired: it did not end.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    with started(command, cores=cores, stdout=subprocess.PIPE, env=environment(**(env or {}))) as process:
        output, _ = process.communicate(timeout=patience)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
    return json.loads(output)


@contextlib.contextmanager
def started(
    command: list[str], *, cores: tuple[int, ...] = (), log: Path | None = None, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process, pinned, and end it by its id when the block ends."""
    with contextlib.ExitStack() as stack:
        if log is not None:
            options["stdout"] = options["stderr"] = stack.enter_context(log.open("ab"))
        settings = {"cwd": ROOT, "env": environment(), "stdin": subprocess.DEVNULL, **options}
        process = stack.enter_context(subprocess.Popen(command, **settings))
        try:
            if cores:
                # it has one thread yet; those it starts later inherit this
                os.sched_setaffinity(process.pid, cores)
            yield process
        finally:
            stop(process)
