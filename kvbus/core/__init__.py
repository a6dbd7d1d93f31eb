"""The relay as a pure machine: events in, commands out.

Nothing in this package opens a socket, reads a clock, starts a thread, writes a log line or knows an event loop. Bytes
come in as frames, time comes in as a number, and what should happen leaves as a command. The primitives:

Event
    What a shell reports to the relay (:mod:`kvbus.core.events`): a batch was received, a connection stands, time has
    passed.
Command
    What the relay has its shell do (:mod:`kvbus.core.commands`): publish this, ask an engine, answer a router. A
    command is a value. What comes of it comes back as an event.
Batch
    One message of an engine: topic, seq, payload. The payload is decoded when the batch is the next one, not before.
Source
    One engine publisher, worker x rank, as configured and as it stands (:mod:`kvbus.core.source`).
Epoch
    A publisher's numbers from 0 to its restart. A new epoch empties the index.
Stream
    The numbered batches that one output publishes for one source, or for all of them (:mod:`kvbus.core.outputs`).
State snapshot
    The live blocks of a stream at one of its numbers, for whoever missed more than the journal keeps.

The way of a batch::

    BatchReceived
        -> wire          frames: topic, seq, payload
        -> sequencing    which epoch, which order; gaps are asked for
        -> wire          codec: payload to events
        -> normalizing   validation, copies, block sizes, order within the batch
        -> blocks        the index of what is live
        -> outputs       numbered, kept in the journal
    -> Publish

Each folder imports only folders further down: outputs, normalizing and sequencing, blocks, wire.
"""
