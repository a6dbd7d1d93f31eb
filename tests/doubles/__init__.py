"""The peers of kvbus in the tests, and kvbus itself where a test needs a whole one.

Routers. `router.PlainSetRouter` holds the logic of a set of blocks, and is the only place that does. `router.RankedRouter`
keeps one set for each rank. `socket_router.SocketRouter` reads it from real sockets; its subclasses differ in when they
ask: `Deaf` never, `tests.system.bus.RouterOnASet` at a hole, `tests.system.actors.StrictRouter` by the rules of llm-d's
subscriber. `topic_router` reads many workers on one connection. `stage.Trusting`, `Checking` and `FromZero` are the same
three families without sockets. Doubles of one family of routers each are in `never_asks`, `clears_by_pod`, `llmd_replay`
and `ping_as_message`: a test of interop shows what a router of that family believes, right or wrong.

Engines with a truth. There are two, because they answer different questions.

* ``tests.properties.world.Engine`` is pure. It does what a script says (this block, this medium, one copy more), so that
  a failing run can be shortened to the few changes that matter. It has its own seqs, buffer, replay and snapshots. The
  simulation of the whole daemon (``tests.vopr``) puts it behind simulated sockets.
* ``tests.system.actors.Engine`` is :class:`kvbus.tools.sim.engine.SimEngine`, a cache under a workload, on the real
  publisher of `kvbus sim`. It makes batches like a release of a real engine. ``tests.chaos.engines`` runs `kvbus sim` and
  `kvbus play` as processes.

kvbus. `stage.Stage` is a relay without sockets or a clock, and `kvbus_process.KvbusProcess` is `kvbus run` as a process.
``tests.system.bus.running_bus`` is a daemon on real sockets in the process of the test.

`payloads` has the events and batches, `answers` reads an answer part by part, and `accounting` has what holds of every
source at every moment. The words of a conversation with a whole relay are in :mod:`tests.core.dsl`;
:mod:`tests.core.sequencing.script` speaks them with a sequencer alone.
"""
