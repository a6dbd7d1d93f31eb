"""``kvbus demo``: simulated engines, a ``kvbus run`` process and routers on this machine, with faults.

The engines, the routers and the screen share one event loop. So the demo can compare a router's blocks with an engine's
cache at one moment. The sockets are ipc sockets in a temporary directory, so no port can be in use already.
"""
