"""The relay without I/O: it receives events and returns commands.

Nothing in this package opens a socket, reads a clock, starts a thread, writes a log line or uses an event loop. Bytes
come in as frames, the time comes in as a number, and every effect is returned as a command. The concepts:

Event
    A report of a shell to the relay (:mod:`kvbus.core.events`): a batch was received, a connection was established,
    time has passed.
Command
    An instruction of the relay to its shell (:mod:`kvbus.core.commands`): publish this, ask an engine, answer a router.
    A command is a value. Its result comes back as an event.
Batch
    One message of an engine: topic, seq, payload. The payload is decoded only when the batch is the next one.
Source
    One engine publisher, worker x rank: its configuration and its current state (:mod:`kvbus.core.source`).
Epoch
    A publisher's numbers from 0 to its restart. A new epoch empties the index.
Stream
    The numbered batches that one output publishes for one source, or for all of them (:mod:`kvbus.core.outputs`).
State snapshot
    The live blocks of a stream at one of its numbers, for routers that missed more than the journal keeps.

The path of a batch::

    BatchReceived
        -> wire          frames: topic, seq, payload
        -> sequencing    which epoch, which order; gaps are asked for
        -> wire          codec: payload to events
        -> normalizing   validation, copies, block sizes, order within the batch
        -> blocks        the index of what is live
        -> outputs       numbered, kept in the journal
    -> Publish

Each folder imports only folders after it in this list: outputs, normalizing and sequencing, blocks, wire.
"""
