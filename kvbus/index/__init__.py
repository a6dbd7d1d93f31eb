"""``kvbus index``: a process that finds the workers whose engines hold the blocks of a prompt.

It follows the streams of buses or engines, or a log. It reads the streams through :mod:`kvbus.client`, as routers read
them. It answers questions about prompts over HTTP.
"""
