"""Sockets: the only package that knows ZeroMQ.

Everything here moves frames and nothing else: what they mean is the core's business. No zmq.asyncio (15-33 µs of CPU a
message): each socket's file descriptor is watched by the event loop and drained by a :class:`~kvbus.transport.pump.Pump`.
"""
