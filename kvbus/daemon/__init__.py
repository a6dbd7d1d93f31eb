"""The daemon: one relay with its sockets, timers and files, in one thread with one event loop.

Its inputs are a configuration and signals. Its outputs are messages on sockets, files, HTTP answers and log lines. The
daemon moves frames between ``transport`` and the relay, and carries out the relay's commands. It makes no decision
about a batch. It may import every package except ``cli``, ``tools`` and ``index``.
"""
