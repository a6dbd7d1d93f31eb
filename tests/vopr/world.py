"""A simulated world: engines, one kvbus and routers. Each fault that a plan can cause is a method with plain arguments.

A plan is a list of entries. An entry has a time, the name of such a method, and its arguments. Between two entries the
world runs by itself. :meth:`World.settle` ends all faults and waits until every router holds exactly its engine's
blocks. It fails if that takes longer than `BOUND`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvbus.core.sequencing.phases import State
from kvbus.core.source import Source
from kvbus.daemon.daemon import Daemon
from kvbus.parts.outputs.zmq import ZmqOutput
from tests.doubles.accounting import all_accounted_for
from tests.properties.world import Engine
from tests.properties.world import Setup as Cache
from tests.vopr.bus import Bus, Setup, silent
from tests.vopr.engines import Directory, EngineNode
from tests.vopr.network import Network
from tests.vopr.process import COST, DESCRIPTORS
from tests.vopr.routers import KINDS, Asking, Key, Router, WrongError
from tests.vopr.schedule import Schedule

NO_RESTART = frozenset(
    {
        "bus_pauses",
        "bus_is_slow",
        "clock_steps",
        "engine_bursts",
        "engine_rate",
        "engine_repeats",
        "engine_trims",
        "router_answer_breaks",
        "router_asks_again",
        "router_leaves",
        "router_link_breaks",
        "router_link_holds",
        "router_reads",
        "router_reads_answers",
    }
)
"""Names of the faults after which kvbus must not count a restart of an engine that answers replays."""

Entry = tuple[float, str, tuple[Any, ...]]
"""One entry of a plan: a time in seconds, the name of a method of `World`, and its arguments.

The time counts from the start of the world, without the time spent in `World.settle`.
"""

BLOCK = 64
"""Number of bytes that the memory check counts for each retained block."""

KEPT = 20_000
KEPT_OF_A_BYTE = 3
"""Bytes that kvbus may retain for each byte from engines and each output. It may always retain `KEPT` bytes.

kvbus's own counters give the retained bytes. The factor is above 1, because an event as a map has two and a half times
as many bytes as a positional event.
"""

BOUND = 60.0
"""Virtual seconds after the end of the last fault within which every router must be exact."""


class World:
    """A simulated world in which a plan of faults runs.

    Args:
        seed: seed of the setup, and of all random numbers that are not part of the plan.
    """

    def __init__(self, seed: int) -> None:
        self.schedule = schedule = Schedule(seed)
        self.network = Network(schedule)
        self.directory = Directory()
        self.setup = Setup(schedule.chance("setup"))
        self.bus = Bus(schedule, self.network, self.directory, self.setup, self._failed)
        self.bus.after_turn = self._look
        self.engines = [
            self._new_engine(f"engine{number}", kind, rank)
            for number, (kind, rank) in enumerate(zip(self.setup.engines, self.setup.ranks, strict=True))
        ]
        for node in self.engines:
            self.directory.nodes[node.name] = self.directory.nodes[f"@{node.name}"] = node
        self.routers: list[tuple[tuple[int, int], Router]] = []
        self.times: list[tuple[float, frozenset[str]]] = []
        """For each `settle`, the seconds until all routers were exact, and the names of the preceding faults."""
        self._faults: set[str] = set()
        self._joined = 0
        self._moves = 0
        self.old: list[EngineNode] = []
        self._turns = 0
        self._settled: Daemon | None = None
        self._restarts: list[int] = []
        self._sent_before = 0
        self._errors: list[BaseException] = []

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self, plan: Iterable[Entry]) -> None:
        """Execute a plan of faults. Raise the first failure of a check."""
        with silent():
            try:
                begun = self.schedule.now
                for at, name, args in plan:
                    self.schedule.run_until(max(self.schedule.now, begun + at))
                    before = self.schedule.now
                    getattr(self, name)(*args)
                    begun += self.schedule.now - before
                    if name not in ("settle", "start", "join"):
                        self._faults.add(name)
            finally:
                self.bus.kill()

    def _failed(self, message: str, error: BaseException | None) -> None:
        self._errors.append(error or WrongError(message))

    def _look(self) -> None:
        """Check the invariants of kvbus and its routers. This method is called after each iteration of kvbus's event
        loop.
        """
        if self._errors:
            raise self._errors[0]
        daemon = self.bus.daemon
        if daemon is None:
            return
        for source in daemon.relay.present:
            all_accounted_for(source)
        self._turns += 1
        if self._turns % 50 == 0:
            self._look_at_memory(daemon)

    def _look_at_memory(self, daemon: Daemon) -> None:
        """Check that kvbus keeps its limits of memory, and retains memory in proportion to the bytes from engines."""
        kept = 0
        for source in daemon.relay.present:
            spec, held = source.spec, source.sequencer.reorder_buffer
            assert len(held) <= spec.reorder_batches + 1, "batches held"  # plus the batch that is delivered next
            kept += held.bytes + BLOCK * source.normalizer.entries
        sent = sum(node.sent for node in (*self.engines, *self.old)) + self._sent_before
        for output in daemon.relay.outputs:
            for stream in output.streams:
                journal = stream.journal
                assert len(journal) <= journal.max_batches, "batches in the journal"
                assert journal.bytes <= journal.max_bytes or len(journal) == 1, "bytes in the journal"
                kept += journal.bytes
        for driver in daemon.outputs.drivers:
            assert isinstance(driver, ZmqOutput)
            for ring in driver.rings:
                assert ring.bytes <= ring.send_bytes or ring.end - ring.first == 1, "bytes in the ring"
                assert ring.end - ring.first <= ring.send_hwm, "batches in the ring"
                kept += ring.bytes
        assert kept <= KEPT + KEPT_OF_A_BYTE * len(daemon.relay.outputs) * sent, f"{kept} bytes are kept of {sent}"

    # -- engines -----------------------------------------------------------------------------------------------------

    def _new_engine(self, name: str, kind: str, rank: int) -> EngineNode:
        setup = self.setup
        engine = Engine(kind, Cache(engines=(kind,), buffer_steps=setup.buffer, ranks=setup.ranks_named), rank)
        return EngineNode(self.schedule, name, engine, setup.hwm)

    def _node(self, number: int) -> EngineNode:
        return self.engines[number % len(self.engines)]

    def engine_stops(self, number: int) -> None:
        self._node(number).stop()

    def engine_starts(self, number: int) -> None:
        self._node(number).start()

    def engine_rate(self, number: int, rate: float) -> None:
        self._node(number).rate = rate

    def engine_bursts(self, number: int, batches: int) -> None:
        node = self._node(number)
        for _ in range(batches if node.running else 0):
            node.publish(node.changes())

    def engine_skips_a_number(self, number: int) -> None:
        self._node(number).engine.seq += 1

    def engine_repeats(self, number: int) -> None:
        self._node(number).publish_again()

    def engine_trims(self, number: int, keep: int) -> None:
        engine = self._node(number).engine
        engine.buffer = engine.buffer[-keep:]

    def engine_moves(self, number: int) -> None:
        """Move an engine's host name to a new engine. Existing connections stay with the old engine."""
        number %= len(self.engines)
        old = self.engines[number]
        self._moves += 1
        name = f"{old.name.partition(' ')[0]} {self._moves}"
        new = self._new_engine(name, old.engine.kind, old.engine.rank)
        self.engines[number] = self.directory.nodes[f"engine{number}"] = self.directory.nodes[f"@{name}"] = new
        self.old.append(old)

    def old_engines_stop(self) -> None:
        """Stop the engines that continued to run after their host names had moved."""
        for node in self.old:
            node.stop()
            node.rate = 0.0
            self._sent_before += node.sent
        self.old.clear()

    def engine_link_breaks(self, number: int) -> None:
        self._node(number).disconnect()

    def engine_is_out_of_reach(self, number: int) -> None:
        node = self._node(number)
        node.reachable = False
        node.disconnect()

    def engine_is_in_reach(self, number: int) -> None:
        self._node(number).reachable = True

    def engine_link_stalls(self, number: int, stalled: bool) -> None:
        self._node(number).stall(stalled=stalled)

    def replay_is_of_another(self, number: int, other: int) -> None:
        """Let the replay address of an engine lead to another engine, if both answer replay requests."""
        node, another = self._node(number), self._node(other)
        if node.engine.kind == another.engine.kind == "replay" and node is not another:
            self.directory.others[node] = another

    def replays_are_corrected(self) -> None:
        self.directory.others.clear()

    def answer_breaks_off(self, number: int, messages: int) -> None:
        self._node(number).break_answer = messages

    def answer_lacks(self, number: int, message: int) -> None:
        self._node(number).drop_of_answer = message

    def answers_are_slow(self, number: int, pace: float) -> None:
        self._node(number).answer_pace = pace

    # -- the bus -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.bus.start()

    def bus_is_killed(self) -> None:
        self.bus.kill()

    def bus_stops(self) -> None:
        self.bus.stop()

    def power_is_cut(self) -> None:
        self.bus.kill()
        self.bus.platter.power_cut()

    def bus_is_killed_in_a_commit(self, commits: int) -> None:
        self.bus.platter.kill_in = commits

    def state_is_damaged(self, kind: str) -> None:
        self.bus.platter.damage(kind)

    def disk_fails(self, calls: int) -> None:
        self.bus.platter.failing = calls

    def disk_is_slow(self, seconds: float) -> None:
        self.bus.platter.cost = seconds

    def disk_has_room_for(self, size: int | None) -> None:
        self.bus.platter.room = size

    def second_process(self, elsewhere: bool) -> None:
        elsewhere = elsewhere and self.setup.settings["state_dir"] is not None
        if self.bus.running and self.bus.second(elsewhere=elsewhere):
            raise WrongError("two processes have the same state")

    def bus_pauses(self, seconds: float) -> None:
        if self.bus.loop is not None:
            self.bus.loop.pause(seconds)

    def bus_is_slow(self, cost: float) -> None:
        if self.bus.loop is not None:
            self.bus.loop.cost = cost

    def bus_reloads(self, sources: tuple[int, ...]) -> None:
        self.bus.sources = sorted({number % len(self.engines) for number in sources})
        if self.bus.running:
            self.bus.change_sources()

    def bus_has_descriptors(self, most: int) -> None:
        if self.bus.loop is not None:
            self.bus.loop.max_descriptors = most

    def clock_steps(self, seconds: float) -> None:
        self.schedule.wall_offset += seconds

    # -- routers -----------------------------------------------------------------------------------------------------

    def join(self, kind: str, stream: int, host: int) -> None:
        """Add a router of some kind to one of the streams."""
        places = [(0, slot) for slot in range(len(self.engines))]
        if len(self.setup.outputs) > 1:
            places.append((1, 0))
        place = places[stream % len(places)]
        self._joined += 1
        name = f"{kind} {self._joined} on {place}"
        router = KINDS[kind](self.network, name, self.setup.endpoints(*place), f"10.0.0.{host}")
        self.routers.append((place, router))

    def _router(self, number: int) -> Router | None:
        return self.routers[number % len(self.routers)][1] if self.routers else None

    def router_leaves(self, number: int) -> None:
        if len(self.routers) > 2:
            self.routers.pop(number % len(self.routers))[1].leave()

    def router_reads(self, number: int, on: bool) -> None:
        if router := self._router(number):
            router.read(on=on)

    def router_link_breaks(self, number: int) -> None:
        if router := self._router(number):
            router.break_connection()

    def router_link_holds(self, number: int, up: bool) -> None:
        if router := self._router(number):
            router.hold(up=up)

    def router_answer_breaks(self, number: int) -> None:
        if router := self._router(number):
            router.break_answer()

    def router_reads_answers(self, number: int, on: bool) -> None:
        if router := self._router(number):
            router.read_answers(on=on)

    def router_asks_again(self, number: int) -> None:
        router = self._router(number)
        if isinstance(router, Asking):
            router.ask_again()

    # -- invariants --------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """End every fault that the plan has begun."""
        self.old_engines_stop()
        self.replays_are_corrected()
        for node in self.engines:
            node.start()
            node.reachable = True
            node.stall(stalled=False)
            node.break_answer = node.drop_of_answer = None
            node.answer_pace = 0.0005
        self.bus.platter.room = self.bus.platter.kill_in = None
        self.bus.platter.failing = 0
        self.bus.platter.cost = 0.0
        if self.bus.loop is None:
            self.bus.start()
        if self.bus.loop is not None:
            self.bus.loop.cost = COST
            self.bus.loop.max_descriptors = DESCRIPTORS
        for _, router in self.routers:
            router.hold(up=True)
            router.read(on=True)
            router.read_answers(on=True)

    def settle(self, rate: float) -> None:
        """End every fault, let engines publish ``rate`` batches a second, and wait until every router is exact."""
        self.heal()
        for node in self.engines:
            # a kvbus without its state learns only from the engine under which rank routers may hold blocks
            named = False
            while not named:
                named = node.engine.envelope() == [node.engine.rank]
                node.publish(node.changes())
            # without a replay, kvbus can notice the loss of a batch only when a later batch arrives
            node.rate = max(rate, 2.0) if node.engine.kind == "deaf" else rate
        loop = self.bus.loop
        begun = max(self.schedule.now, 0.0 if loop is None else loop.busy_until)  # a pause cannot be ended early
        # after a pause, TCP may need as long again as the pause took to deliver the batches that were held back, and
        # only then can kvbus notice that some are lost
        bound = BOUND + (loop.paused_for if loop is not None and "bus_pauses" in self._faults else 0.0)
        while True:
            self.schedule.run_until(self.schedule.now + 0.25)
            if self.bus.loop is None:
                self.bus.start()  # restart kvbus, as a service manager does
            wrong = self._wrong()
            if not wrong:
                break
            if self.schedule.now - begun > bound:
                raise WrongError(f"{bound:.0f} s after the last fault: {wrong}")
        self._nothing_restarted()
        self.times.append((max(0.0, self.schedule.now - begun), frozenset(self._faults)))
        self._faults.clear()
        for node in self.engines:
            node.rate = 10.0

    def _nothing_restarted(self) -> None:
        """Check that kvbus has counted no restart of an engine, if no fault of the plan looks like a restart."""
        daemon = self.bus.daemon
        assert daemon is not None
        counted = [source.stats.restarts for source in daemon.relay.sources]
        if self._faults <= NO_RESTART and self._settled is daemon:
            for number in self.bus.sources:
                if self.setup.engines[number] != "deaf" and counted[number] != self._restarts[number]:
                    raise WrongError(f"engine{number} has restarted, says the bus")
        self._settled, self._restarts = daemon, counted

    def _wrong(self) -> str:
        """Return what is not exact yet, or an empty string if every router holds exactly its engine's blocks."""
        daemon = self.bus.daemon
        if not self.bus.running or daemon is None:
            return "the bus does not run"
        for number in self.bus.sources:
            source, node = daemon.relay.sources[number], self.engines[number]
            if source.state is not State.LIVE or source.sequencer.pending:
                return f"{node.name} is {source.state}, {source.sequencer.pending} pending"
            if source.sequencer.replay_of_another:
                return f"{node.name} has its own replay, and kvbus does not use it"
            engine = node.engine
            whole = engine.kind != "deaf" and [seq for seq, _ in engine.buffer] == list(range(engine.seq))
            if whole and source.partial and not source.normalizer.full:
                return f"{node.name} could be known and is partial"
        for place, router in self.routers:
            wrong = self._of_router(place, router, daemon.relay.sources, daemon.relay.outputs)
            if wrong:
                return f"{router.name}: {wrong}"
        return ""

    def _of_router(self, place: tuple[int, int], router: Router, sources: list[Source], outputs: Any) -> str:
        if place[0] == 0 and place[1] not in self.bus.sources:
            return ""
        output = outputs[place[0]]
        expected: set[Key] = set()
        free: set[Key] = set()
        for number in self.bus.sources if output.merged else [place[1]]:
            source, engine = sources[number], self.engines[number].engine
            rank = output.rank_of(number, source)
            known = {"GPU", *source.normalizer.dump()["media"]}
            held = [key for key, count in engine.truth.items() if count]
            truth = {(rank, medium, block) for medium, block in held}
            if self.setup.block_size == 1:  # kvbus announces each block of the engine as two
                truth |= {(rank, medium, block + 100) for medium, block in held}
            if source.partial:
                free |= truth
            else:
                expected |= {key for key in truth if key[1] in known}
                free |= {key for key in truth if key[1] not in known}
        found = router.blocks
        if found - expected - free:
            return f"blocks too many: {sorted(found - expected - free)}"
        if expected - found:
            return f"blocks too few: {sorted(expected - found)}"
        return ""
