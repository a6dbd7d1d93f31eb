"""Optional parts of kvbus: outputs, discoverers, the proxies of an engine's API, and the access to logs.

A kind of part is a folder. Each part is a module or a folder in it, and registers by an entry point. A part that needs
a library has an extra of the package. The kinds are ``outputs`` (``outputs[].type`` names the part), ``discovery``
(``sources[].discover`` names it) and ``front``, the proxies of an engine's API. Two modules are not kinds. The outputs
and discoverers of a broker share ``log``. ``log_router`` is for routers in Python that read a log.

A part receives the configuration, and the relay's commands and events. :mod:`kvbus.config.parts` finds the part. The
daemon knows only the contracts. Parts may import every package below them in the import contract.
"""
