"""The peers of kvbus in the tests, and kvbus itself where a test needs a whole one.

Routers. `router.PlainSetRouter` holds the logic of a set of blocks, and is the only place that does. `router.RankedRouter`
keeps one set for each rank. `socket_routers` reads it from real sockets; its routers differ in when they ask for a replay:
`Deaf` and `NeverAsks` never, `RouterOnASet` at a hole, `StrictRouter` and `LlmdWithReplay` by the rules of llm-d's
subscriber. `TopicRouter` reads many workers on one connection. `ping_as_message` is a router whose ZeroMQ knows no
commands. `stage.Trusting`, `Checking` and `FromZero` are the same families without sockets. A test of interop shows what
a router of each family believes, right or wrong.

Engines with a truth. There are two, because they answer different questions.

* ``tests.properties.world.Engine`` is pure. It does what a script says (this block, this medium, one copy more), so that
  a failing run can be shortened to the few changes that matter. It has its own seqs, buffer, replay and snapshots. The
  simulation of the whole daemon (``tests.vopr``) puts it behind simulated sockets.
* `engine.Engine` is :class:`kvbus.tools.sim.engine.SimEngine`, a cache under a workload, on the real publisher of
  `kvbus sim`. It makes batches like a release of a real engine. `engine.EngineWithApi` has an HTTP API too.
  ``tests.chaos.engines`` runs `kvbus sim` and `kvbus play` as processes.

Kvbus. `stage.Stage` is a relay without sockets or a clock. `bus.running_bus` is a daemon on real sockets in the process of
the test. `kvbus_process.KvbusProcess` is `kvbus run` as a process.

Network and processes. `link.Link` is a TCP link that can be made bad, and `child.Child` is a program that can be stopped,
killed and looked at.

`payloads` has the events and batches, `answers` reads an answer part by part, and `accounting` has what holds of every
source at every moment. The words of a conversation with a whole relay are in :mod:`tests.core.dsl`;
:mod:`tests.core.sequencing.script` speaks them with a sequencer alone.
"""
