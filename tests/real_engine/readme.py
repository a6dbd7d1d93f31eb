"""Run the commands of README.md unchanged with a real engine. The ports in the commands must be free."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shlex
import socket
from pathlib import Path
from typing import Final

from tests.doubles.child import Child

from .asking import answering, fetched
from .engine import MODEL, Engine, Setup, on_cpu
from .outcome import Blocks, Outcome, Point, blocks_of_text, score
from .scene import KVBUS
from .traffic import Traffic, tokens

README: Final = Path(__file__).parents[2] / "README.md"
PORTS: Final = (5557, 5558, 5657, 5658, 9477)
HTTP: Final = "http://127.0.0.1:9477"


def commands(text: str) -> tuple[list[str], str, list[str]]:
    """Return the README's engine command, configuration and kvbus commands.

    The kvbus commands are those of the README's code block, and the ``kvbus run`` without a configuration file.
    """
    (serve,) = re.findall(r"^```\n(vllm serve .+?)```", text, re.DOTALL | re.MULTILINE)
    (config,) = re.findall(r"^```yaml\n(.+?)```", text, re.DOTALL | re.MULTILINE)
    (block,) = re.findall(r"^```\n(kvbus check .+?)```", text, re.DOTALL | re.MULTILINE)
    (run,) = re.findall(r"`(kvbus run --source .+?)`", text)
    lines = (line.partition("#")[0].strip() for line in (*block.splitlines(), run))
    return shlex.split(serve), config, [line for line in lines if line]


async def play(home: Path, directory: Path) -> Outcome:
    """Run all commands of README.md in their order, and return the results."""
    outcome = Outcome("started as in the README", "the README's commands")
    serve, config, lines = commands(README.read_text())
    engine = Engine(home, Setup(), directory, "engine")
    program, model = str(home / "bin" / "vllm"), str(home / "models" / "llama")
    engine.process.command = [program, "serve", model, *serve[3:], *on_cpu(300, 2048), "--port", str(engine.port)]
    (directory / "kvbus.yaml").write_text(config)
    with outcome.caught(directory):
        for port in PORTS:
            with socket.socket() as free:
                free.bind(("127.0.0.1", port))
        try:
            await engine.start()
            await typed(lines, engine, directory, outcome)
        finally:
            await engine.stop()
    return outcome


async def compare(line: str, engine: Engine, outcome: Outcome, dumped: dict[str, Blocks]) -> None:
    """Compare the blocks of kvbus, and those that a command has printed, with the engine's blocks."""
    pool = (await engine.pool()).of("prefix")
    scores = {"kvbus": score(pool, blocks_of_text(await fetched(f"{HTTP}/blocks")), counted=True)}
    scores |= {name: score(pool, blocks) for name, blocks in dumped.items()}
    copied = sum(copies > 1 for copies in pool.values())
    outcome.points.append(Point(f"`{line}`", len(pool), copied, 0, scores, 0.0))


async def typed(lines: list[str], engine: Engine, directory: Path, outcome: Outcome) -> None:
    """Run the README's kvbus commands, and check that kvbus and ``kvbus dump`` have exactly the engine's blocks."""
    traffic = Traffic(engine.api, seed=3)
    prompt = tokens(random.Random(4), 200)
    (directory / "prompt.json").write_text(json.dumps(prompt))
    await traffic.send(40)
    await fetched(f"{engine.api}/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 1})
    bus: Child | None = None
    try:
        for line in lines:
            name = line.split()[1]
            output = directory / f"{name}.txt"
            output.touch()
            command = Child(name, ["sh", "-c", f"cd '{directory}' && exec {line} >{output.name} 2>&1"], directory)
            command.env |= {"PATH": f"{Path(KVBUS).parent}:{os.environ['PATH']}", "STATE_DIRECTORY": str(directory)}
            if name == "run":
                if bus is not None:
                    await bus.end()
                bus = command
                await bus.start()
                await answering(f"{HTTP}/readyz", 60, bus)
            elif name in ("tail", "top"):  # these commands run until they have something to show
                await command.start()
                async with asyncio.timeout(60):
                    while not output.read_text():
                        await traffic.send(1)
                await command.end()
            else:
                await command.start()
                assert command.process is not None
                code = await command.process.wait()
                assert code == 0, f"{line}: exit code {code}: {output.read_text()}"
            if name == "dump":
                await compare(line, engine, outcome, {"late router": blocks_of_text(output.read_text())})
        await compare(lines[-1], engine, outcome, {})
        outcome.notes.append(f"the test ran {', '.join(f'`{line}`' for line in lines)}")
    finally:
        if bus is not None:
            await bus.close()
