"""Sockets: the only package that knows ZeroMQ.

This package moves frames. The core knows what the frames mean. The package does not use zmq.asyncio, which costs
15-33 us of CPU per message. Instead the event loop watches each socket's file descriptor, and a
:class:`~kvbus.transport.pump.Pump` reads the socket until it is empty.
"""
