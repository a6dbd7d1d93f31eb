"""The relay without I/O: it receives events and returns commands.

Nothing in this package opens a socket, reads a clock, starts a thread, writes a log line or uses an event loop. Bytes
arrive as frames, the time arrives as a number, and every effect is returned as a command. The daemon
(:mod:`kvbus.daemon`) does the I/O: it reports events to the relay, and carries out its commands. The concepts:

Event
    A report of the daemon to the relay (:mod:`kvbus.core.events`): a batch was received, a connection was established,
    time has passed.
Command
    An instruction of the relay to the daemon (:mod:`kvbus.core.commands`): publish this batch, send a request to an
    engine, answer a router. A command is a value. Its result comes back as an event.
Batch
    One message of an engine: topic, seq (number), payload. kvbus decodes the payload only when the batch is the next
    one of its source.
Source
    One engine publisher, which is one data-parallel rank of a worker: its configuration and its current state
    (:mod:`kvbus.core.source`).
Epoch
    The numbering of a publisher from 0 until the publisher restarts. A new epoch empties the index of the source.
Stream
    The numbered batches that one output publishes for one source, or for all sources (:mod:`kvbus.core.outputs`).
State snapshot
    The live blocks of a stream as of one seq, for routers that missed more batches than the journal keeps.

The path of a batch through the packages::

    BatchReceived
        -> wire          split the frames into topic, seq and payload
        -> sequencing    determine epoch and order; request missing batches
        -> wire          decode the payload into events
        -> normalizing   validate events, count copies, detect block sizes, order the events of a batch
        -> blocks        keep the index of live blocks
        -> outputs       number the batch and keep it in the journal
    -> Publish

Each folder imports only folders after it in this list: outputs, normalizing and sequencing, blocks, wire.
"""
