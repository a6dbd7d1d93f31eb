"""ZMTP 3.0 and 3.1 of kvbus's own, for the ports where routers and engines connect.

What comes in: bytes of peers. What goes out: whole messages, subscriptions, and a named reason for each end, to the
handler of a role; and bytes to each peer alone. Every byte of a peer is counted and bounded before it is kept. A peer
that exceeds a bound loses its connection.

Who calls whom, from a socket to a handler and back:

    Listener, Dialler (endpoint)       accept or dial; count half-open connections and peers, within Settings
            │ start(socket)
            ▼
    Peer (peer)                        one connection on asyncio: reads, decodes up to 32 events, goes on later
            │ receive_data(bytes)          ▲ next_event(), data_to_send()
            ▼                              │
    Protocol (protocol)                the protocol without I/O, within Limits: greeting, handshake, messages
            │ start(), receive(command)    ▲ peer's properties and key, sealing
            ▼                              │
    Null (mechanism), Client, Server (curve)    the handshake after the greetings

    Peer ── opened, subscribed, cancelled, received, drained, closed ──▶ PeerHandler (the role: live, replay, sources)
    PeerHandler ── write, pause, resume, limit, close ──▶ Peer

``wire`` encodes and decodes bytes. ``reasons`` names every end. ``addresses`` turns endpoints into sockets. ``tcp``
reads what the kernel knows of a connection.

Messages are encoded once for all peers (``wire.encode_message``). CURVE seals them for each peer in ``Peer.write``.
Slow peers: asyncio's high and low water marks set ``Peer.writable`` and call ``drained``; the handlers decide what to
send next. Flooding peers: each gets 32 events an iteration of the loop, and TCP slows it down meanwhile.

``kvbus.transport.dialling`` drives a ``Protocol`` too: it dials once by hand, to say why a connection fails.
"""
