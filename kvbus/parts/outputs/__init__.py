"""Output drivers carry the outputs' streams to readers. Each type (``outputs[].type``) has one module or folder.

A driver serves one configured output. It receives the batches and answers of the relay (:mod:`kvbus.core.commands`),
and feeds the requests of readers to the relay as events. An entry point ``kvbus.outputs`` registers a driver, and
:mod:`kvbus.config.parts` finds it. ``contract`` defines what a driver has to do. ``zmq`` is the driver that needs no
extra. A driver may use the core's commands and events, the configuration and ``transport``. No code outside depends on
its type.
"""
