"""Requests that are sent to endpoints, until one responds."""
