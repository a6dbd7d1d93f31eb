"""Optional parts of kvbus. A kind is a folder; each member is a module or a folder in it, and an entry point.

A member that needs a library has an extra. Kinds are ``outputs`` and ``discovery`` (what ``outputs[].type`` and
``sources[].discover`` name) and ``front`` (what stands before an engine's API). Two are not kinds: ``log``, which
outputs and discovery share where a broker keeps records, and ``log_router``, for routers in Python that read a log.

In: the configuration, and the relay's commands and events. :mod:`kvbus.config.parts` finds a member; the daemon knows
only the contracts. Parts may use every package below them in the import contract.
"""
