"""The relay as a pure machine: events in, commands out.

Nothing in this package opens a socket, reads a clock, starts a thread, writes a log line or knows an event loop; an
import contract keeps it so. Bytes come in as frames, time comes in as a number, and what should happen leaves as a
command. The order a reader wants::

    frames  -> codec -> sequencer -> normalize (validate, granularity, index) -> relay -> stream (journal) -> commands
"""
