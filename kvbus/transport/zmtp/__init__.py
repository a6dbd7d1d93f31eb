"""kvbus's own implementation of ZMTP 3.0 and 3.1, for live streams of engines, and for everything that routers read.

In: bytes from peers. Out: complete messages, subscriptions and the reason for each end of a connection, as calls of a
handler; and bytes to each peer. kvbus counts and limits every byte of a peer before it keeps the byte. A peer that
exceeds a limit is disconnected.

Which object calls which, from a socket to a handler and back:

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
    PeerHandler ── write, pause, resume, close ──▶ Peer

``wire`` encodes and decodes bytes. ``reasons`` lists the reasons for the end of a connection. ``addresses`` creates
sockets from endpoints. ``tcp`` reads the kernel's state of a connection.

Each message is encoded once for all peers (``wire.encode_message``). With CURVE, ``Peer.write`` encrypts it for each
peer. If a peer reads slowly, the high-water and low-water marks of asyncio set ``Peer.writable`` and call ``drained``,
and the handler decides what to send next. If a peer sends too much, kvbus decodes only 32 of its events in each
iteration of the event loop, and TCP slows the peer down.

``kvbus.transport.dialling`` also uses a ``Protocol``. It dials once, to find the reason for a failing connection.
"""
