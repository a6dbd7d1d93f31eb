"""Streams in a log that outlives the bus: the format of its records, what a log has to do, and how one is read back.

Nothing here knows a broker but :mod:`kvbus.log.kafka`, which needs the extra ``kafka``.
"""
