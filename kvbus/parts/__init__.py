"""Optional parts of kvbus: outputs, discoverers, proxies of an engine's API, and the access to logs.

There are three kinds of parts, and each kind has a folder. Parts in ``outputs`` send streams to readers
(``outputs[].type`` names the part). Parts in ``discovery`` find engines (``sources[].discover`` names the part). Parts
in ``front`` are proxies of an engine's API. A part is one module or one folder, and an entry point registers it. If a
part needs a library, kvbus has an extra for it.

Two modules here are not parts. ``log`` is the access to a log that outputs and discoverers share. ``log_router`` is for
routers in Python that read a log.

A part receives its configuration, and exchanges commands and events with the relay. :mod:`kvbus.config.parts` loads the
part. The daemon knows only the contracts of the kinds. A part may import every package that is below ``kvbus.parts`` in
the table of docs/ARCHITECTURE.md.
"""
