"""Sockets: the only package that knows ZeroMQ.

This package moves frames. The core knows what they mean. It does not use zmq.asyncio, which costs 15-33 us of CPU a
message: the event loop watches each socket's file descriptor, and a :class:`~kvbus.transport.pump.Pump` drains it.
"""
