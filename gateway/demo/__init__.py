"""A small inference server and a show of calls through the gateway.

The server imports nothing else of the gateway, so that tests can use it as an independent oracle.
"""
