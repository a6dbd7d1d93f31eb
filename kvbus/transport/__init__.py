"""Sockets: the only package of kvbus that uses ZeroMQ.

This package sends and receives frames. :mod:`kvbus.core` knows what the frames mean. kvbus's own implementation of ZMTP
(:mod:`kvbus.transport.zmtp`) carries the live streams of engines, and everything to and from routers. libzmq carries
requests to engines, and the client library.

The package does not use zmq.asyncio, which costs 15-33 us of CPU per message. Instead the event loop watches the file
descriptor of each libzmq socket, and a :class:`~kvbus.transport.pump.Pump` reads the socket until no message waits.
"""
