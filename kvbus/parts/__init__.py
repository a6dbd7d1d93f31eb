"""What kvbus can do without: a kind is a folder, each member of it an entry point, with an extra if it needs a library.

Kinds are ``outputs`` and ``discovery`` (what ``outputs[].type`` and ``sources[].discover`` name), ``front`` (what
stands before an engine's API) and ``reviews`` (who knows credentials). No kinds are ``log``, which outputs and
discovery have in common where a broker keeps records, and ``log_router``, for routers in Python that read a log
themselves.

In: the configuration, and the relay's commands and events. :mod:`kvbus.config.parts` finds a member; the daemon knows
the contracts alone. They may use all that stands below them but ``admin``.
"""
