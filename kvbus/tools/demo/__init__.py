"""``kvbus demo``: simulated engines, a ``kvbus run`` process and routers on this machine, with faults.

The engines and routers share one event loop with the screen, so the demo can compare a router's blocks with an
engine's cache at one moment. They use ipc sockets in a temporary directory, so no port can be in use already.
"""
