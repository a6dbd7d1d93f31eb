"""Test doubles of kvbus's peers (engines, routers, network), and kvbus itself for tests that need a complete one.

Routers. `router.PlainSetRouter` keeps a set of blocks, and no other class implements that logic. `router.RankedRouter`
keeps one set for each rank. `socket_routers` reads the stream from real sockets; its routers differ in when they ask
for a replay: `Deaf` and `NeverAsks` never do, `RouterOnASet` does at a hole, and `StrictRouter` and `LlmdWithReplay`
follow the rules of llm-d's subscriber. `TopicRouter` reads many workers on one connection. `ping_as_message` is a
router whose ZeroMQ does not know commands. `stage.Trusting`, `Checking` and `FromZero` are the same families without
sockets. An interop test shows what a router of each family believes, right or wrong.

Engines whose real cache contents are known. There are two, because they answer different questions.

* ``tests.properties.world.Engine`` is pure. It follows a script (this block, this medium, another copy), so that
  a failing run can be shortened to the few changes that matter. It has its own seqs, buffer, replay and snapshots. The
  simulation of the complete daemon (``tests.vopr``) connects it to simulated sockets.
* `engine.Engine` is :class:`kvbus.tools.sim.engine.SimEngine`, a cache under a workload, on the real publisher of
  `kvbus sim`. It makes batches like a release of a real engine. `engine.EngineWithApi` has an HTTP API too.
  ``tests.chaos.engines`` runs `kvbus sim` and `kvbus play` as processes.

Kvbus. `stage.Stage` is a relay without sockets or a clock. `bus.running_bus` is a daemon on real sockets in the test's
process; ``tests.discovery.fleet.DiscoveringBus`` also finds its engines. `kvbus_process.KvbusProcess` is `kvbus run` as
a separate process; ``tests.chaos.bus.BusProcess`` can live in other namespaces. `growth` judges samples of a process.

Network and processes. `link.Link` is a TCP proxy that injects faults. `child.Child` is a program that can be stopped,
killed and inspected.

`payloads` builds events and batches, `answers` reads a replay answer message by message, and `accounting` checks the
invariants of a source. The steps of a conversation with a complete relay are in :mod:`tests.core.dsl`;
:mod:`tests.core.sequencing.script` uses them with a sequencer only.
"""
