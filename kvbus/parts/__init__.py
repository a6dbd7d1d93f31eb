"""What kvbus can do without: each kind is a folder, each member an entry point, with an extra if it needs a library.

``outputs`` and ``discovery`` have what ``outputs[].type`` and ``sources[].discover`` name, ``log`` what both have in
common where a broker keeps records, ``front`` what stands before an engine's API, ``reviews`` who knows credentials;
``log_router`` is for routers in Python that read a log themselves.
In: the configuration, and the relay's commands and events. :mod:`kvbus.config.parts` finds a member; the daemon knows
the contracts alone. They may use ``client``, ``config``, ``telemetry``, ``transport`` and ``core``.
"""
