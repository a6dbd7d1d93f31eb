"""``kvbus demo``: simulated engines, the real bus and two routers on this machine, with faults on the way.

The bus is the `Daemon` that ``kvbus run`` runs, in this process: every batch still crosses real sockets on
loopback, nothing can be left behind when the demo ends, and all three sides can be looked at in one and the
same moment, which an honest comparison needs.
"""
