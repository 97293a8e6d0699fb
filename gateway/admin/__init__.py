"""The operators' address: status, readiness and metrics."""
