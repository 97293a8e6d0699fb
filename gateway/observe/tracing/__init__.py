"""Spans of traced calls, exported over OTLP; only tracing imports it."""
