"""ZMTP of our own: the end of a ZeroMQ connection that outputs offer to routers.

In: bytes of peers. Out: whole messages, subscriptions and named reasons to the handler of a role (PUB or ROUTER), and
bytes to each peer alone. ``protocol`` and below are sans-I/O; ``connection``, ``listener`` and ``dialler`` do the I/O.
Everything a peer sends is counted and bounded before it is kept; what exceeds a bound ends its connection.
"""
