"""The daemon: the shell around the relay. One loop, one thread, one relay.

In: a configuration, signals. Out: sockets, timers, files, HTTP, logs. The daemon moves frames between ``transport`` and
the relay, and carries out the relay's commands. It makes no decision about a batch. It may import every package but
``cli`` and ``demo``.
"""
