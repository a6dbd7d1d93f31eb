"""What stands on either side of kvbus in the tests, and what they say to each other.

Routers: the set logic is in :class:`~tests.doubles.router.PlainSetRouter` alone. It is told by hand, by rank
(``RankedRouter``), or over sockets (:class:`~tests.doubles.socket_router.SocketRouter`); who wraps it adds when it asks
and what it puts up with (``RouterOnASet`` trusts, ``StrictRouter`` gives up, the world's ``Router`` fails at once). Doubles of one
family of routers each are in ``never_asks``, ``clears_by_pod``, ``llmd_replay`` and ``ping_as_message``: what a router of
that family believes, right or wrong, is what they are there to show (``tests.interop``).

Engines with a truth: there are two, because they answer different questions.

* ``tests.properties.world.Engine`` is pure. It does what a script says (this block, this medium, one copy more), so that
  a failing run can be shortened to the few changes that matter. It has its own seqs, buffer, replay and snapshots.
* ``tests.system.actors.Engine`` is :class:`kvbus.tools.sim.engine.SimEngine`, a cache under a workload, on a real publisher.
  Nobody says what it does next, and it makes batches like a release of a real engine. ``tests.chaos.engines`` runs the
  same cache as a process. Load generators (``bench``) and publishers of a few batches need no truth.

What both sides say is in :mod:`~tests.doubles.payloads`; what holds of every source at every moment in
:mod:`~tests.doubles.accounting`. The words of a conversation with a whole relay are in :mod:`tests.core.dsl`;
:mod:`tests.core.sequencing.script` speaks them with a sequencer alone.
"""
