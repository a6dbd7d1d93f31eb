"""Test doubles of kvbus's peers (engines, routers, the network), and helpers that run kvbus itself.

**Routers.** `router.PlainSetRouter` keeps a set of blocks. Every other router of the tests uses it for that.
`router.RankedRouter` keeps one such set for each rank. The routers of `socket_routers` read the stream from real
sockets. They differ in when they ask for a replay: `Deaf` and `NeverAsks` never do, `RouterOnASet` asks when it notices
missing batches, and `StrictRouter` accepts only an answer with every seq. `TopicRouter` reads the streams of many
workers on one connection. `llmd.LlmdWithReplay` follows the rules of llm-d's subscriber. `ping_as_message` is a router
whose ZeroMQ does not know commands. `stage.Trusting`, `Checking`, `FromZero` and `Llmd` have no sockets.

A double must not be kinder than the program that it stands for. `conversation` plays recordings of real programs to
the doubles, which must request the same batches and have the same blocks (``data/README.md``). `Deaf`, `RouterOnASet`,
`StrictRouter`, `TopicRouter` and `FromZero` stand for no program.

**Engines whose real cache contents are known.** There are two, for different purposes.

* ``tests.properties.world.Engine`` is pure. It follows a script (store this block, on this medium, add a copy), so that
  a failing run can be shortened to the few changes that cause the failure. It has its own seqs, replay buffer, replay
  and snapshots. The simulation of the complete daemon (``tests.vopr``) connects it to simulated sockets.
* `engine.Engine` is :class:`kvbus.tools.sim.engine.SimEngine`, a cache under a workload, with the real publisher of
  `kvbus sim`. Its batches look like those of a release of a real engine. `engine.EngineWithApi` also has an HTTP API.
  ``tests.chaos.engines`` runs `kvbus sim` and `kvbus play` as processes.

**kvbus.** `stage.Stage` is a relay without sockets or a clock. `bus.running_bus` is a daemon on real sockets in the
test's process. ``tests.discovery.fleet.DiscoveringBus`` is a daemon that also discovers its engines.
`kvbus_process.KvbusProcess` is `kvbus run` as a separate process. ``tests.chaos.bus.BusProcess`` can run in its own
namespaces. `growth` detects from samples whether the memory or another value of a process grows.

**Network and processes.** `link.Link` is a TCP proxy that injects faults. `child.Child` is a program that can be
stopped, killed and inspected.

**Helpers.** `payloads` builds events and batches, `answers` reads a replay answer message by message, and `accounting`
checks the invariants of a source. :mod:`tests.core.dsl` has the steps of a scripted conversation with a complete relay.
:mod:`tests.core.sequencing.script` uses these steps with a sequencer only.
"""
