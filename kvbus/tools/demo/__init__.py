"""``kvbus demo``: simulated engines, the real bus and routers on this machine, with faults on the way.

The bus is the `Daemon` of ``kvbus run``, in this process. Every batch still crosses real sockets on loopback. Nothing
is left behind at the end, and the demo can compare engines, bus and routers at one and the same moment.
"""
