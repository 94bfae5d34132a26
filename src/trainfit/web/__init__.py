"""The page of ``trainfit serve`` and its static form: predictions in a browser, on this machine alone.

A request holds plain data and never a path. The server process imports no torch: what must be traced is
traced in a process of its own, one question at a time, which ends when the browser disconnects.
"""
