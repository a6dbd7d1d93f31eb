"""How far a dial gets: name, address, connection, ZMTP handshake; and what is behind the port if it is no ZMTP.

libzmq dials again and again and says nothing. ``kvbus doctor`` and a daemon that waits for an engine dial once by hand,
with the codec of :mod:`kvbus.transport.zmtp`, and get a reason.
"""
