"""kvbus's own implementation of ZMTP 3.0 and 3.1, for the ports where routers and engines connect.

In: bytes from peers. Out: complete messages, subscriptions and a named reason for each end of a connection, to the
handler of a role; and bytes to each single peer. kvbus counts and bounds every byte of a peer before it keeps the byte.
A peer that exceeds a bound is disconnected.

Who calls whom, from a socket to a handler and back:

    Listener, Dialler (endpoint)       accept or dial; count half-open connections and peers, within Settings
            │ start(socket)
            ▼
    Peer (peer)                        one connection on asyncio: reads, decodes up to 32 events, continues later
            │ receive_data(bytes)          ▲ next_event(), data_to_send()
            ▼                              │
    Protocol (protocol)                the protocol without I/O, within Limits: greeting, handshake, messages
            │ start(), receive(command)    ▲ peer's properties and key, sealing
            ▼                              │
    Null (mechanism), Client, Server (curve)    the handshake after the greetings

    Peer ── opened, subscribed, cancelled, received, drained, closed ──▶ PeerHandler (the role: live, replay, sources)
    PeerHandler ── write, pause, resume, limit, close ──▶ Peer

``wire`` encodes and decodes bytes. ``reasons`` names every end of a connection. ``addresses`` turns endpoints into
sockets. ``tcp`` reads the kernel's state of a connection.

Each message is encoded once for all peers (``wire.encode_message``). With CURVE, ``Peer.write`` seals it for each peer.
Slow peers: asyncio's high and low water marks set ``Peer.writable`` and call ``drained``, and the handlers decide what
to send next. Flooding peers: kvbus decodes 32 events of a peer per iteration of the loop, and TCP slows the peer down.

``kvbus.transport.dialling`` also uses a ``Protocol``: it dials once, to find out why a connection fails.
"""
