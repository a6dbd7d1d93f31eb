"""Output drivers: they carry the outputs' streams to readers. Each type (``outputs[].type``) has one module or folder.

In: what the relay publishes and answers (:mod:`kvbus.core.commands`), one driver for each configured output.
Out: requests of readers, as events for the relay. An entry point ``kvbus.outputs`` registers a driver, and
:mod:`kvbus.config.parts` finds it. ``contract`` says what it has to do; ``zmq`` is the one that everybody has. A driver
may use the core's commands and events, the configuration and ``transport``; nothing else knows which driver it is.
"""
