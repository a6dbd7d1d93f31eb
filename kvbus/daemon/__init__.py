"""The daemon: the shell around the relay. One loop, one thread, one relay.

In: a configuration, signals. Out: sockets, timers, files, HTTP, logs.
It moves frames between ``transport`` and the relay and carries commands out; it decides nothing about a batch.
It may use everything but ``cli`` and ``demo``.
"""
