"""A small inference server that speaks the protocol as Triton does, and a show of calls to it.

It imports nothing of the rest of the gateway, so that tests can use it as an independent oracle.
"""
