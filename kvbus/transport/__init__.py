"""Sockets: the only package that knows ZeroMQ.

Everything here moves frames and nothing else: what they mean is the core's business. No zmq.asyncio (15-33 us of CPU
a message): the event loop watches each socket's file descriptor and a :class:`~kvbus.transport.pump.Pump` drains it.
"""
