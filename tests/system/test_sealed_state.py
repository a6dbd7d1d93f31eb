"""``kvbus run`` on a sealed state: killed and started again, with its key, with another one, with none."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.doubles.payloads import payload, store
from tests.system.bus import eventually
from tests.system.test_run import Place, engine_at, router_at, run_async

KEY, OTHER = "11" * 32, "22" * 32


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    return path


def test_a_kill_costs_nothing_and_a_wrong_key_stops_the_start(tmp_path: Path) -> None:
    async def main() -> None:
        key = written(tmp_path / "state.key", KEY)
        place = Place(tmp_path, state_dir=str(tmp_path / "state"), state_key_file=str(key))
        place.config["outputs"][0]["heartbeat"] = 0.2  # shows a router what it has missed
        with place.start() as command:
            await place.ready(command)
            async with engine_at(place) as engine:
                with router_at(place) as router:
                    await place.subscribed()
                    for block in range(1, 30):
                        engine.publish(payload(store([block])))
                    await eventually(lambda: router.read() and len(router.view.blocks) == 29, "all of it")
                    command.process.kill()
                    command.ended()
                    written(key, OTHER)
                    with place.start() as refused:
                        assert await refused.ends() == 78
                        assert "sealed with a key that is not in state_key_file" in refused.said
                        assert "Traceback" not in refused.said
                    written(key, OTHER, KEY)
                    with place.start() as again:
                        await place.ready(again)
                        await eventually(lambda: place.sources()[0]["state"] == "live", "the bus in sync")
                        engine.publish(payload(store([30])))
                        async with asyncio.timeout(60):
                            while len(router.view.blocks) < 30:
                                await router.follow()
                                await asyncio.sleep(0.01)
                        assert router.view.violations == []
                        assert "state loaded: 29 blocks" in again.said
                        again.process.terminate()
                        assert await again.ends() == 0

    run_async(main())
